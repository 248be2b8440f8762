"""The row of one system in the table of systems, from the runs that launch/systems.sh made.

    python launch/systems/row.py --directory runs/systems --system gpt --run gpt

Writes DIRECTORY/rows/RUN.json. A task's metric is that of the last evaluation, on the test split if the task has one
and else on dev: no evaluation of that split chose anything.
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError, run_command
from jaxlm.files import write_json
from jaxlm.runs.metrics_log import read_metrics

TASKS = ("trec", "sst2")


def row(directory: Path, system: str, run: str) -> dict[str, Any]:
    """Return the measurements of a system. InputError for a result that is missing."""
    perplexity = directory / f"{run}-perplexity.json"  # of a model that gives texts a probability
    probe, records = read_json(directory / f"{run}-probe.json"), read_metrics(directory / run / "metrics.jsonl")
    trained = [record for record in records if "tokens_per_second" in record]
    if not trained:
        raise InputError(f"{directory / run} has no steps with a speed; run launch/systems.sh again")
    config = read_json(directory / run / "config.json")
    translated = directory / run / "results.json"
    found: dict[str, Any] = {
        "system": system,
        "seed": config["seed"],
        "parameters": probe["parameters"],
        "steps": trained[-1]["step"],
        "tokens": trained[-1]["trained_tokens"],
        "loss": trained[-1]["loss"],
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in trained),
        "bits_per_byte": read_json(perplexity)["bits_per_byte"] if perplexity.exists() else None,
        "bleu": read_json(translated)["runs"][0]["test"]["bleu"] if translated.exists() else None,
        "wnut17_embeddings": probe["embeddings"],
        "wnut17": probe["last_layer"],
        "cores": os.cpu_count(),
        "commit": commit(),
    }
    for task in TASKS:
        for arm in ("", "-scratch"):
            found[task + arm.replace("-", "_")] = accuracies(directory / f"{run}-{task}{arm}" / "results.json")
    return found


def accuracies(path: Path) -> list[float]:
    """Return the accuracy of each seed in percent, on test, or on dev for a task without test labels."""
    runs = read_json(path)["runs"]
    return [100 * (run.get("test") or run["dev"])["accuracy"] for run in runs]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. InputError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable ({error}); run launch/systems.sh again") from error


def commit() -> str:
    """Return the commit that the programs are of, with `-dirty` if they were changed."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write the row of one system.")
    parser.add_argument("--directory", type=Path, required=True, help="directory that launch/systems.sh filled")
    parser.add_argument("--system", required=True, help="name of the system")
    parser.add_argument("--run", required=True, help="name of its pretraining run in the directory")
    arguments = parser.parse_args()
    found = row(arguments.directory, arguments.system, arguments.run)
    write_json(arguments.directory / "rows" / f"{arguments.run}.json", found)
    print(json.dumps(found))


if __name__ == "__main__":
    run_command(main)
