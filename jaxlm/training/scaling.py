"""Scalings of the gradient other than Adam: momentum, Adagrad and Adafactor.

Adafactor (Shazeer and Stern, 2018) is algorithm 4 without momentum, as T5 uses it. The second moment of a matrix is
stored as the means of its rows and of its columns. optax.adafactor takes the two largest axes of an array as the matrix
and averages over all others. Here one side of the matrix is the model's width, the other all remaining axes: (width,
heads, head_width) is the matrix [768, 768] of T5's code (mesh_tensorflow/optimize.py:208-390). Layers, and the queries,
keys and values of one kernel, are separate matrices, each with its own means, clip and size.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxlm.training.optimizer import STACKED, WIDTHS, ParameterRule, Scaling

PyTree = Any
Axes = tuple[int, ...]

# The paper's proposed hyperparameters, and the smallest matrix that T5's code factors.
DECAY_EXPONENT = 0.8  # of b = 1 - t^-0.8
EPS_SQUARE, EPS_SIZE = 1e-30, 1e-3  # eps1, eps2
CLIP_THRESHOLD = 1.0  # d
SMALLEST_FACTORED = 128  # rows and columns


@dataclass(frozen=True)
class Momentum(Scaling):
    """Heavy-ball momentum (Polyak, 1964) as in torch.optim.SGD: direction b <- momentum b + g; none where it is 0."""

    momentum: float

    @property
    def needs_gradient(self) -> bool:  # type: ignore[override]
        """True if the gradient itself is the direction."""
        return not self.momentum

    def init(self, params: PyTree) -> optax.TraceState | optax.EmptyState:
        """Return a trace of zeros, or an empty state without momentum."""
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params)) if self.momentum else optax.EmptyState()

    def accumulate(self, gradient: PyTree, state: Any) -> optax.TraceState | optax.EmptyState:
        """Return the trace updated with a gradient."""
        if not self.momentum:
            return state
        return optax.TraceState(jax.tree.map(lambda b, g: self.momentum * b + g, state.trace, gradient))

    def direction(self, gradient: PyTree, state: Any, params: PyTree) -> PyTree:
        """Return the trace, or the gradient."""
        return state.trace if self.momentum else gradient


@dataclass(frozen=True)
class Adagrad(Scaling):
    """Adagrad (Duchi, Hazan and Singer, 2011) as in TensorFlow: s <- s + g^2, direction = g / (sqrt(s) + eps).

    The sum begins at `initial_accumulator`. TensorFlow's ApplyAdagrad has eps 0, ApplyAdagradV2 adds it to the root.
    """

    initial_accumulator: float
    eps: float

    def init(self, params: PyTree) -> optax.ScaleByRssState:
        """Return sums of squares at their initial value."""
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, self.initial_accumulator), params))

    def accumulate(self, gradient: PyTree, state: optax.ScaleByRssState) -> optax.ScaleByRssState:
        """Return the sums updated with a gradient."""
        return optax.ScaleByRssState(jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradient))

    def direction(self, gradient: PyTree, state: optax.ScaleByRssState, params: PyTree) -> PyTree:
        """Return the gradient over the root of the sums."""
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + self.eps), gradient, state.sum_of_squares)


class Layout(NamedTuple):
    """The axes of a parameter; axes in neither field are stacked.

    rows, columns: those of its matrices. Without columns it holds vectors, or matrices that are too small.
    """

    rows: Axes
    columns: Axes

    @property
    def averaged(self) -> tuple[Axes | None, Axes | None, Axes | None]:
        """The axes over which v_row, v_col and v are means; None for a moment that does not exist."""
        return (self.columns, self.rows, None) if self.columns else (None, None, ())


def layout_of(rule: ParameterRule, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array: a matrix has the model's width as its first axis or its last."""
    own = tuple(axis for axis, name in enumerate(rule.axes) if name not in STACKED)
    wide = [rule.axes[axis] in WIDTHS for axis in own]
    if not any(wide) or len(own) < 2:
        return Layout(own, ())
    split = 1 if wide[0] else len(own) - 1
    rows, columns = own[:split], own[split:]
    factored = all(math.prod(shape[axis] for axis in axes) >= SMALLEST_FACTORED for axes in (rows, columns))
    return Layout(rows, columns) if factored else Layout(own, ())


@dataclass(frozen=True)
class Adafactor(Scaling):
    """Adafactor, from the means R and C of the squares of the rows and columns of g, for update t, counted from 1:

        R <- b R + (1 - b) mean(g^2 + eps1, columns), C alike, b = 1 - t^-0.8, V = R C / mean(R),
        u = g / sqrt(V), direction = max(eps2, RMS(p)) u / max(1, RMS(u) / d)

    For a vector, or a matrix of fewer than 128 rows or columns, V = b V + (1 - b) (g^2 + eps1). The state is that of
    optax: v_row and v_col for matrices, v for the others, with empty nodes elsewhere. rules: a tree of ParameterRule.
    """

    rules: PyTree

    def init(self, params: PyTree) -> optax.FactoredState:
        """Return moments of zeros."""

        def moments(which: int) -> PyTree:
            def zeros(rule: ParameterRule, p: Any) -> Any:
                if rule.frozen:
                    return optax.MaskedNode()
                axes = layout_of(rule, nn.unbox(p).shape).averaged[which]
                return optax.MaskedNode() if axes is None else _zeros(p, axes)

            return jax.tree.map(zeros, self.rules, params)

        return optax.FactoredState(jnp.zeros([], jnp.int32), *map(moments, range(3)))

    def accumulate(self, gradient: PyTree, state: optax.FactoredState) -> optax.FactoredState:
        """Return the moments updated with a gradient."""
        count = state.count + 1
        b = 1.0 - count.astype(jnp.float32) ** -DECAY_EXPONENT

        def moments(which: int, old: PyTree) -> PyTree:
            def mean(rule: ParameterRule, g: Any, v: Any) -> Any:
                if isinstance(v, optax.MaskedNode):
                    return v
                axes = layout_of(rule, g.shape).averaged[which]
                return b * v + (1.0 - b) * jnp.mean(g * g + EPS_SQUARE, axis=axes, keepdims=True)

            return jax.tree.map(mean, self.rules, gradient, old)

        return optax.FactoredState(count, *(moments(which, old) for which, old in enumerate(state[1:])))

    def direction(self, gradient: PyTree, state: optax.FactoredState, params: PyTree) -> PyTree:
        """Return the gradient over the root of its second moment, clipped, times the size of the parameter."""

        def direction(rule: ParameterRule, g: Any, v_row: Any, v_col: Any, v: Any, p: Any) -> Any:
            if rule.frozen:
                return g
            layout = layout_of(rule, g.shape)
            if layout.columns:
                v_row = v_row / jnp.mean(v_row, axis=layout.rows, keepdims=True)
                u = g * jax.lax.rsqrt(v_row) * jax.lax.rsqrt(v_col)
            else:
                u = g * jax.lax.rsqrt(v)
            own = layout.rows + layout.columns
            size = jnp.maximum(EPS_SIZE, _rms(p, own))
            return size * u / jnp.maximum(1.0, _rms(u, own) / CLIP_THRESHOLD)

        return jax.tree.map(direction, self.rules, gradient, state.v_row, state.v_col, state.v, params)


def _rms(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the root of the mean square over these axes, which are kept with length 1."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _zeros(p: Any, averaged: Axes) -> Any:
    """Return zeros for a mean of a parameter, boxed with its logical axes if the parameter is."""
    value = nn.unbox(p)
    zeros = jnp.zeros([1 if axis in averaged else size for axis, size in enumerate(value.shape)], value.dtype)
    if not isinstance(p, nn.LogicallyPartitioned):
        return zeros
    return p.replace(value=zeros, names=tuple(None if k in averaged else name for k, name in enumerate(p.names)))
