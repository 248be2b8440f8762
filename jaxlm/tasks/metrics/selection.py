"""The metric that selects evaluations, learning rates and seeds."""

import dataclasses
import math

from jaxlm.tasks.examples import TaskData
from jaxlm.tasks.metrics.catalogue import LOSS, check_metric, lower_is_better, names_for
from jaxlm.tasks.task import Task

PREDICTED = ("accuracy", "f1", "macro_f1", "micro_f1", "matthews")  # of a classification's labels, not probabilities

_OF_ANSWERS = {"f1_answerable": True, "f1_unanswerable": False}  # metrics that need such questions


def selected_by(task: Task, data: TaskData, name: str) -> Task:
    """Return the task with another selecting metric. InputError for a metric that the task does not have."""
    groups = dict.fromkeys(getattr(example, "group", "") for example in data.splits[task.selects].examples)
    known = (*names_for(task.kind), *(f"{metric}_{group}" for metric in task.metrics for group in groups if group))
    if task.scheme == "none":  # token classes
        known = tuple(metric for metric in known if metric in (*task.metrics, LOSS))
    if task.kind == "span":
        answered = (
            {bool(example.answers) for example in data.splits[task.selects].examples} if task.no_answer else set()
        )
        absent = {metric for metric, answer in _OF_ANSWERS.items() if answer not in answered}
        known = tuple(metric for metric in known if metric not in absent)
    if task.kind == "regression":
        known = (*task.metrics, LOSS)
    check_metric(name, "--select-by", tuple(dict.fromkeys(known)))
    reported = task.kind == "classification" and name in PREDICTED
    metrics = (name, *(other for other in task.metrics if other != name)) if reported else task.metrics
    return dataclasses.replace(task, metric=name, metrics=metrics)


def is_better(task: Task, value: float, before: float) -> bool:
    """Return True if a value of the task's selecting metric is strictly better than another, or the other is NaN."""
    if math.isnan(before):
        return not math.isnan(value)
    return rank(task, value) > rank(task, before)


def rank(task: Task, value: float) -> float:
    """Return a number that is higher for better values of the task's selecting metric."""
    return -value if lower_is_better(task.metric) else value
