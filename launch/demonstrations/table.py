"""The table of a demonstration: mean and sample deviation over the seeds, and differences to the first row.

    python launch/demonstrations/table.py --directory DIR --seeds 0 1 2 --columns 'TITLE=FILE:REDUCTION:KEY' … \\
        --rows NAME=TITLE …

FILE is relative to DIR; {row} and {seed} in it stand for a row's name and a seed. REDUCTION is how a file gives one
number: `value` of a JSON object (KEY may have dots); `mean` of a part of a list in it (KEY is NAME.FIRST:END); `min`,
`last`, `recent`, the mean of the last ten, or a number, counted from 0, of the records of a metrics.jsonl that have
KEY. A difference is that of the same seed.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError, run_command
from jaxlm.files import write_file, write_json
from jaxlm.runs.metrics_log import read_metrics

RECENT = 10


def number(path: Path, reduction: str, key: str) -> float:
    """Return one number of a file. InputError if the file or the key is missing."""
    if not path.exists():
        raise InputError(f"{path} does not exist; run launch/demonstrate.sh again")
    if reduction == "mean":
        key, _, part = key.rpartition(".")
        first, end = map(int, part.split(":"))
        return statistics.fmean(_value(path, key)[first:end])
    if reduction == "value":
        return float(_value(path, key))
    values = [record[key] for record in read_metrics(path) if key in record]
    if not values:
        raise InputError(f"{path} has no {key}; run launch/demonstrate.sh again")
    if reduction.isdigit():
        if int(reduction) >= len(values):
            raise InputError(f"{path} has {len(values)} records with {key}; run launch/demonstrate.sh again")
        return float(values[int(reduction)])
    reductions = {"min": min, "last": lambda x: x[-1], "recent": lambda x: statistics.fmean(x[-RECENT:])}
    if reduction not in reductions:
        allowed = "value, mean, min, last, recent or a number"
        raise InputError(f"REDUCTION must be {allowed}, got {reduction}; choose one of them")
    return float(reductions[reduction](values))


def _value(path: Path, key: str) -> Any:
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    for part in key.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
        if found is None:
            raise InputError(f"{path} has no {key}; run launch/demonstrate.sh again")
    return found


def cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return mean and sample deviation; the mean alone of one value."""
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write a table of a demonstration, NAME.md and NAME.json.")
    parser.add_argument("--directory", type=Path, required=True, help="directory that launch/demonstrate.sh filled")
    parser.add_argument("--seeds", nargs="+", required=True, help="seeds")
    parser.add_argument("--name", default="table", help="NAME of NAME.md and NAME.json (default table)")
    parser.add_argument("--columns", nargs="+", required=True, help="TITLE=FILE:REDUCTION:KEY")
    parser.add_argument("--rows", nargs="+", required=True, help="NAME=TITLE")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all numbers, 100 for percent")
    parser.add_argument("--digits", type=int, default=3, help="digits after the point")
    arguments = parser.parse_args()
    columns = dict(column.split("=", 1) for column in arguments.columns)
    rows = dict(row.split("=", 1) for row in arguments.rows)
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found[row] = {}
        for title, source in columns.items():
            file, reduction, key = source.split(":", 2)
            paths = [arguments.directory / file.format(row=row, seed=seed) for seed in arguments.seeds]
            found[row][title] = [arguments.scale * number(path, reduction, key) for path in paths]
    first = next(iter(found.values()))
    headings = ["", *(heading for title in columns for heading in (title, "difference"))]
    lines = [" | ".join(headings), "|".join("---" for _ in headings)]
    for row, title in rows.items():
        cells = [title]
        for column, values in found[row].items():
            gaps = [value - base for value, base in zip(values, first[column], strict=True)]
            gap = "" if found[row] is first else cell(gaps, arguments.digits, "+")
            cells += [cell(values, arguments.digits), gap]
        lines.append(" | ".join(cells))
    text = "\n".join(f"|{line}|" if set(line) <= {"-", "|"} else f"| {line} |" for line in lines) + "\n"
    write_json(arguments.directory / f"{arguments.name}.json", {rows[row]: values for row, values in found.items()})
    write_file(arguments.directory / f"{arguments.name}.md", text)
    print(text, end="")


if __name__ == "__main__":
    run_command(main)
