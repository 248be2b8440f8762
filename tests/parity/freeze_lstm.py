"""Write tests/golden/lstm_parity.npz from torch.nn.LSTM in float64: `cd tests && python -m parity.freeze_lstm`."""

from pathlib import Path

import numpy as np

from parity import lstm_case as case
from parity import lstm_torch

FILE = Path(__file__).resolve().parent.parent / "golden" / "lstm_parity.npz"


def main() -> None:
    """Write the file, all numbers as float32."""
    sizes = case.Sizes()
    found = lstm_torch.answers(sizes, case.make_tree(sizes, seed=1), case.make_stretches(sizes, seed=2))
    np.savez_compressed(
        FILE,
        **{f"{group}/{name}": np.float32(value) for group, members in found.items() for name, value in members.items()},
    )


if __name__ == "__main__":
    main()
