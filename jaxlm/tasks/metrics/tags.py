"""Tags predicted for sentences, from a model's outputs at their tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.tasks.batching.tagged_rows import TaggedSplit
from jaxlm.tasks.entities import entities, entity_figures, spell, token_accuracy
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.task import Task


def predict_tags(task: Task, encoded: TaggedSplit, outputs: Sequence[np.ndarray] | np.ndarray) -> Predicted:
    """A tag for each word, and the figures. See `predictions`.

    Scores are `probabilities`, that of each word's tag; None for words that the model did not see.
    """
    lines: list[tuple[Any, dict[str, Any]]] = []
    predicted: list[list[str]] = []
    for row, example in enumerate(encoded.examples):
        low, high = encoded.own[row]
        begin = 1 + low - encoded.read[row, 0]
        words = encoded.words[low:high]
        scores = np.asarray(outputs[row], np.float64)[begin : begin + high - low][words >= 0]
        shares = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        shares /= shares.sum(axis=1, keepdims=True)
        unseen = "O" if task.scheme != "none" else ""
        tags, probabilities = [unseen] * len(example.tokens), _nothing(len(example.tokens))
        for word, share in zip(words[words >= 0], shares, strict=True):
            tags[word] = task.labels[int(share.argmax())]
            probabilities[word] = float(share.max())
        predicted.append(tags)
        spelt = spell(entities(tags), len(tags), "iob1") if task.scheme == "iob1" else tags
        lines.append((spelt, {"probabilities": probabilities}))
    figures = {}
    if encoded.labelled:
        truth = [example.tags or () for example in encoded.examples]
        figures = token_accuracy(truth, predicted) if task.scheme == "none" else entity_figures(truth, predicted)
    return Predicted(lines, figures, {})


def _nothing(count: int) -> list[float | None]:
    return [None] * count
