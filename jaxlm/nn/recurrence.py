"""The recurrence of an LSTM over time (Hochreiter and Schmidhuber, 1997; Gers, Schmidhuber and Cummins, 2000).

The products with the inputs are not part of `lstm`: they are computed for all positions at once. The backward pass
stacks the gradients of the gates and computes the gradient of the recurrent kernel in one product. Differentiating
through `jax.lax.scan` would add to that gradient, 4 U^2 numbers, at every position. `BiLSTM` has layers in both
directions (Graves and Schmidhuber, 2005). The projection is that of Sak, Senior and Beaufays (2014); the clips are
those of TensorFlow's LSTMCell.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.nn.layers import STATES, gathered, linear

_FEW_ROWS = 8  # for a product on a CPU with fewer rows the transposed kernel is copied
_ALIGNMENT = 16  # of the sides of 16-bit matrices in products on GPUs


class LSTMState(NamedTuple):
    """Hidden state (…, B, P) and cell (…, B, U) of rows, float32. P is U without a projection."""

    h: jax.Array
    c: jax.Array


class Clips(NamedTuple):
    """The largest absolute values of the cell, and of the projected hidden state; 0: no clip."""

    cell: float = 0.0
    projection: float = 0.0


class _Saved(NamedTuple):
    """Values of one position that the backward pass needs, float32: (B, U) each, h_before and h (B, P).

    h: the hidden state before the mask, with a projection alone.
    """

    i: jax.Array
    f: jax.Array
    g: jax.Array
    o: jax.Array
    c: jax.Array
    h_before: jax.Array
    c_before: jax.Array
    h: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def lstm(
    x_LBG: jax.Array,
    kernel_PG: jax.Array,
    start: LSTMState,
    real_LB: jax.Array,
    reset_LB: jax.Array,
    projection_UP: jax.Array | None = None,
    mask_BP: jax.Array | None = None,
    clips: Clips = Clips(),  # noqa: B008  (a tuple)
    reverse: bool = False,
):
    """Return the hidden states (L, B, P), float32, and the last `LSTMState`.

    x_LBG: x W + b of the gates i, f, g, o, side by side (G = 4 U). kernel_PG: the recurrent kernel, in whose dtype
    products are taken; all else is float32. start: before the first position, (B, P) and (B, U). real_LB: bool, False
    at padding, which leaves the state as it is and has hidden state 0. reset_LB: bool, True where the state is emptied
    first. projection_UP: of the hidden state; None: P is U. mask_BP: a factor of the hidden state of each position, of
    dropout that is the same at all positions; it has no gradient. reverse: read from the last position to the first.

        c' = clip(sigmoid(f) c + sigmoid(i) tanh(g))    h' = clip(sigmoid(o) tanh(c') projection) mask
    """
    found, _ = _forward(x_LBG, kernel_PG, start, real_LB, reset_LB, projection_UP, mask_BP, clips, reverse)
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


def _transposed(matrix: jax.Array, rows: int) -> jax.Array:
    """Return the transposed matrix; on a CPU, for a product with few rows in each iteration of a loop, as a copy.

    XLA's product of 4 rows with the transposed kernel of 2,048 units takes 4.9 ms, and with a copy of it 2.8 ms. The
    copy takes 36 ms. With 8 rows and more the products take the same time.
    """
    few = devices.platform() == "cpu" and rows < _FEW_ROWS
    return jax.lax.optimization_barrier(matrix.T) if few else matrix.T


def _clipped(x: jax.Array, limit: float) -> jax.Array:
    return jnp.clip(x, -limit, limit) if limit else x


def _inside(dx: jax.Array, clipped: jax.Array, limit: float) -> jax.Array:
    """Return the gradient before a clip, from that after it and the clipped values."""
    return jnp.where(jnp.abs(clipped) < limit, dx, 0.0) if limit else dx


def _forward(x_LBG, kernel_PG, start, real_LB, reset_LB, projection_UP, mask_BP, clips: Clips, reverse: bool):
    aligned, width = _aligned(kernel_PG), kernel_PG.shape[1]
    projection = None if projection_UP is None else _aligned(projection_UP)

    def step(state: LSTMState, inputs):
        x_BG, real_B, reset_B = inputs
        real_B1 = real_B[:, None]
        h_before, c_before = (jnp.where(reset_B[:, None], 0.0, part) for part in state)
        z_BG = x_BG + _times(h_before, aligned, width)
        i, f, g, o = jnp.split(z_BG, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = _clipped(f * c_before + i * g, clips.cell)
        h, kept = o * jnp.tanh(c), None
        if projection is not None:
            h = kept = _clipped(_times(h, projection, projection_UP.shape[1]), clips.projection)
        if mask_BP is not None:
            h = h * mask_BP
        after = LSTMState(jnp.where(real_B1, h, h_before), jnp.where(real_B1, c, c_before))
        return after, (jnp.where(real_B1, h, 0.0), _Saved(i, f, g, o, c, h_before, c_before, kept))

    rows = (x_LBG.astype(jnp.float32), real_LB, reset_LB)
    end, (h_LBP, saved) = jax.lax.scan(step, start, rows, reverse=reverse)
    like_x = jnp.zeros((0,), x_LBG.dtype)
    return (h_LBP, end), (saved, kernel_PG, real_LB, reset_LB, projection_UP, mask_BP, like_x)


def _backward(clips: Clips, reverse: bool, residuals, cotangents):
    saved, kernel_PG, real_LB, reset_LB, projection_UP, mask_BP, like_x = residuals
    dh_LBP, dend = cotangents
    aligned, states = _aligned(kernel_PG), len(kernel_PG)
    turned = _transposed(aligned, dh_LBP.shape[1])
    projection = None if projection_UP is None else _aligned(projection_UP)

    def step(after: LSTMState, inputs):
        dh_BP, (i, f, g, o, c, _, c_before, h), real_B, reset_B = inputs
        real_B1 = real_B[:, None]
        tanh_c, dh, dprojected = jnp.tanh(c), dh_BP + after.h, None
        if mask_BP is not None:
            dh = dh * mask_BP
        if projection is not None:
            dprojected = jnp.where(real_B1, _inside(dh, h, clips.projection), 0.0)
            dh = _times(dprojected, projection.T, len(projection_UP))
        dc = _inside(after.c + dh * o * (1.0 - tanh_c * tanh_c), c, clips.cell)
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
        dh_before = _times(dz_BG, turned, states)
        before = (jnp.where(real_B1, dh_before, after.h), jnp.where(real_B1, dc * f, after.c))
        return LSTMState(*(jnp.where(reset_B[:, None], 0.0, part) for part in before)), (dz_BG, dprojected)

    rows = (dh_LBP, saved, real_LB, reset_LB)
    dstart, (dz_LBG, dprojected_LBP) = jax.lax.scan(step, LSTMState(*dend), rows, reverse=not reverse)
    dkernel_PG = weight_gradient(saved.h_before, dz_LBG, kernel_PG)
    dprojection_UP = None
    if projection_UP is not None:
        dprojection_UP = weight_gradient(saved.o * jnp.tanh(saved.c), dprojected_LBP, projection_UP)
    return dz_LBG.astype(like_x.dtype), dkernel_PG, dstart, None, None, dprojection_UP, None


def weight_gradient(x_LBN: jax.Array, dy_LBM: jax.Array, kernel_NM: jax.Array) -> jax.Array:
    """Return the gradient of a kernel, over all positions in one product."""
    x, dy = (rows.reshape(-1, rows.shape[-1]).astype(kernel_NM.dtype) for rows in (x_LBN, dy_LBM))
    return jnp.dot(x.T, dy, preferred_element_type=jnp.float32).astype(kernel_NM.dtype)


lstm.defvjp(_forward, _backward)


def gates(z_BG: jax.Array, c_BU: jax.Array) -> LSTMState:
    """Return the state (B, U) after a position. z_BG: x W + h U + b of the gates i, f, g, o. c_BU: the cell before."""
    i, f, g, o = jnp.split(z_BG, 4, axis=-1)
    c_BU = jax.nn.sigmoid(f) * c_BU + jax.nn.sigmoid(i) * jnp.tanh(g)
    return LSTMState(jax.nn.sigmoid(o) * jnp.tanh(c_BU), c_BU)


def boundaries(ids_BL: jax.Array, segments_BL: jax.Array | None, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return two bool arrays (L, B): real tokens, and those at which another segment begins than the row began with.

    segments: see `Inputs`. reverse: for a row that is read from the last position to the first, where a segment begins
    with its last token. Padding before the first real token does not begin a segment.
    """
    if segments_BL is None:
        return jnp.ones(ids_BL.shape[::-1], bool), jnp.zeros(ids_BL.shape[::-1], bool)
    read_BL = segments_BL[:, ::-1] if reverse else segments_BL
    real_BL = read_BL > 0
    changed_BL = jnp.pad(read_BL[:, 1:] != read_BL[:, :-1], ((0, 0), (1, 0)))
    before_BL = jnp.cumsum(real_BL, axis=1) > real_BL  # a real token was read before
    found = (real_BL.T, (real_BL & changed_BL & before_BL).T)
    return (found[0][::-1], found[1][::-1]) if reverse else found


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
    With a `projection` the hidden states of each direction are projected to this width. dtype: of the products.
    """

    width: int
    num_layers: int
    projection: int = 0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BLD: jax.Array, real_BL: jax.Array) -> jax.Array:
        """Map (B, L, D) to float32 (B, L, 2 width), or (B, L, 2 projection).

        real_BL: bool, True for tokens; padding keeps the state and gives 0, so the backward direction begins at the
        last real token.
        """
        y_BLD = x_BLD.astype(jnp.float32)
        for layer in range(self.num_layers):
            both = [self._direction(y_BLD, real_BL, f"layer_{layer}_{way}") for way in ("forward", "backward")]
            y_BLD = jnp.concatenate(both, axis=-1)
        return y_BLD

    def _direction(self, x_BLD: jax.Array, real_BL: jax.Array, name: str) -> jax.Array:
        d, u, p = x_BLD.shape[-1], self.width, self.projection or self.width
        init = uniform(1 / math.sqrt(u))

        def forget(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(shape).at[u : 2 * u].set(1.0)

        names, names_out = ("width", "gates"), ("units", "whole_width")
        kernel_in = self.param(f"{name}_in_kernel", with_axes(init, names), (d, 4 * u))
        kernel_state = self.param(f"{name}_state_kernel", with_axes(init, names), (p, 4 * u))
        bias = self.param(f"{name}_bias", with_axes(forget, ("gates",)), (4 * u,))

        kernel_out = None
        if self.projection:
            kernel_out = self.param(f"{name}_out_kernel", with_axes(init, names_out), (u, p))
            kernel_out = gathered(kernel_out, self.dtype, names_out)
        # Of all positions at once. What the loop over positions reads is gathered before it begins.
        x_BLG = linear(x_BLD.astype(self.dtype), gathered(kernel_in, self.dtype, names), bias)
        rows, real_LB = x_BLD.shape[0], real_BL.T
        start = LSTMState(jnp.zeros((rows, p), jnp.float32), jnp.zeros((rows, u), jnp.float32))
        never, backwards = jnp.zeros_like(real_LB), name.endswith("backward")
        kernel_PG = gathered(kernel_state, self.dtype, names)
        x_LBG = jnp.swapaxes(x_BLG, 0, 1)
        h_LBP, _ = lstm(x_LBG, kernel_PG, start, real_LB, never, kernel_out, reverse=backwards)
        return constrain(jnp.swapaxes(h_LBP, 0, 1), STATES)


def stacked_layers(hidden: Sequence[jax.Array]) -> jax.Array:
    """Return layers of different widths, (B, L, D) each, as (N, B, L, D), zeros at the ends of narrower ones."""
    widest = max(x.shape[-1] for x in hidden)
    return jnp.stack([jnp.pad(x, ((0, 0), (0, 0), (0, widest - x.shape[-1]))) for x in hidden])
