"""Write tests/golden/echo_parity.npz from PyTorch in float64: `cd tests && python -m parity.freeze_echo`."""

from pathlib import Path

import numpy as np

from parity import echo_case, echo_torch
from parity import lstm_case as case

FILE = Path(__file__).resolve().parent.parent / "golden" / "echo_parity.npz"


def main() -> None:
    """Write the file, all numbers as float32."""
    sizes = case.Sizes()
    found = echo_torch.answers(sizes, echo_case.make_tree(sizes, seed=1), case.make_stretches(sizes, seed=2))
    np.savez_compressed(
        FILE,
        **{f"{group}/{name}": np.float32(value) for group, members in found.items() for name, value in members.items()},
    )


if __name__ == "__main__":
    main()
