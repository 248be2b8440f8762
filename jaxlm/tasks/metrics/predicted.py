"""Predictions of a split: one per example, with the task's metrics and the files that other programs read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
