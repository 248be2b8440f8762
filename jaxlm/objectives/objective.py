"""Objectives: losses and metrics as pairs of a sum and a weight.

A mean over a batch that is split into micro-batches, devices or processes is exact only if its weight is computed from
the whole batch first. An objective computes its weights from the whole batch, and its sums from any part of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Sums = dict[str, Any]
Coefficient = float | Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Objective:
    """The loss of a step, the sum over terms of coefficient * sum / weight, and its metrics.

    coefficients: for each term a number, or a function of the step (int32) and the number of steps of the run (float32)
    that schedules an auxiliary loss without recompilation. A term may be an array, for example of layers, with a
    coefficient for each element. weights(prepared): the weight of each term and metric over the whole batch; 0 if the
    batch has no such targets. sums(params, prepared, carry, key): the sums over any part of the batch, and the carry
    after it; `key` is the dropout key, None for evaluation, which may leave out terms of the training alone; `carry` is
    the model's state after the batch before, None for most models. Metrics without a coefficient are only reported.
    prepare(batch): called once per step with the whole batch, for example to choose masks; every array it returns has
    the rows of the batch as its first axis. rate_factor(prepared): a factor of the learning rate of a step, computed
    from the whole batch; None: 1.
    update_statistics(params, means): called once per step with the updated parameters and all means, sum / weight over
    the whole batch. It moves the parameters that follow statistics of the batch instead of a gradient, and returns them
    with the means that are metrics. The sums of such statistics may be trees.
    trains: a regular expression for the whole paths of the parameters that a step may change, such as `backbone/.*`.
    All others keep their bits, and so does their part of the optimizer's state, as TensorFlow's optimizers leave
    variables without a gradient alone. None: all parameters. others: the objectives of batches of other classes, where
    a run has batches of several.
    """

    coefficients: dict[str, Coefficient]
    weights: Callable[[Any], Sums]
    sums: Callable[[Any, Any, Any, jax.Array | None], tuple[Sums, Any]]
    prepare: Callable[[Any], Any] = lambda batch: batch
    rate_factor: Callable[[Any], jax.Array] | None = None
    update_statistics: Callable[[Any, Any], tuple[Any, dict[str, Any]]] = lambda params, means: (
        params,
        means,
    )
    trains: str | None = None
    others: Mapping[type, "Objective"] = field(default_factory=dict)

    def of(self, batch: Any) -> "Objective":
        """Return the objective of a batch, by its class."""
        return self.others.get(type(batch), self)

    def coefficient(self, name: str, step: Any, num_steps: Any) -> jax.Array | float:
        """Return the coefficient of a term in update `step`, counted from 0, of a run of `num_steps`."""
        value = self.coefficients[name]
        return value(jnp.asarray(step), jnp.asarray(num_steps)) if callable(value) else value


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return total / weight, or 0 for a weight of 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the negative log-likelihood (nats) of each label under softmax(scores) over the last axis."""
    right = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - right
