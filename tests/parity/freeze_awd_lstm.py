"""Write tests/golden/awd_lstm_parity.npz from PyTorch in float64: `cd tests && python -m parity.freeze_awd_lstm`."""

from parity import awd_lstm_case as case
from parity import awd_lstm_torch
from parity.check import freeze


def inputs(sizes: case.Sizes, seed: int) -> tuple:
    """Return the parameters, masks and windows of a case."""
    return case.make_tree(sizes, seed), case.make_masks(sizes, seed + 1), case.make_windows(sizes, seed + 2)


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    found = awd_lstm_torch.answers(sizes, *inputs(sizes, seed=1))
    freeze("awd_lstm", found)


if __name__ == "__main__":
    main()
