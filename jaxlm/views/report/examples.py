"""Examples of a run's predictions: the wrong ones first where the gold labels are known."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.tasks import Task

TRIAL = ("seed", "learning_rate")
NOT_INPUTS = {"split", "index", *TRIAL, "prediction", "scores", "label"}


@dataclass(frozen=True)
class Examples:
    """Predictions of one trial on one split.

    lines: as in predictions.jsonl, at most the requested number. total: all of the split. wrong: those that differ
    from their label; None if the lines have no labels or are numbers, of which those with the largest error are shown.
    """

    split: str
    trial: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    total: int
    wrong: int | None

    @property
    def inputs(self) -> list[str]:
        """The names of the columns of the rows."""
        return list(dict.fromkeys(name for line in self.lines for name in line if name not in NOT_INPUTS))

    @property
    def labelled(self) -> bool:
        """True if the lines have labels."""
        return any("label" in line for line in self.lines)


def read_examples(
    lines: Iterable[Mapping[str, Any]], task: Task | None, best: Mapping[str, Any] | None, count: int
) -> Examples | None:
    """Return the first `count` wrong predictions, or the first ones without labels; None of an empty file.

    They are those of the best trial, by default the first of the file, on the split that selects, by default the first.
    Raises KeyError or TypeError for lines of another kind.
    """
    kept: list[Mapping[str, Any]] = []
    trial, split = best and {name: best[name] for name in TRIAL}, task and task.selects
    for line in lines:
        int(line["index"]), line["prediction"]
        trial = trial or {name: line.get(name) for name in TRIAL}
        split = split or line["split"]
        if line["split"] == split and all(line.get(name) == value for name, value in trial.items()):
            kept.append(line)
    if not kept or trial is None:
        return None
    given = [line for line in kept if line.get("label") is not None]
    if not given:
        return Examples(str(split), trial, kept[:count], len(kept), None)
    if all(isinstance(line["prediction"], int | float) for line in given):
        ordered = sorted(given, key=lambda line: -abs(float(line["prediction"]) - float(line["label"])))
        return Examples(str(split), trial, ordered[:count], len(kept), None)
    is_right = operator.eq if task is None else task.is_right
    wrong = [line for line in given if not is_right(line["prediction"], line["label"])]
    return Examples(str(split), trial, wrong[:count], len(kept), len(wrong))
