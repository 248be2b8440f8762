"""Losses and metrics as pairs of a sum and a weight.

A mean over a batch that is cut into micro-batches, devices or processes is exact only if the weight is known from the
whole batch beforehand: an objective gives its weights from the batch alone, and its sums from any part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class Objective:
    """What a step minimises: the sum over terms of coefficient x (sum / weight), and pairs that are only reported.

    weights(batch): the weight of each term and metric over the whole batch. sums(params, batch, key): the sums over any
    part of it; `key` is the dropout key, None for evaluation. A weight of 0 means the batch has nothing of that kind.
    """

    coefficients: dict[str, float]
    weights: Callable[[Any], Sums]
    sums: Callable[[Any, Any, jax.Array | None], Sums]


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, 0 where the weight is 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def apply(module: nn.Module, params: Any, *inputs: jax.Array, key: jax.Array | None = None, **settings: Any) -> Any:
    return module.apply({"params": params}, *inputs, rngs=None if key is None else {"dropout": key}, **settings)


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood (nats) of each label under softmax(scores) over the last axis."""
    right = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - right
