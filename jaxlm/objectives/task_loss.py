"""The loss of each kind of task as a sum and a weight: cross-entropy, with weights and smoothing, and others.

Class weights and smoothing are those of PyTorch's CrossEntropyLoss with its mean reduction: the weight of a batch is
the sum of the weights of its given classes. Several labels per example have the loss of BCEWithLogitsLoss.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxlm.data.batch import ExampleBatch
from jaxlm.objectives.objective import cross_entropy

ABSENT = -1e30  # score of an absent choice: finite, with an exp of 0


@dataclass(frozen=True)
class TaskLoss:
    """The loss of a task, as a sum over part of a batch and a weight over all of it: cross-entropy over classes.

    class_weights: one per class, tag or label; empty where all are 1. label_smoothing: fraction e of the target that is
    distributed over all classes, tags or present choices alike. has_accuracy: True if an output has one right value.
    """

    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    has_accuracy: ClassVar[bool] = True

    def counts(self, batch: ExampleBatch) -> jax.Array:
        """Return 1 for each label that counts, in the shape of the labels, else 0."""
        return batch.weights

    def masked(self, scores: jax.Array, batch: ExampleBatch) -> jax.Array:
        """Return the scores with ABSENT where there is nothing to score."""
        return scores

    def sum(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        """Return the sum of the loss over the batch, in nats, or of the squared error."""
        return jnp.sum(self.counts(batch) * self._cross_entropy(outputs, jnp.maximum(batch.labels, 0)))

    def weight(self, batch: ExampleBatch) -> jax.Array:
        """Return the number of terms in the loss of a batch, rows, tags or labels, each by the weight of its class."""
        weights = self.counts(batch)
        if self.class_weights:
            weights = weights * self._weights()[jnp.maximum(batch.labels, 0)]
        return jnp.sum(weights)

    def num_correct(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        """Return the number of correct examples, whole spans or tags."""
        return jnp.sum(self.counts(batch) * (jnp.argmax(outputs, axis=-1) == batch.labels))

    def _cross_entropy(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        found = cross_entropy(scores, labels)
        if self.class_weights:
            found = found * self._weights()[labels]
        if not self.label_smoothing:
            return found
        weights = self._weights() if self.class_weights else jnp.ones(scores.shape[-1])
        each = jax.nn.logsumexp(scores, axis=-1, keepdims=True) - scores
        present = scores > ABSENT / 2
        over_all = jnp.sum(jnp.where(present, weights * each, 0.0), axis=-1) / jnp.sum(present, axis=-1)
        return (1 - self.label_smoothing) * found + self.label_smoothing * over_all

    def _weights(self) -> jax.Array:
        return jnp.asarray(self.class_weights, jnp.float32)


class ChoiceLoss(TaskLoss):
    """Cross-entropy over the choices of an example, which may have fewer than its neighbours."""

    def masked(self, scores: jax.Array, batch: ExampleBatch) -> jax.Array:
        return jnp.where(batch.lengths > 0, scores, ABSENT)


class LabelSetLoss(TaskLoss):
    """Binary cross-entropy over examples and labels.

    class_weights multiply the loss of labels that are given (`pos_weight`). With smoothing e the targets are
    y (1 - e) + e / 2.
    """

    has_accuracy = False

    def sum(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        labels = batch.labels
        if self.label_smoothing:
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        positive = labels * jax.nn.softplus(-outputs)
        if self.class_weights:
            positive = self._weights() * positive
        return jnp.sum(batch.weights[:, None] * (positive + (1 - labels) * jax.nn.softplus(outputs)))

    def weight(self, batch: ExampleBatch) -> jax.Array:
        return jnp.sum(batch.weights) * batch.labels.shape[1]


class ScoreLoss(TaskLoss):
    """Squared error of standardized scores."""

    has_accuracy = False

    def sum(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        return jnp.sum(batch.weights * jnp.square(outputs[:, 0] - batch.labels))


class SpanLoss(TaskLoss):
    """Mean cross-entropy of the first and last token of a span, over windows."""

    def masked(self, scores: jax.Array, batch: ExampleBatch) -> jax.Array:
        real_BL = jnp.arange(scores.shape[1]) < batch.lengths.reshape(-1, 1)
        return jnp.where(real_BL[..., None], scores, ABSENT)

    def sum(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        both = cross_entropy(jnp.swapaxes(outputs, 1, 2), batch.labels)
        return jnp.sum(batch.weights * jnp.mean(both, axis=-1))

    def num_correct(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        return jnp.sum(batch.weights * jnp.all(jnp.argmax(outputs, axis=1) == batch.labels, axis=-1))


class TagLoss(TaskLoss):
    """Cross-entropy over the tags of tokens that have one."""

    def counts(self, batch: ExampleBatch) -> jax.Array:
        return batch.weights[:, None] * (batch.labels >= 0)


LOSSES: dict[str, type[TaskLoss]] = {
    "classification": TaskLoss,
    "multilabel": LabelSetLoss,
    "regression": ScoreLoss,
    "choice": ChoiceLoss,
    "span": SpanLoss,
    "tagging": TagLoss,
}
"""The loss of each kind of task."""
