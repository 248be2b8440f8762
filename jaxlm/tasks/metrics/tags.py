"""Tags predicted for sentences, from a model's outputs at their tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.tasks.batching.tagged_rows import TaggedSplit
from jaxlm.tasks.entities import (
    COUNTS,
    entities,
    entity_counts,
    entity_metrics,
    entity_scores,
    metrics_of_counts,
    spell,
    token_accuracy,
)
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.metrics.report import intervals, per_class
from jaxlm.tasks.task import Task


def predict_tags(
    task: Task, encoded: TaggedSplit, outputs: Sequence[np.ndarray] | np.ndarray, threshold: float | None
) -> Predicted:
    """Return a tag for each word, and the metrics. See `predictions`; tags have no threshold.

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
    if not encoded.labelled:
        return Predicted(lines)
    truth = [example.tags or () for example in encoded.examples]
    if task.scheme == "none":
        return Predicted(lines, token_accuracy(truth, predicted), report=lambda: token_report(task, truth, predicted))
    return Predicted(lines, entity_metrics(truth, predicted), report=lambda: entity_report(truth, predicted))


def entity_report(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return precision, recall and F1 for each type of entity, as CoNLL's `conlleval`, and intervals over sentences.

    support: number of given entities. predicted: number of predicted ones.
    """
    given = [entities(tags) for tags in truth]
    found = [entities(tags) for tags in predicted]
    types = {}
    for kind in sorted({entity[0] for sentence in (*given, *found) for entity in sentence}):
        wanted = [{entity for entity in sentence if entity[0] == kind} for sentence in given]
        got = [{entity for entity in sentence if entity[0] == kind} for sentence in found]
        correct = sum(len(one & other) for one, other in zip(wanted, got, strict=True))
        support, count = sum(map(len, wanted)), sum(map(len, got))
        precision, recall, f1 = entity_scores(correct, support, count)
        types[kind] = {"precision": precision, "recall": recall, "f1": f1, "support": support, "predicted": count}
    counts = np.array([entity_counts(*pair) for pair in zip(truth, predicted, strict=True)]).reshape(-1, COUNTS)

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        return metrics_of_counts(counts[rows].sum(axis=0).tolist())

    return {"examples": len(truth), "types": types, "intervals": intervals(len(truth), metrics_of)}


def token_report(task: Task, truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return precision, recall and F1 for each tag, for tags that are token classes, and intervals over sentences."""
    names = sorted({*task.labels, *(tag for tags in (*truth, *predicted) for tag in tags)})
    numbers = {name: number for number, name in enumerate(names)}
    given, found = (np.array([numbers[tag] for tags in side for tag in tags], int) for side in (truth, predicted))
    tokens = np.array([len(tags) for tags in truth])
    correct = np.array([sum(map(str.__eq__, *pair)) for pair in zip(truth, predicted, strict=True)])

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        return {"accuracy": float(correct[rows].sum() / max(1, tokens[rows].sum()))}

    return {
        "examples": len(truth),
        "classes": per_class(names, given, found),
        "intervals": intervals(len(truth), metrics_of),
    }
