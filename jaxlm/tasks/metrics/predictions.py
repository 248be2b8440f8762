"""Predictions and metrics from a model's outputs: one entry point for every kind of task.

Classes, scores and choices are handled here, sets of labels in `label_sets.py`, spans in `answers.py` and tags in
`tags.py`.
"""

from collections.abc import Sequence

import numpy as np

from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
from jaxlm.tasks.batching.span_windows import SpanSplit
from jaxlm.tasks.batching.tagged_rows import TaggedSplit
from jaxlm.tasks.metrics.answers import predict_answers
from jaxlm.tasks.metrics.classification import class_metrics, compute_metrics
from jaxlm.tasks.metrics.label_sets import label_set_metrics, label_set_report
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.metrics.report import class_report, regression_report
from jaxlm.tasks.metrics.submission import submission
from jaxlm.tasks.metrics.tags import predict_tags
from jaxlm.tasks.task import Task


def predictions(
    task: Task, encoded: Encoded, outputs: Sequence[np.ndarray] | np.ndarray, *, threshold: float | None = None
) -> Predicted:
    """Return the predictions and metrics of these outputs.

    Args:
      outputs: the head's outputs for each row of `encoded`, in order: float (outputs,), or (C,) for choices, or
        (length, outputs) for spans and tags, padded or not.
      threshold: for questions that may have no answer, the score above that of no answer which an answer needs (the
        paper's tau). None: tuned on this split if it is labelled, and returned as the metric `threshold`; else the
        task's own, or 0.
    """
    if len(outputs) != len(encoded):
        raise ValueError(f"outputs must have one entry per row ({len(encoded)}), got {len(outputs)}")
    if task.kind == "span":
        assert isinstance(encoded, SpanSplit)
        return predict_answers(task, encoded, outputs, threshold)
    if task.kind == "tagging":
        assert isinstance(encoded, TaggedSplit)
        return predict_tags(task, encoded, outputs)
    assert isinstance(encoded, EncodedSplit)
    lines = [task.prediction(row) for row in outputs]
    files = submission(task, encoded.part, [prediction for prediction, _ in lines])
    if not encoded.labelled or not len(encoded):
        return Predicted(lines, {}, files)
    numbers, labels = np.asarray(outputs).reshape(len(encoded), -1), encoded.labels
    if task.kind == "multilabel":
        return Predicted(
            lines,
            label_set_metrics(task, numbers, labels),
            files,
            report=lambda: label_set_report(task, numbers, labels),
        )
    metrics = _metrics(task, encoded, numbers)
    if task.kind == "regression":
        return Predicted(lines, metrics, files, report=lambda: regression_report(task, numbers[:, 0], labels))
    return Predicted(lines, metrics, files, report=lambda: class_report(task, numbers, labels))


def _metrics(task: Task, encoded: EncodedSplit, numbers: np.ndarray) -> dict[str, float]:
    """Return the metrics of classes, choices or scores, also for each group of examples."""
    labels, groups = encoded.labels, np.array(encoded.groups)
    predicted = numbers[:, 0] if task.kind == "regression" else numbers.argmax(axis=1)
    metrics = (
        compute_metrics(task, predicted, labels) if task.kind == "regression" else class_metrics(task, numbers, labels)
    )
    for group in dict.fromkeys(encoded.groups):
        rows = groups == group
        of_group = compute_metrics(task, predicted[rows], labels[rows])
        metrics |= {f"{name}_{group}": value for name, value in of_group.items()}
    return metrics
