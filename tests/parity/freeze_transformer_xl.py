"""Write tests/golden/transformer_xl_parity.npz from PyTorch in float64.

`cd tests && python -m parity.freeze_transformer_xl`
"""

from parity import transformer_xl_case as case
from parity import transformer_xl_torch
from parity.check import freeze


def main() -> None:
    """Write the file."""
    found = transformer_xl_torch.answers(case.Sizes(), seed=1)
    freeze("transformer_xl", found)


if __name__ == "__main__":
    main()
