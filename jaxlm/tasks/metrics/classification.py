"""Metrics from scikit-learn and scipy: accuracy, F1, Matthews, Pearson, Spearman.

All are fractions. F1 of two classes is that of the second label (class 1: MRPC's paraphrases, `yes` of no and yes); of
more classes it is the macro mean over the task's labels. Where a metric is undefined because all predictions (or all
labels) are the same, it is 0 and a warning says so: an untrained model must not end a run with NaN.
"""

import warnings

import numpy as np

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
    if task.kind == "regression":
        predictions, labels = predictions.astype(np.float64), labels.astype(np.float64)
    return {name: _METRICS[name](task, predictions, labels) for name in task.metrics}


def _accuracy(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def _f1(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    if len(task.labels) > 2:
        return float(f1_score(labels, predictions, labels=range(len(task.labels)), average="macro", zero_division=0))
    if not (predictions == 1).any() and not (labels == 1).any():
        _warn("f1", "neither predictions nor labels contain the second class")
    return float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0))


def _matthews(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    constant = _constant("matthews", predictions, labels)
    return 0.0 if constant else float(matthews_corrcoef(labels, predictions))


def _pearson(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant("pearson", predictions, labels) else float(pearsonr(predictions, labels).statistic)


def _spearman(task: Task, predictions: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant("spearman", predictions, labels) else float(spearmanr(predictions, labels).statistic)


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


_METRICS = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews, "pearson": _pearson, "spearman": _spearman}
