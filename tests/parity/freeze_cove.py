"""Write tests/golden/cove_parity.npz by torch.nn.LSTM in float64: `cd tests && python -m parity.freeze_cove`."""

from parity import cove_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    freeze("cove", cove_torch.answers())


if __name__ == "__main__":
    main()
