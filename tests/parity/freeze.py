"""Write the golden files of the references again: `cd tests && python -m parity.freeze [NAME …]`.

A name is that of a script freeze_NAME.py beside this file, whose docstring says what it needs; none: all of them. A
script whose packages are missing is named, and the others are written; the exit code is then 1.
"""

import argparse
import importlib
from pathlib import Path

NAMES = sorted(path.stem.removeprefix("freeze_") for path in Path(__file__).parent.glob("freeze_*.py"))


def main() -> None:
    """Write the files of the names in the arguments."""
    parser = argparse.ArgumentParser(description="Write golden files of tests/golden from their references.")
    parser.add_argument("name", nargs="*", help=f"any of {', '.join(NAMES)}; default: all")
    names = parser.parse_args().name
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {unknown[0]}")
    missing = []
    for name in names or NAMES:
        try:
            script = importlib.import_module(f"parity.freeze_{name}")
        except ImportError as error:
            missing.append(name)
            print(f"{name}: not written: {error}")
            continue
        script.main()
        print(f"{name}: written")
    raise SystemExit(1 if missing else 0)


if __name__ == "__main__":
    main()
