"""The recurrence of an LSTM over time (Hochreiter and Schmidhuber, 1997; Gers, Schmidhuber and Cummins, 2000).

The products with the inputs are not part of `lstm`: they are computed for all positions at once. The backward pass
stacks the gradients of the gates and computes the gradient of the recurrent kernel in one product. Differentiating
through `jax.lax.scan` would add to that gradient, 4 U^2 numbers, at every position. `BiLSTM` has layers in both
directions (Graves and Schmidhuber, 2005).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.layers import linear

_ALIGNMENT = 16  # of the sides of 16-bit matrices in products on GPUs


class LSTMState(NamedTuple):
    """Hidden state and cell of rows, float32 (…, B, U) each."""

    h: jax.Array
    c: jax.Array


class _Saved(NamedTuple):
    """Values of one position that the backward pass needs, float32: (B, U) each."""

    i: jax.Array
    f: jax.Array
    g: jax.Array
    o: jax.Array
    c: jax.Array
    h_before: jax.Array
    c_before: jax.Array


@jax.custom_vjp
def lstm(x_LBG: jax.Array, kernel_UG: jax.Array, start: LSTMState, real_LB: jax.Array, reset_LB: jax.Array):
    """Return the hidden states (L, B, U), float32, and the last `LSTMState`.

    x_LBG: x W + b of the gates i, f, g, o, side by side (G = 4 U). kernel_UG: the recurrent kernel, in whose dtype
    products are taken; all else is float32. start: before the first position, (B, U). real_LB: bool, False at padding,
    which leaves the state as it is and has hidden state 0. reset_LB: bool, True where the state is emptied first.

        c' = sigmoid(f) c + sigmoid(i) tanh(g)    h' = sigmoid(o) tanh(c')
    """
    found, _ = _forward(x_LBG, kernel_UG, start, real_LB, reset_LB)
    return found


def _aligned(matrix: jax.Array) -> jax.Array:
    """Return a matrix that is padded, on a GPU, as XLA's compiler would pad it in every iteration of the loop."""
    if devices.platform() != "gpu":
        return matrix
    return jnp.pad(matrix, [(0, -side % _ALIGNMENT) for side in matrix.shape])


def _times(x: jax.Array, matrix: jax.Array, width: int) -> jax.Array:
    """Return x (B, N) times the N first rows of an aligned matrix, its first `width` columns, float32."""
    if missing := len(matrix) - x.shape[1]:
        x = jnp.pad(x, ((0, 0), (0, missing)))
    return jnp.dot(x.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32)[:, :width]


def _forward(x_LBG, kernel_UG, start, real_LB, reset_LB):
    aligned, width = _aligned(kernel_UG), kernel_UG.shape[1]

    def step(state: LSTMState, inputs):
        x_BG, real_B, reset_B = inputs
        real_B1 = real_B[:, None]
        h_before, c_before = (jnp.where(reset_B[:, None], 0.0, part) for part in state)
        z_BG = x_BG + _times(h_before, aligned, width)
        i, f, g, o = jnp.split(z_BG, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c_before + i * g
        h = o * jnp.tanh(c)
        after = LSTMState(jnp.where(real_B1, h, h_before), jnp.where(real_B1, c, c_before))
        return after, (jnp.where(real_B1, h, 0.0), _Saved(i, f, g, o, c, h_before, c_before))

    end, (h_LBU, saved) = jax.lax.scan(step, start, (x_LBG.astype(jnp.float32), real_LB, reset_LB))
    return (h_LBU, end), (saved, kernel_UG, real_LB, reset_LB, jnp.zeros((0,), x_LBG.dtype))


def _backward(residuals, cotangents):
    saved, kernel_UG, real_LB, reset_LB, like_x = residuals
    dh_LBU, dend = cotangents
    aligned, units = _aligned(kernel_UG), len(kernel_UG)

    def step(after: LSTMState, inputs):
        dh_BU, (i, f, g, o, c, _, c_before), real_B, reset_B = inputs
        real_B1 = real_B[:, None]
        tanh_c, dh = jnp.tanh(c), dh_BU + after.h
        dc = after.c + dh * o * (1.0 - tanh_c * tanh_c)
        dz_BG = jnp.concatenate(
            [
                dc * g * i * (1.0 - i),
                dc * c_before * f * (1.0 - f),
                dc * i * (1.0 - g * g),
                dh * tanh_c * o * (1.0 - o),
            ],
            axis=-1,
        )
        dz_BG = jnp.where(real_B1, dz_BG, 0.0)
        dh_before = _times(dz_BG, aligned.T, units)
        before = (jnp.where(real_B1, dh_before, after.h), jnp.where(real_B1, dc * f, after.c))
        return LSTMState(*(jnp.where(reset_B[:, None], 0.0, part) for part in before)), dz_BG

    dstart, dz_LBG = jax.lax.scan(step, LSTMState(*dend), (dh_LBU, saved, real_LB, reset_LB), reverse=True)
    h_NU, dz_NG = (x.reshape(-1, x.shape[-1]).astype(kernel_UG.dtype) for x in (saved.h_before, dz_LBG))
    dkernel_UG = jnp.dot(h_NU.T, dz_NG, preferred_element_type=jnp.float32)
    return dz_LBG.astype(like_x.dtype), dkernel_UG.astype(kernel_UG.dtype), dstart, None, None


lstm.defvjp(_forward, _backward)


def boundaries(ids_BL: jax.Array, segments_BL: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return two bool arrays (L, B): real tokens, and beginnings of a segment within a row. segments: see `Inputs`."""
    if segments_BL is None:
        return jnp.ones(ids_BL.shape[::-1], bool), jnp.zeros(ids_BL.shape[::-1], bool)
    real_BL = segments_BL > 0
    changed_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return real_BL.T, (real_BL & changed_BL).T


def uniform(bound: float) -> Callable[..., jax.Array]:
    """Return an initializer that is uniform from -bound to bound."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return init


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
        init = uniform(1 / math.sqrt(u))

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
