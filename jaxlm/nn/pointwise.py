"""Dropout, activations and layer normalization: what acts on each position by itself."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.config import STEPS, ActivationName

Activation = ActivationName | Literal["relu"]


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, shared_axes: tuple[int, ...] = ()) -> jax.Array:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate); `key` None keeps `x` as it is.

    Along `shared_axes` all elements share one sample.
    """
    if key is None or rate == 0.0:
        return x
    shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(x.shape))
    threshold = round(rate * STEPS)  # an element is dropped if its 16 bits are below
    keep = random_halves(key, shape) >= jnp.uint16(threshold)
    return jnp.where(keep, x * jnp.asarray(STEPS / (STEPS - threshold), x.dtype), jnp.zeros((), x.dtype))


def fold(key: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """Return the key for use number `number` of `key`; None stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def random_halves(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform uint16 of `shape`, two per 32-bit sample if the last axis is even: its halves, low and high."""
    if not shape or shape[-1] % 2:
        return jax.random.bits(key, shape, jnp.uint16)
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    return jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], axis=-1)


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """Return the ReLU or the GELU of each element (Hendrycks and Gimpel, 2016).

    The GELU has a tanh form, which google-research/bert and GPT-1 use, and an exact one by the error function, that of
    Hugging Face's BERT; they differ by up to 5e-4.
    """
    if name == "relu":
        return jax.nn.relu(x)
    approximate = name == "gelu_tanh"
    if devices.platform() != "cpu":
        return jax.nn.gelu(x, approximate=approximate)
    # The barriers keep XLA from fusing the GELU into the operands of the surrounding products, where a CPU recomputes
    # it many times; on a TPU that costs less than a separate pass.
    return jax.lax.optimization_barrier(jax.nn.gelu(jax.lax.optimization_barrier(x), approximate=approximate))


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
