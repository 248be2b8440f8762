"""The loss of a labelled task as a sum and a weight: cross-entropy, with class weights and label smoothing, and others.

Class weights and smoothing are those of PyTorch's CrossEntropyLoss with its mean reduction: the weight of a batch is
the sum of the weights of its given classes. Several labels per example have the loss of BCEWithLogitsLoss.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.data.batch import ExampleBatch
from jaxlm.objectives.objective import cross_entropy

ABSENT = -1e30  # score of an absent choice: finite, with an exp of 0


@dataclass(frozen=True)
class TaskLoss:
    """The loss of a task of a kind, as a sum over part of a batch and a weight over all of it.

    class_weights: one per class, tag or label; empty where all are 1. Of `multilabel` they multiply the loss of labels
    that are given (`pos_weight`). label_smoothing: fraction e of the target that is distributed over all classes, tags
    or present choices alike; of `multilabel` the targets are y (1 - e) + e / 2.
    """

    kind: str
    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def sum(self, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
        """Return the sum over examples of the cross-entropy over classes or choices (nats), or of the squared error.

        span: over windows, of the mean cross-entropy of the first and last token. tagging: over tokens that have a tag.
        multilabel: over examples and labels, of the binary cross-entropy.
        """
        if self.kind == "regression":
            return jnp.sum(batch.weights * jnp.square(outputs[:, 0] - batch.labels))
        if self.kind == "span":
            both = cross_entropy(jnp.swapaxes(outputs, 1, 2), batch.labels)
            return jnp.sum(batch.weights * jnp.mean(both, axis=-1))
        if self.kind == "multilabel":
            return jnp.sum(batch.weights[:, None] * self._binary(outputs, batch.labels))
        if self.kind == "tagging":
            return jnp.sum(tag_weights(batch) * self._cross_entropy(outputs, jnp.maximum(batch.labels, 0)))
        return jnp.sum(batch.weights * self._cross_entropy(outputs, batch.labels))

    def weight(self, batch: ExampleBatch) -> jax.Array:
        """Return the number of terms in the loss of a batch, rows, tags or labels, each by the weight of its class."""
        weights = tag_weights(batch) if self.kind == "tagging" else batch.weights
        if self.kind == "multilabel":
            return jnp.sum(weights) * batch.labels.shape[1]
        if self.class_weights:
            weights = weights * self._weights()[jnp.maximum(batch.labels, 0)]
        return jnp.sum(weights)

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

    def _binary(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        if self.label_smoothing:
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        positive = labels * jax.nn.softplus(-logits)
        if self.class_weights:
            positive = self._weights() * positive
        return positive + (1 - labels) * jax.nn.softplus(logits)

    def _weights(self) -> jax.Array:
        return jnp.asarray(self.class_weights, jnp.float32)


def tag_weights(batch: ExampleBatch) -> jax.Array:
    """Return 1 for each token with a tag, in rows that count: (E, L)."""
    return batch.weights[:, None] * (batch.labels >= 0)
