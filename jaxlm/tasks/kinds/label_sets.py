"""Tasks whose rows have any number of labels, with their metrics from scikit-learn.

A label is predicted if its probability, the sigmoid of its output, is at least the task's threshold.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Example
from jaxlm.tasks.kinds.texts import TextTask
from jaxlm.tasks.metrics.report import intervals, per_class, ratio
from jaxlm.tasks.task import Kind

if TYPE_CHECKING:
    from jaxlm.tasks.custom import CustomConfig

DEFAULT_THRESHOLD = 0.5  # probability that a label needs


@dataclass(frozen=True, kw_only=True)
class LabelSets(TextTask):
    """A classification whose label is a set of names, with a threshold for their probabilities."""

    kind: Kind = "multilabel"
    metric: str = "micro_f1"
    metrics: tuple[str, ...] = ("micro_f1", "macro_f1", "exact_match")
    has_label_sets = has_weights = is_ranked = True

    def parse_label(self, text: Any) -> tuple[str, ...]:
        """Return the names that a file spells `text`, in the order of `labels`, each once."""
        return tuple(
            sorted({str(super(LabelSets, self).parse_label(name)) for name in text}, key=self._numbers[0].__getitem__)
        )

    def label_number(self, label: Any) -> list[float]:
        """Return 1 for each label that is given, else 0."""
        return [float(name in label) for name in self.labels]

    def no_targets(self, count: int) -> np.ndarray:
        """Return zeros, float32 (count, labels)."""
        return np.zeros((count, len(self.labels)), np.float32)

    def label_set(self, logits: np.ndarray) -> np.ndarray:
        """Return True for each predicted label, bool (…, labels), from outputs."""
        return probability(logits) >= (DEFAULT_THRESHOLD if self.threshold is None else self.threshold)

    def named_by(self, rows: list[tuple[int, Example]], custom: "CustomConfig", name: str) -> Self:
        names = sorted({label for _, example in rows for label in example.label or ()})  # type: ignore[union-attr]
        if len(names) < 2:
            raise InputError(f"{name}: a multilabel task needs two or more labels, got {', '.join(names) or 'none'}")
        return dataclasses.replace(self, labels=tuple(names))

    def prediction(self, outputs: np.ndarray) -> tuple[list[str], dict[str, float]]:
        """Return the names of the labels that reach the threshold, and the probability of each label."""
        outputs = self.checked_outputs(outputs)
        names = [name for name, given in zip(self.labels, self.label_set(outputs), strict=True) if given]
        return names, dict(zip(self.labels, probability(outputs).tolist(), strict=True))

    def measured(self, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return micro_f1, macro_f1, exact_match and log_loss of outputs (n, labels)."""
        from sklearn.metrics import accuracy_score, f1_score

        given, predicted = targets > 0.5, self.label_set(outputs)
        found = {
            "micro_f1": float(f1_score(given, predicted, average="micro", zero_division=0)),
            "macro_f1": float(f1_score(given, predicted, average="macro", zero_division=0)),
            "exact_match": float(accuracy_score(given, predicted)),
        }
        return {name: found[name] for name in self.metrics} | {"log_loss": float(_losses(outputs, given).mean())}

    def report(self, outputs: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
        """Return precision, recall, F1 and support for each label, and intervals."""
        given, predicted = targets > 0.5, self.label_set(outputs)
        losses, exact = _losses(outputs, given).mean(axis=1), (given == predicted).all(axis=1)
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
            "classes": per_class(self.labels, given, predicted),
            "intervals": intervals(len(given), metrics_of),
        }

    def averaged(self, outputs: np.ndarray) -> np.ndarray:
        """Return the logits of the mean probabilities."""
        return _log_mean(np.logaddexp(0.0, -outputs)) - _log_mean(np.logaddexp(0.0, outputs))

    def is_right(self, prediction: Any, label: Any) -> bool:
        """Return True if both are the same set of labels."""
        if isinstance(prediction, list) and isinstance(label, list):
            return set(map(str, prediction)) == set(map(str, label))
        return bool(prediction == label)


def probability(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of float outputs, float64."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, np.float64)))


def _losses(logits: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood of each label's presence or absence, float64 (n, labels)."""
    logits = np.asarray(logits, np.float64)
    return np.logaddexp(0.0, np.where(given, -logits, logits))


def _log_mean(negative_logarithms: np.ndarray) -> np.ndarray:
    """Return the logarithm of the mean over runs of exp(-x)."""
    found: np.ndarray = np.log(np.maximum(np.exp(-negative_logarithms).mean(axis=0), 1e-300))
    return found
