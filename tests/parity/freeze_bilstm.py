"""Write tests/golden/bilstm_parity.npz from PyTorch in float64: `cd tests && python -m parity.freeze_bilstm`."""

from parity import bilstm_case as case
from parity import bilstm_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    sizes = case.Sizes()
    freeze("bilstm", bilstm_torch.answers(sizes, case.make_tree(sizes, seed=1), case.make_rows(sizes, seed=2)))


if __name__ == "__main__":
    main()
