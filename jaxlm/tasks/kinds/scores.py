"""Tasks whose label is a number."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxlm.tasks.examples import Split
from jaxlm.tasks.kinds.texts import TextTask
from jaxlm.tasks.metrics.catalogue import LOSS
from jaxlm.tasks.metrics.classification import compute_metrics
from jaxlm.tasks.metrics.report import intervals
from jaxlm.tasks.task import Kind


@dataclass(frozen=True, kw_only=True)
class Regression(TextTask):
    """A regression: the head learns standardized scores, (score - mean) / deviation of the training split.

    Standardizing gives every regression loss the same scale (1 for always predicting the mean), whatever unit a user's
    scores have; correlations are unaffected.
    """

    kind: Kind = "regression"
    metric: str = "pearson"
    metrics: tuple[str, ...] = ("pearson", "spearman")
    fixed_outputs = 1
    has_scores = True

    def fitted(self, train: Split) -> Self:
        """Return the task with mean and deviation of the training scores (deviation 1 if all are equal)."""
        scores = np.array([example.label for example in train.examples], np.float64)
        return dataclasses.replace(self, mean=float(scores.mean()), deviation=float(scores.std()) or 1.0)

    def parse_label(self, text: Any) -> float:
        """Return the score that a file spells `text`. Raise ValueError unless it is a finite number."""
        try:
            score = float(text)
        except ValueError:
            raise ValueError(f"a score must be a number, got {text!r}") from None
        if not math.isfinite(score):
            raise ValueError(f"a score must be finite, got {text!r}")
        return score

    def label_number(self, label: Any) -> float:
        """Return the standardized score."""
        return (float(label) - self.mean) / self.deviation

    def no_targets(self, count: int) -> np.ndarray:
        """Return zeros, float32 (count,)."""
        return np.zeros(count, np.float32)

    def prediction(self, outputs: np.ndarray) -> tuple[float, dict[str, float]]:
        """Return the score in the files' unit, and nothing."""
        return float(np.asarray(outputs, np.float64).reshape(-1)[0] * self.deviation + self.mean), {}

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """Return the standardized scores."""
        return outputs[:, 0]

    def measured(self, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        return compute_metrics(self, self.values(outputs), targets)

    def report(self, outputs: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
        """Return intervals only."""
        from scipy.stats import rankdata

        predicted = self.values(outputs)

        def correlation(x: np.ndarray, y: np.ndarray) -> float:
            x, y = x - x.mean(), y - y.mean()
            spread = np.sqrt((x @ x) * (y @ y))
            return float(x @ y / spread) if spread > 0 else 0.0

        def metrics_of(rows: np.ndarray) -> dict[str, float]:
            x, y = predicted[rows].astype(np.float64), targets[rows].astype(np.float64)
            found = {}
            if "pearson" in self.metrics:
                found["pearson"] = correlation(x, y)
            if "spearman" in self.metrics:
                found["spearman"] = correlation(rankdata(x), rankdata(y))
            return found

        finite = bool(np.isfinite(predicted).all())
        return {"examples": len(targets)} | ({"intervals": intervals(len(targets), metrics_of)} if finite else {})

    def selectable(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return the task's metrics and the loss."""
        return (*self.metrics, LOSS)

    def averaged(self, outputs: np.ndarray) -> np.ndarray:
        """Return the mean score."""
        mean: np.ndarray = outputs.mean(axis=0)
        return mean
