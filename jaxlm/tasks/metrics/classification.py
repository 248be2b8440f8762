"""Metrics from scikit-learn and scipy: accuracy, F1, Matthews, Pearson, Spearman, and those of probabilities.

All are fractions. F1 is that of the task's positive class: the chosen one, or of two labels the second (class 1: MRPC's
paraphrases, `yes` of no and yes). Otherwise it is the macro mean over the task's labels. Where a metric is undefined
because all predictions (or all labels) are the same, it is 0 and a warning says so: an untrained model must not end a
run with NaN.
"""

import functools
import warnings
from collections.abc import Callable

import numpy as np

from jaxlm.tasks.metrics.catalogue import BINS
from jaxlm.tasks.task import Task


def compute_metrics(task: Task, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the task's metrics by name.

    Args:
      predictions: int (n,) class or choice numbers, or float (n,) scores in any linear unit.
      labels: the true values, in the same form.
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape or predictions.ndim != 1 or not len(labels):
        raise ValueError(
            f"predictions and labels must be equal (n,) with n > 0, got {predictions.shape}, {labels.shape}"
        )
    if task.has_scores:
        predictions, labels = predictions.astype(np.float64), labels.astype(np.float64)
    return {name: _METRICS[name](task, predictions, labels) for name in task.metrics}


def _accuracy(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def _f1(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    if task.positive is None:
        return _mean_f1("macro", task, predictions, labels)
    number = task.labels.index(task.positive)
    if not (predictions == number).any() and not (labels == number).any():
        _warn("f1", f"neither predictions nor labels contain the class {task.positive!r}")
    return float(f1_score(labels == number, predictions == number, average="binary", zero_division=0))


def _mean_f1(average: str, task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, labels=range(len(task.labels)), average=average, zero_division=0))


def _matthews(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    constant = _constant("matthews", predictions, labels)
    return 0.0 if constant else float(matthews_corrcoef(labels, predictions))


def _correlation(name: str, task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from scipy import stats

    if _constant(name, predictions, labels):
        return 0.0
    return float(getattr(stats, f"{name}r")(predictions, labels).statistic)


def _constant(name: str, predictions: np.ndarray, labels: np.ndarray) -> bool:
    for what, values in (("predictions", predictions), ("labels", labels)):
        if not np.isfinite(values).all():
            _warn(name, f"some {what} are not finite")
            return True
        # scipy's own bound for "nearly constant": below it a correlation is rounding noise.
        spread = np.abs(values - values.mean()).max()
        if spread <= 1e-13 * abs(values.mean()):
            _warn(name, f"all {what} are the same")
            return True
    return False


def _warn(name: str, why: str) -> None:
    warnings.warn(f"{name}: {why}, so it is undefined; reported as 0", stacklevel=2)


_METRICS: dict[str, Callable[..., float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": functools.partial(_mean_f1, "macro"),
    "micro_f1": functools.partial(_mean_f1, "micro"),
    "matthews": _matthews,
    "pearson": functools.partial(_correlation, "pearson"),
    "spearman": functools.partial(_correlation, "spearman"),
}


def class_metrics(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the task's metrics and the others of every classification or choice.

    Args:
      logits: float (n, classes). labels: int (n,), the classes.
    """
    predictions = logits.argmax(axis=1)
    found = compute_metrics(task, predictions, labels)
    found |= {name: _METRICS[name](task, predictions, labels) for name in task.further_metrics if name not in found}
    calibration = calibration_table(logits, labels)
    return found | {
        "log_loss": float(-log_probabilities(logits, labels).mean()),
        "calibration_error": float(np.abs(calibration[:, 1] - calibration[:, 2]).sum() / len(labels)),
    }


def log_probabilities(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the log-probability of each label, float64 (n,)."""
    from scipy.special import log_softmax

    found: np.ndarray = log_softmax(np.asarray(logits, np.float64), axis=1)
    return np.take_along_axis(found, np.asarray(labels, np.int64)[:, None], axis=1)[:, 0]


def calibration_bins(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each predicted label, float64 (n,), and the number of its bin, int (n,)."""
    confidence = np.exp(log_probabilities(logits, logits.argmax(axis=1)))
    return confidence, np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_table(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (BINS, 3): for each bin its examples, the correct ones, and the sum of their probabilities."""
    confidence, bins = calibration_bins(logits)
    correct = logits.argmax(axis=1) == labels
    columns = (np.ones(len(labels)), correct, confidence)
    return np.stack([np.bincount(bins, weights=column, minlength=BINS) for column in columns], axis=1)
