"""Minimal pairs: BLiMP (Warstadt et al., 2020).

A pair is right if the acceptable sentence has the higher log-probability, by the sum over tokens (the paper) or by the
mean. Nothing precedes a sentence, and its first token is not scored; with `--left-context`, and in
lm-evaluation-harness, the end-of-text token precedes it, and its first token is scored.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxlm.zero_shot.task import (
    Measured,
    Text,
    ZeroShotTask,
    accuracy,
    files_of,
    json_objects,
    mean,
    summed,
)

FIELDS = ("sentence_good", "sentence_bad")
BY = {"accuracy_sum": summed, "accuracy_mean": mean}


def measure(model, path: Path, options) -> Iterator[Measured]:
    """Yield the accuracies of each paradigm, of each field, and over all paradigms, which count equally."""
    del options
    pairs, field_of = defaultdict(list), {}
    for file in files_of(path, ".jsonl"):
        for where, row in json_objects(file, FIELDS):
            paradigm = row.get("UID", file.stem)
            pairs[paradigm].append(tuple(Text((row[name],), 0, where) for name in FIELDS))
            field_of[paradigm] = row.get("field", "")
    texts = [text for paradigm in pairs.values() for pair in paradigm for text in pair]
    scores = model.scores(texts)
    for metric, score in BY.items():
        found = np.array([score(parts) for parts in scores]).reshape(-1, 2)
        right, figures, start = found[:, 0] > found[:, 1], {}, 0
        for paradigm, rows in pairs.items():
            figures[paradigm] = (*accuracy(right[start : start + len(rows)]), len(rows))
            start += len(rows)
            how = {"paradigm": paradigm, "field": field_of[paradigm]}
            yield Measured(metric, *figures[paradigm], len(rows), how)
        for name in [*sorted(set(field_of.values()) - {""}), ""]:
            inside = [figure for paradigm, figure in figures.items() if name in ("", field_of[paradigm])]
            yield Measured(metric, *_mean_of(inside), how={"field": name} if name else {})


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
