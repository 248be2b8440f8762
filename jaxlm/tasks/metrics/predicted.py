"""Predictions of a split: one per example, with the task's metrics and the files that other programs read.

GLUE's server scores one TSV for each test split: a header `index<TAB>prediction`, the index counting from 0 in each
file, no quoting; words for MNLI, AX, QNLI and RTE, integers for the rest, three decimals between 0 and 5 for STS-B. It
requires all eleven files in one archive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlm.tasks.batching.encoded_split import Encoded
from jaxlm.tasks.task import Task

SUBMITTED = {
    ("cola", "test"): "CoLA",
    ("sst2", "test"): "SST-2",
    ("mrpc", "test"): "MRPC",
    ("stsb", "test"): "STS-B",
    ("qqp", "test"): "QQP",
    ("mnli", "test_matched"): "MNLI-m",
    ("mnli", "test_mismatched"): "MNLI-mm",
    ("mnli", "ax"): "AX",
    ("qnli", "test"): "QNLI",
    ("rte", "test"): "RTE",
    ("wnli", "test"): "WNLI",
}


@dataclass(frozen=True)
class Predicted:
    """The predictions of one split, in the order of its examples.

    lines: for each example (prediction, scores): a name and a probability for each label; a number and nothing; the
    text of an answer; a list of tags. metrics: metric -> value, empty where the split has no labels. files: path
    relative to the run's directory -> text, or a value to be written as JSON. ranked: for each question its answers,
    best first, with `text` and `probability`; empty for other kinds. report: computes the details of the metrics as
    JSON values, in about a second, see `jaxlm.tasks.metrics.report`; empty where the split has no labels.
    """

    lines: list[tuple[Any, dict[str, Any]]]
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    ranked: list[list[dict[str, Any]]] = field(default_factory=list)
    report: Callable[[], dict[str, Any]] = field(default=dict, compare=False)


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
    return task.predicted(encoded, outputs, threshold)


def submission(task: Task, part: str, predictions: Sequence[Any]) -> dict[str, str]:
    """Return `glue/NAME.tsv` -> its text, for a split that GLUE's server scores; empty for another.

    predictions: as `Task.prediction` gives them, in the order of the split.
    """
    name = SUBMITTED.get((task.name, part))
    if name is None:
        return {}
    if task.has_scores:
        predictions = [f"{min(max(float(score), 0.0), 5.0):.3f}" for score in predictions]
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions))
    return {f"glue/{name}.tsv": "index\tprediction\n" + rows}
