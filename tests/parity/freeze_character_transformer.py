"""Write tests/golden/character_transformer_parity.npz: `cd tests && python -m parity.freeze_character_transformer`."""

from parity import character_transformer_case as case
from parity import character_transformer_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    found = character_transformer_torch.answers(sizes, case.make_tree(sizes, 1), case.make_batches(sizes, 2))
    freeze("character_transformer", found)


if __name__ == "__main__":
    main()
