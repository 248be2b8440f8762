"""From a model's outputs to predictions and figures: one entrance for every kind of task.

Classes, scores and choices are here; spans (`answers.py`) and tags (`tagging.py`) have pages of their own.
"""

from collections.abc import Sequence

import numpy as np

from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
from jaxlm.tasks.batching.span_windows import SpanSplit
from jaxlm.tasks.batching.tagged_rows import TaggedSplit
from jaxlm.tasks.metrics.answers import predict_answers
from jaxlm.tasks.metrics.classification import compute_metrics
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.metrics.submission import submission
from jaxlm.tasks.metrics.tags import predict_tags
from jaxlm.tasks.task import Task


def predictions(
    task: Task, encoded: Encoded, outputs: Sequence[np.ndarray] | np.ndarray, *, threshold: float | None = None
) -> Predicted:
    """What `outputs` come to.

    Args:
      outputs: the head's numbers for each row of `encoded`, in order: float (outputs,), or (C,) for choices, or
        (length, outputs) for spans and tags, padded or not.
      threshold: for questions that may have no answer, how much better than none an answer must be (the paper's tau).
        None: tuned on this part if it is labelled, and given as the figure `threshold`; else the task's own, or 0.
    """
    if len(outputs) != len(encoded):
        raise ValueError(f"{len(outputs)} outputs for {len(encoded)} rows")
    if task.kind == "span":
        assert isinstance(encoded, SpanSplit)
        return predict_answers(task, encoded, outputs, threshold)
    if task.kind == "tagging":
        assert isinstance(encoded, TaggedSplit)
        return predict_tags(task, encoded, outputs)
    assert isinstance(encoded, EncodedSplit)
    lines = [task.prediction(row) for row in outputs]
    files = submission(task, encoded.part, [prediction for prediction, _ in lines])
    return Predicted(lines, _figures(task, encoded, outputs), files)


def _figures(task: Task, encoded: EncodedSplit, outputs: Sequence[np.ndarray] | np.ndarray) -> dict[str, float]:
    if not encoded.labelled or not len(encoded):
        return {}
    numbers = np.asarray(outputs).reshape(len(encoded), -1)
    predicted = numbers[:, 0] if task.kind == "regression" else numbers.argmax(axis=1)
    figures = compute_metrics(task, predicted, encoded.labels)
    groups = np.array(encoded.groups)
    for group in dict.fromkeys(encoded.groups):
        rows = groups == group
        apart = compute_metrics(task, predicted[rows], encoded.labels[rows])
        figures |= {f"{name}_{group}": value for name, value in apart.items()}
    return figures
