"""Long short-term memory in both directions (Hochreiter and Schmidhuber, 1997; Graves and Schmidhuber, 2005)."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import with_axes
from jaxlm.nn.linear import linear


class BiLSTM(nn.Module):
    """Layers of two LSTMs, one reading forwards and one backwards, with concatenated outputs.

    num_layers layers of `width` units per direction. With i, f, g, o the four quarters of x W + h U + b:
    c <- sigmoid(f) c + sigmoid(i) tanh(g), h <- sigmoid(o) tanh(c); the layout of torch.nn.LSTM with its two biases
    added. Kernels are uniform within 1 / sqrt(width), as there; the forget gate's bias starts at 1 (Gers et al., 2000).
    """

    width: int
    num_layers: int

    @nn.compact
    def __call__(self, x_BLD: jax.Array, real_BL: jax.Array) -> jax.Array:
        """Map (B, L, D) to float32 (B, L, 2 width). real_BL: bool, True for tokens; padding keeps the state and gives
        0, so the backward direction begins at the last real token."""
        y_BLD = x_BLD.astype(jnp.float32)
        for layer in range(self.num_layers):
            both = [self._direction(y_BLD, real_BL, f"layer_{layer}_{way}") for way in ("forward", "backward")]
            y_BLD = jnp.concatenate(both, axis=-1)
        return y_BLD

    def _direction(self, x_BLD: jax.Array, real_BL: jax.Array, name: str) -> jax.Array:
        d, u = x_BLD.shape[-1], self.width
        bound = 1 / math.sqrt(u)

        def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

        def forget(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(shape).at[u : 2 * u].set(1.0)

        kernel_in = self.param(f"{name}_in_kernel", with_axes(init, ("width", "gates")), (d, 4 * u))
        kernel_state = self.param(f"{name}_state_kernel", with_axes(init, ("width", "gates")), (u, 4 * u))
        bias = self.param(f"{name}_bias", with_axes(forget, ("gates",)), (4 * u,))

        def step(carry, inputs):
            c_BU, h_BU = carry
            x_BG, real_B = inputs
            i, f, g, o = jnp.split(x_BG + h_BU @ kernel_state, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c_BU + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            real_B1 = real_B[:, None]
            return (jnp.where(real_B1, c, c_BU), jnp.where(real_B1, h, h_BU)), jnp.where(real_B1, h, 0.0)

        x_BLG = linear(x_BLD, kernel_in, bias)  # of all positions at once
        zeros = jnp.zeros((x_BLD.shape[0], u), jnp.float32)
        inputs = (jnp.swapaxes(x_BLG, 0, 1), jnp.swapaxes(real_BL, 0, 1))
        _, h_LBU = jax.lax.scan(step, (zeros, zeros), inputs, reverse=name.endswith("backward"))
        return jnp.swapaxes(h_LBU, 0, 1)
