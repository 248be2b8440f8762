"""Minimal pairs: BLiMP (Warstadt et al., 2020).

A pair is right if the acceptable sentence has the higher log-probability, by the sum over tokens (the paper) or by the
mean. Nothing precedes a sentence, and its first token is not scored; with `--left-context`, and in
lm-evaluation-harness, the end-of-text token precedes it, and its first token is scored.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlm.zero_shot.task import (
    Measured,
    ScoredText,
    Text,
    ZeroShotTask,
    accuracy,
    files_of,
    json_rows,
    sampled,
    scored_rows,
    shortened,
)

FIELDS = ("sentence_good", "sentence_bad")
BY: dict[str, Callable[[ScoredText], float]] = {
    "accuracy_sum": lambda text: text.sum,
    "accuracy_mean": lambda text: text.mean,
}


def measure(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracies of each paradigm, of each field, and over all paradigms, which count equally."""
    pairs, field_of = defaultdict(list), {}
    for file in files_of(path, ".jsonl"):
        for where, row in json_rows(file, FIELDS):
            paradigm = row.get("UID", file.stem)
            pairs[paradigm].append(tuple(Text((row[name],), 0, where) for name in FIELDS))
            field_of[paradigm] = row.get("field", "")
    chosen = {paradigm: sampled(rows, options.sample) for paradigm, rows in pairs.items()}
    found = iter(scored_rows(model, [pair for rows in chosen.values() for pair in rows]))
    scored = {paradigm: [next(found) for _ in rows] for paradigm, rows in chosen.items()}
    for metric, score in BY.items():
        right = {name: [score(good) > score(bad) for _, (good, bad) in rows] for name, rows in scored.items()}
        for paradigm, rows in scored.items():
            how = {"paradigm": paradigm, "field": field_of[paradigm], **shortened(rows)}
            yield Measured(metric, *accuracy(right[paradigm]), len(pairs[paradigm]), len(rows), how)
        for name in [*sorted(set(field_of.values()) - {""}), ""]:
            inside = [paradigm for paradigm in scored if name in ("", field_of[paradigm])]
            rows = [row for one in inside for row in scored[one]]
            value, error = _mean_of([accuracy(right[one]) for one in inside])
            how = ({"field": name} if name else {}) | shortened(rows)
            kept = () if name else (rows, [one for paradigm in inside for one in right[paradigm]])
            yield Measured(metric, value, error, sum(len(pairs[one]) for one in inside), len(rows), how, *kept)


def _mean_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of independent accuracies and its standard error."""
    values, errors = (np.array(column) for column in zip(*pairs, strict=True))
    return float(values.mean()), float(np.sqrt((errors**2).sum()) / len(values))


BLIMP = ZeroShotTask(
    "blimp",
    "acceptable and unacceptable sentences (a JSONL file per paradigm, or their directory)",
    measure,
    needs="any",
    harness="blimp",
)
