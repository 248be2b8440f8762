"""Layer normalization in float32 (Ba, Kiros and Hinton, 2016)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import with_axes


class LayerNorm(nn.Module):
    """Normalization of the last axis to mean 0 and variance 1, then scale and shift; the input's dtype is kept."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", with_axes(nn.initializers.ones_init(), ("norm",)), (x.shape[-1],))
        bias = self.param("bias", with_axes(nn.initializers.zeros_init(), ("norm",)), (x.shape[-1],))
        x_32 = x.astype(jnp.float32)
        mean = jnp.mean(x_32, axis=-1, keepdims=True)
        # From the squares, not from centred values: both sums in one pass over x.
        variance = jnp.maximum(jnp.mean(jnp.square(x_32), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
        return ((x_32 - mean) * jax.lax.rsqrt(variance + self.eps) * scale + bias).astype(x.dtype)
