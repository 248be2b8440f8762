"""Write tests/golden/transformer_xl_parity.npz from PyTorch in float64.

`cd tests && python -m parity.freeze_transformer_xl`
"""

from pathlib import Path

import numpy as np

from parity import transformer_xl_case as case
from parity import transformer_xl_torch

FILE = Path(__file__).resolve().parent.parent / "golden" / "transformer_xl_parity.npz"


def main() -> None:
    """Write the file, all numbers as float32."""
    found = transformer_xl_torch.answers(case.Sizes(), seed=1)
    np.savez_compressed(
        FILE,
        **{f"{group}/{name}": np.float32(value) for group, members in found.items() for name, value in members.items()},
    )


if __name__ == "__main__":
    main()
