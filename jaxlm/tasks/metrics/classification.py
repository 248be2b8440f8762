"""Metrics of classes and scores from scikit-learn and scipy, and the details that go with all metrics of a report.

All are fractions. F1 is that of the task's positive class: the chosen one, or of two labels the second (class 1: MRPC's
paraphrases, `yes` of no and yes). Otherwise it is the macro mean over the task's labels. Where a metric is undefined
because all predictions (or all labels) are the same, it is 0 and a warning says so: an untrained model must not end a
run with NaN.

A report has, where its kind of task has them:
    examples           number of examples
    classes            label -> precision, recall, f1, support (examples with that label)
    confusion_matrix   a list per given label, of the number of examples with each predicted label, in their order
    calibration        a list of bins from low to high: examples, accuracy, and mean probability of the predicted label
    intervals          level, resamples, seed, and [low, high] per metric
Types of entities, and questions with and without an answer, are listed as `types` with the metrics of the official
scorers.

Intervals are those of the bootstrap (Efron 1979), with the percentile method: RESAMPLES times, as many examples as the
split has are sampled from it with replacement, from a fixed seed. The interval of a metric spans the middle LEVEL of
its values. It describes the choice of examples, not the seeds of training.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.tasks.metrics import BINS
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


RESAMPLES = 1000
LEVEL = 0.95
SEED = 0
SHOWN_CLASSES = 40  # classes of a table on screen
SHOWN_CONFUSIONS = 12  # classes of a confusion matrix on screen


def class_report(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the report of a classification, or of a choice, which has no metrics per class.

    Args:
      logits: float (n, classes). labels: int (n,), the given classes.
    """
    count, classes = len(labels), logits.shape[1]
    predicted, labels = logits.argmax(axis=1), np.asarray(labels, np.int64)
    cells, likelihood = labels * classes + predicted, -log_probabilities(logits, labels)
    confidence, bins = calibration_bins(logits)
    gap = (predicted == labels) - confidence
    positive = None if task.positive is None else task.labels.index(task.positive)

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        confusion = np.bincount(cells[rows], minlength=classes**2).reshape(classes, classes)
        found = confusion_metrics(confusion, positive)
        found = {name: value for name, value in found.items() if name in (*task.further_metrics, *task.metrics)}
        gaps = np.bincount(bins[rows], weights=gap[rows], minlength=BINS)
        of_probabilities = {
            "log_loss": float(likelihood[rows].mean()),
            "calibration_error": float(np.abs(gaps).sum() / count),
        }
        return found | of_probabilities

    report: dict[str, Any] = {"examples": count}
    if not task.has_choices:
        confusion = np.bincount(cells, minlength=classes**2).reshape(classes, classes)
        report["classes"] = per_class(task.labels, labels, predicted)
        report["confusion_matrix"] = confusion.tolist()
    return report | {
        "calibration": calibration_json(calibration_table(logits, labels)),
        "intervals": intervals(count, metrics_of),
    }


def per_class(names: Sequence[str], labels: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Return label -> precision, recall, f1 and support, 0 where undefined.

    labels, predicted: int (n,) classes, or bool (n, classes) for several labels per example.
    """
    from sklearn.metrics import precision_recall_fscore_support

    table = precision_recall_fscore_support(labels, predicted, labels=range(len(names)), zero_division=0)
    columns = ("precision", "recall", "f1", "support")
    rows = zip(*(column.tolist() for column in table), strict=True)
    return {name: dict(zip(columns, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def calibration_json(table: np.ndarray) -> list[dict[str, Any]]:
    """Return the bins of a `calibration_table`; accuracy and probability of an empty bin are None."""
    return [
        {
            "examples": int(count),
            "accuracy": float(correct / count) if count else None,
            "probability": float(probability / count) if count else None,
        }
        for count, correct, probability in table
    ]


def intervals(count: int, metrics_of: Callable[[np.ndarray], Mapping[str, float]]) -> dict[str, Any]:
    """Return `level`, `resamples`, `seed`, and [low, high] for each metric; no metrics for fewer than two examples.

    Args:
      count: number of examples. metrics_of: returns the metrics of the examples of these indices, int (count,).
    """
    found: dict[str, Any] = {"level": LEVEL, "resamples": RESAMPLES, "seed": SEED}
    if count < 2:
        return found
    random = np.random.Generator(np.random.Philox(SEED))
    sampled = [metrics_of(random.integers(0, count, count)) for _ in range(RESAMPLES)]
    bounds = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    for name in sampled[0]:
        low, high = np.quantile([metrics[name] for metrics in sampled], bounds)
        found[name] = [float(low), float(high)]
    return found


def confusion_metrics(confusion: np.ndarray, positive: int | None) -> dict[str, float]:
    """Return accuracy, f1, macro_f1, micro_f1 and matthews from a confusion matrix, for the resamples.

    scikit-learn computes the metrics themselves. Its calls would take seconds for all resamples.

    Args:
      confusion: (classes, classes), the given class by rows. positive: the class of `f1`, None for the macro mean.
    """
    confusion = confusion.astype(np.float64)
    total, correct = confusion.sum(), np.trace(confusion)
    given, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    f1 = ratio(2 * np.diag(confusion), given + predicted)
    covariance = correct * total - given @ predicted
    spread = (total**2 - predicted @ predicted) * (total**2 - given @ given)
    return {
        "accuracy": float(correct / total),
        "f1": float(f1.mean() if positive is None else f1[positive]),
        "macro_f1": float(f1.mean()),
        "micro_f1": float(correct / total),
        "matthews": float(covariance / np.sqrt(spread)) if spread > 0 else 0.0,
    }


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return numerator / denominator, 0 where the denominator is 0."""
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1.0), 0.0)


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a report as human-readable lines."""
    lines: list[str] = []
    for title in ("classes", "types"):
        if title in report:
            lines += _table(report[title])
    matrix, names = report.get("confusion_matrix"), list(report.get("classes", ()))
    if matrix is not None and len(names) <= SHOWN_CONFUSIONS:
        width = max(8, *(len(name) + 2 for name in names))
        corner = "given, predicted"
        label = max(len(corner), *map(len, names))
        lines.append(f"{corner:<{label}}" + "".join(f"{name:>{width}}" for name in names))
        for name, row in zip(names, matrix, strict=True):
            lines.append(f"{name:<{label}}" + "".join(f"{count:>{width},}" for count in row))
    lines += [f"{metric}: {signature}" for metric, signature in report.get("signatures", {}).items()]
    found = report.get("intervals", {})
    ranges = {name: value for name, value in found.items() if isinstance(value, list)}
    if ranges:
        lines.append(
            f"{LEVEL:.0%} intervals by the bootstrap ({found['resamples']:,} resamples of {report['examples']:,} "
            f"examples, seed {found['seed']}):"
        )
        lines += [f"  {name:<18}{low:.4f} to {high:.4f}" for name, (low, high) in ranges.items()]
    return lines


def _table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table of a dictionary for each class or type."""
    if not rows:
        return []
    columns = list(next(iter(rows.values())))
    if len(rows) > SHOWN_CLASSES:
        return [f"{len(rows)} classes: their {', '.join(columns)} are in results.json"]
    label = max(len("class"), *(len(name) for name in rows))
    lines = [f"{'':<{label}}" + "".join(f"{column:>12}" for column in columns)]
    for name, values in rows.items():
        cells = (f"{value:>12,}" if isinstance(value, int) else f"{value:>12.4f}" for value in values.values())
        lines.append(f"{name:<{label}}" + "".join(cells))
    return lines
