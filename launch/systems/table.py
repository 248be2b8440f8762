"""The table of systems, from the rows that launch/systems.sh wrote.

    python launch/systems/table.py --rows docs/systems

Means and sample deviations are over the seeds of the fine-tuning. If a system was pretrained with several seeds, each
of them counts as the mean of its fine-tunings, and the deviation is that over the pretrainings.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError, run_command
from jaxlm.files import write_file

# The systems in the order in which they were published, with what they read.
TITLES = {
    "lstm": ("LSTM", "pieces"),
    "awd_lstm": ("AWD-LSTM", "pieces"),
    "mt_lstm": ("MT-LSTM (CoVe)", "pieces"),
    "elmo": ("ELMo", "words"),
    "gpt": ("GPT", "pieces"),
    "character_transformer": ("character Transformer", "bytes"),
    "bert": ("BERT", "pieces"),
    "transformer_xl": ("Transformer-XL", "pieces"),
    "t5": ("T5", "pieces"),
}
COLUMNS = {
    "trec": "TREC-6",
    "trec_scratch": "TREC-6, from scratch",
    "sst2": "SST-2, 1,000 labels",
    "sst2_scratch": "SST-2, from scratch",
    "wnut17": "WNUT-17 F1, probe",
    "wnut17_embeddings": "probe of the embeddings",
}


def read_rows(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each system, by name. InputError for a directory without rows, or a damaged row."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TITLES}
    for path in sorted(directory.glob("*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            found[row["system"]].append(row)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InputError(f"{path} is not a row of a system ({error}); run launch/systems.sh again") from error
    if not any(found.values()):
        raise InputError(f"--rows must have rows of systems, got {directory}; run launch/systems.sh")
    return {name: rows for name, rows in found.items() if rows}


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean and sample deviation, or the value if there is one."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def of_seeds(rows: Sequence[dict[str, Any]], column: str) -> str:
    """Return the cell of a column that has a value for each fine-tuning."""
    if len(rows) > 1:
        return spread([statistics.fmean(row[column]) for row in rows], 1)
    return spread(rows[0][column], 1)


def of_pretraining(rows: Sequence[dict[str, Any]], column: str, digits: int) -> str:
    """Return the cell of a column that has one value for each pretraining, or none."""
    return "none" if rows[0][column] is None else spread([row[column] for row in rows], digits)


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown."""
    headings = ["system", "parameters", "tokens read", "tokens/s", "seeds", "bits per byte", "BLEU", *COLUMNS.values()]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for name, rows in found.items():
        title, unit = TITLES[name]
        cells = [
            title,
            f"{rows[0]['parameters'] / 1e6:.2f} M",
            f"{rows[0]['tokens'] / 1e6:.1f} M {unit}",
            f"{statistics.median(row['tokens_per_second'] for row in rows):,.0f}",
            str(len(rows)),
            of_pretraining(rows, "bits_per_byte", 3),
            of_pretraining(rows, "bleu", 1),
            *(of_seeds(rows, column) for column in COLUMNS),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Print the table of systems.")
    parser.add_argument("--rows", type=Path, required=True, help="directory of the rows")
    parser.add_argument("--output", type=Path, help="file that the table is written to, too")
    arguments = parser.parse_args()
    text = table(read_rows(arguments.rows))
    if arguments.output is not None:
        write_file(arguments.output, text)
    print(text, end="")


if __name__ == "__main__":
    run_command(main)
