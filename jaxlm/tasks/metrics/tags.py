"""Tags predicted for sentences, from a model's outputs at their tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.tasks.batching.tagged_rows import TaggedSplit
from jaxlm.tasks.entities import entities, entity_metrics, spell, token_accuracy
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.task import Task


def predict_tags(task: Task, encoded: TaggedSplit, outputs: Sequence[np.ndarray] | np.ndarray) -> Predicted:
    """Return a tag for each word, and the metrics. See `predictions`.

    Scores are `probabilities`, that of each word's tag; None for words that the model did not see.
    """
    lines: list[tuple[Any, dict[str, Any]]] = []
    predicted: list[list[str]] = []
    for row, example in enumerate(encoded.examples):
        low, high = encoded.own[row]
        begin = 1 + low - encoded.read[row, 0]
        words = encoded.words[low:high]
        scores = np.asarray(outputs[row], np.float64)[begin : begin + high - low][words >= 0]
        distributions = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        distributions /= distributions.sum(axis=1, keepdims=True)
        unseen = "O" if task.scheme != "none" else ""
        tags = [unseen] * len(example.tokens)
        probabilities: list[float | None] = [None] * len(example.tokens)
        for word, distribution in zip(words[words >= 0], distributions, strict=True):
            tags[word] = task.labels[int(distribution.argmax())]
            probabilities[word] = float(distribution.max())
        predicted.append(tags)
        spelt = spell(entities(tags), len(tags), "iob1") if task.scheme == "iob1" else tags
        lines.append((spelt, {"probabilities": probabilities}))
    metrics = {}
    if encoded.labelled:
        truth = [example.tags or () for example in encoded.examples]
        metrics = token_accuracy(truth, predicted) if task.scheme == "none" else entity_metrics(truth, predicted)
    return Predicted(lines, metrics, {})
