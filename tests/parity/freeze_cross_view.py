"""Write tests/golden/cross_view_parity.npz from PyTorch in float64: in tests/, `python -m parity.freeze_cross_view`."""

from parity import cross_view_case as case
from parity import cross_view_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    tree, rows = case.make_tree(case.SIZES, seed=1), case.make_rows(case.SIZES, seed=2)
    freeze("cross_view", cross_view_torch.answers(case.SIZES, tree, rows))


if __name__ == "__main__":
    main()
