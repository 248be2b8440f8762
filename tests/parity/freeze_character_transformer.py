"""Write tests/golden/character_transformer_parity.npz: `cd tests && python -m parity.freeze_character_transformer`."""

from pathlib import Path

import numpy as np

from parity import character_transformer_case as case
from parity import character_transformer_torch

FILE = Path(__file__).resolve().parent.parent / "golden" / "character_transformer_parity.npz"


def main() -> None:
    """Write the file, all numbers as float32."""
    sizes = case.Sizes()
    found = character_transformer_torch.answers(sizes, case.make_tree(sizes, 1), case.make_batches(sizes, 2))
    np.savez_compressed(
        FILE,
        **{f"{group}/{name}": np.float32(value) for group, members in found.items() for name, value in members.items()},
    )


if __name__ == "__main__":
    main()
