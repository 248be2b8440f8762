"""Write tests/golden/lstm_parity.npz from torch.nn.LSTM in float64: `cd tests && python -m parity.freeze_lstm`."""

from parity import lstm_case as case
from parity import lstm_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    found = lstm_torch.answers(sizes, case.make_tree(sizes, seed=1), case.make_stretches(sizes, seed=2))
    freeze("lstm", found)


if __name__ == "__main__":
    main()
