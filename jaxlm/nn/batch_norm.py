"""Batch normalization of rows (Ioffe and Szegedy, 2015), as torch.nn.BatchNorm1d, over the real rows of a batch.

A training pass normalizes with the mean and the biased variance of its own rows. The running statistics, which
evaluation uses, are parameters that no gradient reaches. They move once per step, by the statistics of the whole batch:
a pass reports its sums, which add up over micro-batches and devices, and `moved` takes the totals.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes

EPS, MOMENTUM = 1e-5, 0.1  # PyTorch's
STATISTICS, SUMS = "batch_stats", "batch_sums"  # Flax collections


class BatchNorm(nn.Module):
    """Normalization of each feature over the rows of a batch, then scale and shift.

    Collections: STATISTICS holds `mean` and `variance`, float32 (D,), which training only reads at initialization. SUMS
    receives in training the `count` of real rows, the `sum` of x and the sum of its `squares` over them.
    """

    @nn.compact
    def __call__(self, x_BD: jax.Array, real_B: jax.Array, *, train: bool) -> jax.Array:
        """Return normalized rows, float32. real_B: bool, False for padding rows, which are in no statistic."""
        ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
        shape, x_BD = (x_BD.shape[-1],), x_BD.astype(jnp.float32)
        scale = self.param("scale", with_axes(ones, ("norm",)), shape)
        bias = self.param("bias", with_axes(zeros, ("norm",)), shape)
        running_mean = self.variable(STATISTICS, "mean", with_axes(zeros, ("norm",)), None, shape).value
        running_variance = self.variable(STATISTICS, "variance", with_axes(ones, ("norm",)), None, shape).value
        if not train:
            return (x_BD - running_mean) * jax.lax.rsqrt(running_variance + EPS) * scale + bias
        x_BD = jnp.where(real_B[:, None], x_BD, 0.0)
        count = jnp.sum(real_B, dtype=jnp.float32)
        total, squares = jnp.sum(x_BD, axis=0), jnp.sum(jnp.square(x_BD), axis=0)
        for name, value in (("count", count), ("sum", total), ("squares", squares)):
            self.put_variable(SUMS, name, jax.lax.stop_gradient(value))
        centred_BD = jnp.where(real_B[:, None], x_BD - total / jnp.maximum(count, 1.0), 0.0)
        variance = jnp.sum(jnp.square(centred_BD), axis=0) / jnp.maximum(count, 1.0)
        return centred_BD * jax.lax.rsqrt(variance + EPS) * scale + bias


def moved(statistics: Any, sums: Any) -> Any:
    """Return the running statistics of all layers after a batch with these sums: r <- 0.9 r + 0.1 (of the batch).

    The variance of the batch is the unbiased one here. A batch of fewer than two rows has none and moves nothing.
    """

    def of_layer(running: dict[str, jax.Array], found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        count = jnp.maximum(found["count"], 2.0)
        mean = found["sum"] / count
        variance = jnp.maximum(found["squares"] - count * jnp.square(mean), 0.0) / (count - 1.0)
        new = {"mean": mean, "variance": variance}
        return {
            name: jnp.where(found["count"] < 2.0, old, (1.0 - MOMENTUM) * old + MOMENTUM * new[name])
            for name, old in running.items()
        }

    return jax.tree.map(of_layer, statistics, sums, is_leaf=lambda node: "variance" in node)
