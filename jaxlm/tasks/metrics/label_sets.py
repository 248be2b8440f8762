"""Metrics of tasks whose examples have any number of labels, from scikit-learn.

A label is predicted if its probability, the sigmoid of its output, is at least the task's threshold.
"""

from typing import Any

import numpy as np

from jaxlm.tasks.metrics.intervals import intervals, ratio
from jaxlm.tasks.metrics.report import per_class
from jaxlm.tasks.task import Task


def label_set_metrics(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return micro_f1, macro_f1, exact_match and log_loss.

    Args:
      logits: float (n, labels). labels: (n, labels), 1 for each given label, else 0.
    """
    from sklearn.metrics import accuracy_score, f1_score

    given, predicted = labels > 0.5, task.label_set(logits)
    found = {
        "micro_f1": float(f1_score(given, predicted, average="micro", zero_division=0)),
        "macro_f1": float(f1_score(given, predicted, average="macro", zero_division=0)),
        "exact_match": float(accuracy_score(given, predicted)),
    }
    return {name: found[name] for name in task.metrics} | {"log_loss": float(_losses(logits, given).mean())}


def label_set_report(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the report: precision, recall, F1 and support for each label, and intervals."""
    given, predicted = labels > 0.5, task.label_set(logits)
    losses, exact = _losses(logits, given).mean(axis=1), (given == predicted).all(axis=1)
    shared = given & predicted

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        times = np.bincount(rows, minlength=len(given)).astype(np.float64)
        correct, total = times @ shared, times @ given + times @ predicted
        micro = 2 * correct.sum() / total.sum() if total.sum() else 0.0
        return {
            "micro_f1": float(micro),
            "macro_f1": float(ratio(2 * correct, total).mean()),
            "exact_match": float(exact[rows].mean()),
            "log_loss": float(losses[rows].mean()),
        }

    return {
        "examples": len(given),
        "classes": per_class(task.labels, given, predicted),
        "intervals": intervals(len(given), metrics_of),
    }


def _losses(logits: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood of each label's presence or absence, float64 (n, labels)."""
    logits = np.asarray(logits, np.float64)
    return np.logaddexp(0.0, np.where(given, -logits, logits))
