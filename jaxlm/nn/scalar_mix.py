"""A weighted sum of layers, whose weights are trained."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes


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
    weights = module.param("weights", with_axes(nn.initializers.zeros_init(), ("mixed",)), (len(layers_NBLD),))
    gamma = module.param("gamma", with_axes(nn.initializers.ones_init(), ()), ())
    return gamma * jnp.einsum("n,nbld->bld", jax.nn.softmax(weights), layers_NBLD.astype(jnp.float32))
