"""The table of systems, from the directory that launch/systems.sh filled.

    python launch/systems/table.py --directory runs/systems

Means and sample deviations are over the seeds. A task's metric is that of the last evaluation, on the test split if the
task has one and else on dev: no evaluation of that split chose anything.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlm.errors import InputError, run_command
from jaxlm.files import write_file, write_json
from jaxlm.runs.metrics_log import read_metrics

TASKS = {"trec": "TREC-6", "sst2": "SST-2, 1,000 labels"}


def systems(directory: Path) -> list[dict[str, Any]]:
    """Return the measurements of each system. InputError for a result that is missing."""
    found = []
    for path in sorted(directory.glob("*-probe.json")):
        name = path.name.removesuffix("-probe.json")
        perplexity = directory / f"{name}-perplexity.json"  # of a model that gives texts a probability
        probe, records = read_json(path), read_metrics(directory / name / "metrics.jsonl")
        trained = [record for record in records if "tokens_per_second" in record]
        if not trained:
            raise InputError(f"{directory / name} has no steps with a speed; run launch/systems.sh again")
        system: dict[str, Any] = {
            "system": name,
            "parameters": probe["parameters"],
            "steps": trained[-1]["step"],
            "loss": trained[-1]["loss"],
            "tokens_per_second": statistics.median(record["tokens_per_second"] for record in trained),
            "bits_per_byte": read_json(perplexity)["bits_per_byte"] if perplexity.exists() else None,
            "wnut17_embeddings": probe["embeddings"],
            "wnut17": probe["last_layer"],
        }
        for task in TASKS:
            for arm in ("", "-scratch"):
                system[task + arm.replace("-", "_")] = accuracies(directory / f"{name}-{task}{arm}" / "results.json")
        found.append(system)
    if not found:
        raise InputError(f"{directory} has no results of systems; run launch/systems.sh")
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


def cell(values: Sequence[float]) -> str:
    """Return mean and sample deviation."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def table(found: Sequence[dict[str, Any]], commit: str) -> str:
    """Return the table in Markdown."""
    headings = ["system", "parameters", "tokens/s", "bits per byte"]
    headings += [f"{title}{arm}" for title in TASKS.values() for arm in ("", ", from scratch")]
    headings += ["WNUT-17 F1, probe", "probe of the embeddings"]
    lines = [" | ".join(headings), "|".join("---" for _ in headings)]
    for system in found:
        bits = system["bits_per_byte"]
        cells = [
            system["system"],
            f"{system['parameters'] / 1e6:.2f} M",
            f"{system['tokens_per_second']:,.0f}",
            "no density" if bits is None else f"{bits:.3f}",
            *(cell(system[task + arm]) for task in TASKS for arm in ("", "_scratch")),
            cell(system["wnut17"]),
            cell(system["wnut17_embeddings"]),
        ]
        lines.append(" | ".join(cells))
    rows = "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)
    return f"{rows}\n\nCommit {commit}, {os.cpu_count()} cores.\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write systems.md and systems.json, the table of systems.")
    parser.add_argument("--directory", type=Path, required=True, help="directory that launch/systems.sh filled")
    directory = parser.parse_args().directory
    found = systems(directory)
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    git = subprocess.run(asked, capture_output=True, text=True, check=False)
    text = table(found, git.stdout.strip() or "unknown")
    write_json(directory / "systems.json", found)
    write_file(directory / "systems.md", text)
    print(text, end="")


if __name__ == "__main__":
    run_command(main)
