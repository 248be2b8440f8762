"""The exponential moving average of a model's parameters, which is evaluated and used in place of the raw ones.

After update t, counted from 1, with parameters p and decay d, the average is

    a <- a - (1 - d_t) (a - p),  d_t = min(d, (1 + t) / (10 + t))

as in tf.train.ExponentialMovingAverage with num_updates. It begins at the parameters before the first update. The
smaller decay of the early updates keeps these from outweighing later ones, as the correction of Adam's moments does. A
parameter that is not trained has its own bits in the average.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def decay_at(decay: Any, update: Any) -> jax.Array:
    """Return the decay d_t of update t, counted from 1."""
    t = jnp.asarray(update, jnp.float32)
    return jnp.minimum(decay, (1.0 + t) / (10.0 + t))


def updated_average(average: Any, params: Any, update: Any, decay: Any) -> Any:
    """Return the average after update t, counted from 1, that led to `params`."""
    weight = 1.0 - decay_at(decay, update)
    return jax.tree.map(lambda a, p: a - weight * (a - p), average, params)


def first_average(params: Any) -> Any:
    """Return the average before the first update, a copy of the parameters with their shardings."""
    shardings = jax.tree.map(lambda p: p.sharding, params)
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings)(params)
