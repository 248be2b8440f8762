"""Write tests/golden/awd_lstm_parity.npz from PyTorch in float64: `cd tests && python -m parity.freeze_awd_lstm`."""

from pathlib import Path

import numpy as np

from parity import awd_lstm_case as case
from parity import awd_lstm_torch

FILE = Path(__file__).resolve().parent.parent / "golden" / "awd_lstm_parity.npz"


def inputs(sizes: case.Sizes, seed: int) -> tuple:
    """Return the parameters, masks and windows of a case."""
    return case.make_tree(sizes, seed), case.make_masks(sizes, seed + 1), case.make_windows(sizes, seed + 2)


def main() -> None:
    """Write the file, all numbers as float32."""
    sizes = case.Sizes()
    found = awd_lstm_torch.answers(sizes, *inputs(sizes, seed=1))
    np.savez_compressed(
        FILE,
        **{f"{group}/{name}": np.float32(value) for group, members in found.items() for name, value in members.items()},
    )


if __name__ == "__main__":
    main()
