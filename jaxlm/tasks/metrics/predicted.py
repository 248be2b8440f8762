"""What a model's outputs come to: a prediction a line, the task's figures, and the files that others read."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Predicted:
    """The predictions of one part, in the order of its examples.

    lines: for each example (prediction, scores): a name and a probability for each label; a number and nothing; the
    text of an answer; a list of tags. figures: metric -> value, empty where the part has no labels. files: name, below
    the run's directory, -> text, or what is to be written as JSON.
    """

    lines: list[tuple[Any, dict[str, Any]]]
    figures: dict[str, float] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
