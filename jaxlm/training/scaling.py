"""Scalings of the gradient: Adam in three forms, momentum and Adagrad.

A scaling keeps the optimizer's state. It updates the state with a gradient, and turns the new state (and for some kinds
the gradient) into a direction, which the learning rate multiplies. The two are separate so that the caller can discard
an update of the state and can log the direction later. The states are those of optax.

Trees may have empty nodes in place of parameters that are not trained.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class Scaling(Protocol):
    """A scaling of the gradient."""

    @property
    def needs_gradient(self) -> bool:
        """True if `direction` reads the gradient or the parameters in addition to the state."""
        ...

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first update; leaves keep the boxes of their parameters."""
        ...

    def accumulate(self, gradient: PyTree, state: PyTree) -> PyTree:
        """Return the state updated with a gradient."""
        ...

    def direction(self, gradient: PyTree, state: PyTree, params: PyTree) -> PyTree:
        """Return the direction of the update from the state with its gradient, before learning rate and decay."""
        ...

    def decay_factor(self, state: PyTree) -> jax.Array | float:
        """Return the factor of the decoupled weight decay."""
        ...


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015): m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2; for update t, counted from 1,

        direction = a c1 m / (sqrt(c2 v) + eps), decay_factor = a

    kind adamw: a = 1, c1 = 1 / (1 - b1^t), c2 = 1 / (1 - b2^t). openai_adam: a = sqrt(1 - b2^t) / (1 - b1^t),
    c1 = c2 = 1, so that eps is added to the uncorrected root and the decay is scaled by the correction too
    (openai/finetune-transformer-lm, opt.py:23-49). bert_adamw: a = c1 = c2 = 1 (google-research/bert,
    optimization.py:87-157).
    """

    kind: Literal["adamw", "openai_adam", "bert_adamw"]
    beta1: float
    beta2: float
    eps: float
    needs_gradient: bool = dataclasses.field(default=False, init=False)

    def init(self, params: PyTree) -> optax.ScaleByAdamState:
        """Return moments of zeros."""
        mu, nu = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def accumulate(self, gradient: PyTree, state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        """Return the moments updated with a gradient."""
        b1, b2 = self.beta1, self.beta2
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradient)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * g), state.nu, gradient)
        return optax.ScaleByAdamState(state.count + 1, mu, nu)

    def direction(self, gradient: PyTree, state: optax.ScaleByAdamState, params: PyTree) -> PyTree:
        """Return the quotient of the moments."""
        a, c1, c2 = self._corrections(state.count)
        return jax.tree.map(lambda m, v: (a * c1) * m / (jnp.sqrt(v * c2) + self.eps), state.mu, state.nu)

    def decay_factor(self, state: optax.ScaleByAdamState) -> jax.Array | float:
        """Return the correction of openai_adam, else 1."""
        return self._corrections(state.count)[0]

    def _corrections(self, count: jax.Array) -> tuple[jax.Array | float, ...]:
        """Return a, c1 and c2 of update `count`, counted from 1."""
        t = count.astype(jnp.float32)
        mu, nu = 1.0 - self.beta1**t, 1.0 - self.beta2**t
        if self.kind == "adamw":
            return 1.0, 1.0 / mu, 1.0 / nu
        return (jnp.sqrt(nu) / mu if self.kind == "openai_adam" else 1.0), 1.0, 1.0


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball momentum (Polyak, 1964) as in torch.optim.SGD: direction b <- momentum b + g; none where it is 0."""

    momentum: float

    @property
    def needs_gradient(self) -> bool:
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

    def decay_factor(self, state: Any) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan and Singer, 2011) as in TensorFlow: s <- s + g^2, direction = g / (sqrt(s) + eps).

    The sum begins at `initial_accumulator`. TensorFlow's ApplyAdagrad has eps 0, ApplyAdagradV2 adds it to the root.
    """

    initial_accumulator: float
    eps: float
    needs_gradient: bool = dataclasses.field(default=True, init=False)

    def init(self, params: PyTree) -> optax.ScaleByRssState:
        """Return sums of squares at their initial value."""
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, self.initial_accumulator), params))

    def accumulate(self, gradient: PyTree, state: optax.ScaleByRssState) -> optax.ScaleByRssState:
        """Return the sums updated with a gradient."""
        return optax.ScaleByRssState(jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradient))

    def direction(self, gradient: PyTree, state: optax.ScaleByRssState, params: PyTree) -> PyTree:
        """Return the gradient over the root of the sums."""
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + self.eps), gradient, state.sum_of_squares)

    def decay_factor(self, state: optax.ScaleByRssState) -> float:
        """Return 1."""
        return 1.0
