"""Confidence intervals of metrics by the bootstrap (Efron 1979), with the percentile method.

RESAMPLES times, as many examples as the split has are sampled from it with replacement, from a fixed seed. The interval
of a metric spans the middle LEVEL of its values. It describes the choice of examples, not the seeds of training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0


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
