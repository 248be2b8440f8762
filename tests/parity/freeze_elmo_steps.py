"""Write tests/golden/elmo_steps_parity.npz by PyTorch in float64: `cd tests && python -m parity.freeze_elmo_steps`."""

from parity import elmo_case as case
from parity import elmo_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    freeze("elmo_steps", elmo_torch.answers(case.Training()))


if __name__ == "__main__":
    main()
