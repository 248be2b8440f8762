"""Write tests/golden/bcn_parity.npz from PyTorch in float64: `cd tests && python -m parity.freeze_bcn`.

It has the form of the paper. A group's name is that of its case, pairs or single, and of its content.
"""

from parity import bcn_case as case
from parity import bcn_torch
from parity.check import Groups, freeze


def found() -> Groups:
    """Return the numbers of both cases."""
    groups: Groups = {}
    for name, sizes in (("pairs", case.PAIRS), ("single", case.SINGLE)):
        tree = case.make_tree(sizes, seed=1, sides=("first", "second"), normed=True)
        numbers = bcn_torch.answers(sizes, tree, case.make_rows(sizes, seed=2))
        groups |= {f"{name}_{group}": members for group, members in numbers.items()}
    return groups


def main() -> None:
    """Write the file."""
    freeze("bcn", found())


if __name__ == "__main__":
    main()
