"""Write tests/golden/mt_lstm_parity.npz by the authors' code in float64: `cd tests && python -m parity.freeze_mt_lstm`.

`COVE` names a directory with the sources of salesforce/cove.
"""

from parity import mt_lstm_case as case
from parity import mt_lstm_onmt
from parity.check import freeze


def main() -> None:
    """Write the file."""
    groups = {"halving": {"rates": mt_lstm_onmt.halvings()}}
    for name, sizes in case.CASES.items():
        rows = case.make_rows(sizes, seed=3)
        found = {"rows": rows} | mt_lstm_onmt.answers(sizes, case.make_tree(sizes, case.SEEDS[name]), rows)
        groups |= {f"{name}:{group}": members for group, members in found.items()}
    freeze("mt_lstm", groups)


if __name__ == "__main__":
    main()
