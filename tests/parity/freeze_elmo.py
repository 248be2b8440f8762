"""Write tests/golden/elmo_parity.npz from the authors' code in float64: `cd tests && python -m parity.freeze_elmo`.

`ALLENNLP` and `BILM` name directories with the sources of allenai/allennlp at v0.9.0 and of allenai/bilm-tf.
"""

from parity import elmo_allennlp
from parity import elmo_case as case
from parity.check import freeze


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    found = elmo_allennlp.answers(sizes, case.make_tensors(sizes, seed=1), case.make_batches(sizes, seed=2))
    freeze("elmo", found | {"characters": {"ids": elmo_allennlp.characters()}})


if __name__ == "__main__":
    main()
