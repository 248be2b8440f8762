"""The model card of an export: what it is, what it was trained on, what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def model_card(
    *, architecture: str, run: str, config: dict[str, Any], directory: Path, notes: Sequence[str] = ()
) -> str:
    """Markdown with the run's config and the figures of its results.json, or the last of its metrics.jsonl."""
    model = config["model"]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [jaxlm]",
        "---",
        "",
        f"# {architecture} from jaxlm",
        "",
        f"Exported from the run `{run}`: {model['num_layers']} layers of width {model['width']}, {model['num_heads']} "
        f"heads, {model['num_positions']} positions, a vocabulary of {model['vocab_size']:,}.",
        "",
    ]
    lines += [f"- {note}" for note in notes]
    figures = _results(directory / "results.json") or _last_metrics(directory / "metrics.jsonl")
    if figures:
        lines += ["## What was measured", "", *figures, ""]
    return "\n".join([*lines, "## The run's config", "", "```json", json.dumps(config, indent=2), "```", ""])


def _results(file: Path) -> list[str]:
    if not file.exists():
        return []
    results = json.loads(file.read_text(encoding="utf-8"))
    lines = [f"Task {results['task']}, {len(results['runs'])} run(s), mean ± deviation:", "", "| part | figure | |"]
    lines.append("|---|---|---|")
    for part in ("dev", "test"):
        for name, value in (results.get(part) or {}).items():
            lines.append(f"| {part} | {name} | {value['mean']:.4f} ± {value['std']:.4f} |")
    return lines


def _last_metrics(file: Path) -> list[str]:
    if not file.exists():
        return []
    last: dict[str, Any] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # a line that is being written
            continue
        last |= {
            name: value for name, value in line.items() if name == "step" or "loss" in name or "perplexity" in name
        }
    return ["| figure | |", "|---|---|", *(f"| {name} | {value} |" for name, value in last.items())] if last else []
