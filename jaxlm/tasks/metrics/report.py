"""Details of a split's metrics: per class or type, the confusion matrix, the calibration, and confidence intervals.

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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.tasks.metrics.catalogue import BINS
from jaxlm.tasks.metrics.classification import (
    calibration_bins,
    calibration_table,
    log_probabilities,
)
from jaxlm.tasks.task import Task

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
