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
    json_objects,
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
    del options
    pairs, field_of = defaultdict(list), {}
    for file in files_of(path, ".jsonl"):
        for where, row in json_objects(file, FIELDS):
            paradigm = row.get("UID", file.stem)
            pairs[paradigm].append(tuple(Text((row[name],), 0, where) for name in FIELDS))
            field_of[paradigm] = row.get("field", "")
    found = iter(scored_rows(model, [pair for rows in pairs.values() for pair in rows]))
    scores = {paradigm: [next(found) for _ in rows] for paradigm, rows in pairs.items()}
    for metric, score in BY.items():
        figures = {}
        for paradigm, rows in scores.items():
            figures[paradigm] = (*accuracy([score(good) > score(bad) for good, bad in rows]), len(rows))
            how = {"paradigm": paradigm, "field": field_of[paradigm], **shortened(rows)}
            yield Measured(metric, *figures[paradigm], len(rows), how)
        for name in [*sorted(set(field_of.values()) - {""}), ""]:
            inside = [paradigm for paradigm in figures if name in ("", field_of[paradigm])]
            how = ({"field": name} if name else {}) | shortened([row for one in inside for row in scores[one]])
            yield Measured(metric, *_mean_of([figures[one] for one in inside]), how=how)


def _mean_of(figures: Sequence[tuple[float, float, int]]) -> tuple[float, float, int, int]:
    """Return the mean of independent accuracies, its standard error, and the number of rows, twice."""
    values, errors, counts = (np.array(column) for column in zip(*figures, strict=True))
    rows = int(counts.sum())
    return float(values.mean()), float(np.sqrt((errors**2).sum()) / len(values)), rows, rows


BLIMP = ZeroShotTask(
    "blimp",
    "acceptable and unacceptable sentences (a JSONL file per paradigm, or their directory)",
    measure,
    needs="any",
    harness="blimp",
)
