"""Write tests/golden/scalar_mix_parity.npz from the authors' code: `cd tests && python -m parity.freeze_scalar_mix`.

`BILM` names a directory with the sources of allenai/bilm-tf. TensorFlow is needed.
"""

from parity import scalar_mix_bilm
from parity import scalar_mix_case as case
from parity.check import freeze


def main() -> None:
    """Write the file."""
    freeze("scalar_mix", scalar_mix_bilm.answers(case.make(seed=1)))


if __name__ == "__main__":
    main()
