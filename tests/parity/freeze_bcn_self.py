"""Write tests/golden/bcn_self_parity.npz from AllenNLP in float64: `cd tests && python -m parity.freeze_bcn_self`.

`ALLENNLP` names a directory with the sources of allenai/allennlp at v0.9.0.
"""

from parity import bcn_allennlp
from parity import bcn_case as case
from parity.check import freeze


def main() -> None:
    """Write the file."""
    tree = case.make_tree(case.SINGLE, seed=1, sides=("only",), normed=False)
    freeze("bcn_self", bcn_allennlp.answers(case.SINGLE, tree, case.make_rows(case.SINGLE, seed=2)))


if __name__ == "__main__":
    main()
