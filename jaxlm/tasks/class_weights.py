"""Weights of the classes of a task in its loss, as given or from the training split."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Split
from jaxlm.tasks.task import Task

BALANCED = "balanced"
SHOWN = 20  # labels in a message


def check_smoothing(task: Task, label_smoothing: float) -> None:
    """Raise InputError for label smoothing of a kind of task without classes."""
    if label_smoothing and not (task.has_weights or task.has_choices or task.generates):
        raise InputError(f"--label-smoothing must be 0 for a {task.kind} task, got {label_smoothing}; leave it out")


def class_weights(given: Sequence[str], task: Task, train: Split) -> tuple[float, ...]:
    """Return the weight of each label of the task; empty if none are given.

    given: `balanced`, or NAME=WEIGHT for some labels. A label without examples in train has the weight 1 if balanced.

    Raises:
      InputError: a kind of task without classes, an unknown label, or a weight out of range.
    """
    if not given:
        return ()
    if not task.has_weights:
        raise InputError(f"--class-weights must be left out for a {task.kind} task, got {' '.join(given)}; remove it")
    if BALANCED in given:
        if len(given) > 1:
            raise InputError(f"--class-weights must be {BALANCED} or NAME=WEIGHT, got {' '.join(given)}; give one")
        return _balanced(task, train)
    weights = dict.fromkeys(task.labels, 1.0)
    named: set[str] = set()
    for entry in given:
        name, _, value = entry.rpartition("=")
        if name not in weights or name in named:
            twice = " twice" if name in named else ""
            raise InputError(
                f"--class-weights must name each label at most once, as NAME=WEIGHT, with the labels "
                f"{', '.join(task.labels[:SHOWN])}, got {entry}{twice}; give one of them, or {BALANCED}"
            )
        named.add(name)
        weights[name] = _number(entry, value)
    if not any(weights.values()):
        raise InputError(f"--class-weights must have a weight above 0, got {' '.join(given)}; raise one")
    return tuple(weights.values())


def weight_notes(task: Task) -> tuple[str, ...]:
    """Return a human-readable line with the weight of each of the first labels; none where all are 1."""
    if not task.class_weights:
        return ()
    pairs = list(zip(task.labels, task.class_weights, strict=True))
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return (f"class weights: {', '.join(f'{name} {weight:.4g}' for name, weight in pairs[:SHOWN])}{more}",)


def _number(entry: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"--class-weights must have finite weights of at least 0, got {entry}; give another weight")
    return value


def _balanced(task: Task, train: Split) -> tuple[float, ...]:
    """Return scikit-learn's `compute_class_weight("balanced")`, or the ratio of absence to presence of each label."""
    counts = Counter(name for example in train.examples for name in task.label_names(example))
    found = np.array([counts[name] for name in task.labels], np.float64)
    if task.has_label_sets:
        ratios = (len(train.examples) - found) / np.maximum(found, 1)
    else:
        ratios = found.sum() / (np.count_nonzero(found) * np.maximum(found, 1))
    return tuple(np.where(found > 0, ratios, 1.0).tolist())
