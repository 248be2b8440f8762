"""The training step and the evaluation step: pure functions, jitted and sharded by the caller."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.distributed.devices import RARELY
from jaxlm.objectives.objective import Objective, mean
from jaxlm.training.optimizer import Optimizer, OptimizerConfig
from jaxlm.training.schedule import Schedule
from jaxlm.training.state import TrainState

Metrics = dict[str, jax.Array]
_GENERATORS = {"threefry": "threefry2x32", "rbg": "rbg"}  # by JAX's names


class Settings(NamedTuple):
    """The numbers of a run that its compiled step takes as data, so that other values need no other program.

    norms_every: int32, the steps between two update norms.
    """

    schedule: Schedule
    norms_every: Any


def settings_of(optimizer: OptimizerConfig, num_steps: int, *, norms_every: int = 1) -> Settings:
    """Return the settings of a run of `num_steps`, NumPy scalars."""
    return Settings(optimizer.schedule(num_steps), np.int32(min(norms_every, np.iinfo(np.int32).max)))


def make_train_step(
    objective: Objective,
    optimizer: Optimizer,
    *,
    micro_batches: int = 1,
    dropout_bits: Literal["threefry", "rbg"] = "threefry",
) -> Callable[[TrainState, Any, Settings], tuple[TrainState, Metrics]]:
    """(state, batch, settings) -> (state, metrics): one update from the gradient over the whole global batch.

    Dropout keys come from (state.seed, state.step, micro-batch). The weights of all loss terms are taken from the whole
    batch before it is cut, so the gradient does not depend on the cutting. A loss or gradient norm that is not finite
    leaves the state as it was but for `halted`, and turns all later steps into no-ops.
    Metrics: `loss`, each term and metric of the objective, `learning_rate`, `gradient_norm`, `halted`, and
    `update_norm`, per layer and without the decay, in every `settings.norms_every`-th step (else 0: it costs a CPU 3 %
    of GPT-1's step).
    """

    def train_step(state: TrainState, batch: Any, settings: Settings) -> tuple[TrainState, Metrics]:
        weights = objective.weights(batch)
        key = jax.random.fold_in(jax.random.key(state.seed, impl=_GENERATORS[dropout_bits]), state.step)

        def loss_of(params, part, number):
            sums = objective.sums(params, part, jax.random.fold_in(key, number))
            terms = [factor * mean(sums[name], weights[name]) for name, factor in objective.coefficients.items()]
            return jnp.sum(jnp.stack(terms)), sums

        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        if micro_batches == 1:
            (loss, sums), gradient = gradient_of(state.params, batch, 0)
        else:
            # Strided slices: row r goes to micro-batch r % M, so each device keeps the rows it has.
            cut = lambda x: jnp.swapaxes(x.reshape(-1, micro_batches, *x.shape[1:]), 0, 1)  # noqa: E731
            parts = jax.tree.map(cut, batch)

            def add(total, inputs):
                number, part = inputs
                return jax.tree.map(jnp.add, total, gradient_of(state.params, part, number)), None

            first = jax.tree.map(lambda x: x[0], parts)
            like = jax.eval_shape(lambda: gradient_of(state.params, first, 0))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            ((loss, sums), gradient), _ = jax.lax.scan(add, zeros, (jnp.arange(micro_batches), parts))

        norm = optax.tree.norm(gradient)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm) & ~state.halted
        rate = optimizer.rate(state.step, settings.schedule)
        updates, opt_state = optimizer.transformation.update(
            gradient, state.opt_state, state.params, learning_rate=rate, sound=sound
        )
        new = TrainState(
            step=state.step + sound.astype(jnp.int32),
            params=jax.tree.map(lambda p, u: jnp.where(sound, p + u, p), state.params, updates),
            opt_state=opt_state,
            seed=state.seed,
            halted=~sound,
        )
        metrics = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, "halted": ~sound}
        metrics |= {name: mean(sums[name], weights[name]) for name in sums}

        def norms(opt_state: Any) -> Metrics:
            return layer_norms(optimizer.direction(gradient, opt_state, state.params), rate)

        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(norms, opt_state))
        with jax.named_scope(RARELY):
            due = new.step % settings.norms_every == 0
            metrics["update_norm"] = jax.lax.cond(due, norms, lambda _: none, opt_state)
        return new, metrics

    return train_step


def layer_norms(direction: Any, rate: jax.Array) -> Metrics:
    """`rate` times the norm of each layer's part of a tree, `blocks` (N,), and of each other part of the model."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(direction):
        names = [entry.key for entry in path]
        name = names[1] if names[0] == "backbone" else names[0]
        axes = tuple(range(1, leaf.ndim)) if name == "blocks" else None
        squares[name] = squares.get(name, 0.0) + jnp.sum(jnp.square(leaf), axis=axes)
    return {name: rate * jnp.sqrt(total) for name, total in squares.items()}


def make_eval_step(objective: Objective) -> Callable[[Any, Any], dict[str, tuple[jax.Array, jax.Array]]]:
    """(params, batch) -> for each term and metric its (sum, weight), without dropout."""

    def eval_step(params: Any, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        weights, sums = objective.weights(batch), objective.sums(params, batch, None)
        return {name: (sums[name], weights[name]) for name in sums}

    return eval_step
