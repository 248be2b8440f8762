"""A weighted sum of layers, whose weights are trained: its norm over a batch, and a penalty on its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes

WEIGHTS, GAMMA = "weights", "gamma"
EPS = 1e-12  # of the variance (bilm-tf, bilm/elmo.py:62-64)


class ScalarMix(nn.Module):
    """A mix with parameters of its own, see `scalar_mix`."""

    @nn.compact
    def __call__(self, layers_NBLD: jax.Array) -> jax.Array:
        """Return float32 (B, L, D)."""
        return scalar_mix(self, layers_NBLD)


def scalar_mix(module: nn.Module, layers_NBLD: jax.Array) -> jax.Array:
    """Return gamma sum_j softmax(w)_j h_j, float32 (B, L, D) (Peters et al., 2018, equation 1).

    `weights` w, from 0, and `gamma`, from 1, are new parameters of `module`.
    """
    weights = module.param(WEIGHTS, with_axes(nn.initializers.zeros_init(), ("mixed",)), (len(layers_NBLD),))
    gamma = module.param(GAMMA, with_axes(nn.initializers.ones_init(), ()), ())
    return gamma * jnp.einsum("n,nbld->bld", jax.nn.softmax(weights), layers_NBLD.astype(jnp.float32))


def normed_over_batch(layers_NBLD: jax.Array, real_BL: jax.Array) -> jax.Array:
    """Return each layer with mean 0 and variance 1 over all elements of its real positions, float32.

    real_BL: False at padding, which is in neither and is shifted and scaled as the rest. The `do_layer_norm` of ELMo's
    authors, one mean and one variance for the whole batch (bilm-tf, bilm/elmo.py:55-65).
    """
    x_NBLD, real_BL1 = layers_NBLD.astype(jnp.float32), real_BL[..., None]
    count = jnp.maximum(jnp.sum(real_BL), 1) * x_NBLD.shape[-1]

    def mean(values_NBLD: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real_BL1, values_NBLD, 0.0), axis=(1, 2, 3), keepdims=True) / count

    centred_NBLD = x_NBLD - mean(x_NBLD)
    return centred_NBLD * jax.lax.rsqrt(mean(jnp.square(centred_NBLD)) + EPS)


def mix_penalty(params: Any) -> jax.Array:
    """Return the sum of the squares of the weights of all mixes in a tree of parameters, before their softmax.

    It moves a mix towards the mean of its layers (Peters et al., 2018, section 3.2; bilm-tf, bilm/elmo.py:34-38).
    """
    return sum((jnp.sum(jnp.square(weights)) for weights in _weights(params)), jnp.float32(0))


def _weights(params: Any) -> Iterator[jax.Array]:
    if isinstance(params, Mapping):
        if params.keys() == {WEIGHTS, GAMMA}:
            yield params[WEIGHTS]
        else:
            for part in params.values():
                yield from _weights(part)
