"""Parts of the training state that evaluations change or use: averages of the parameters, the best ones, a rate factor.

The exponential moving average: after update t, counted from 1, with parameters p and decay d, the average is

    a <- a - (1 - d_t) (a - p),  d_t = min(d, (1 + t) / (10 + t))

as in tf.train.ExponentialMovingAverage with num_updates. It begins at the parameters before the first update. The
smaller decay of the early updates keeps these from outweighing later ones, as the correction of Adam's moments does. A
parameter that is not trained has its own bits in the average. With `average_of before` it is that of CVT's code
(tensorflow/models, cvt_text/model/multitask_model.py:50-54 and :94-97): taken before the update, with a constant decay,

    a <- a - (1 - d) (a - q),  q the parameters before update t

The mean of the iterates (ASGD: Polyak and Juditsky, 1992): all of them from the first update, or from the evaluation on
at which the validation loss stopped falling (NT-ASGD: Merity et al., 2018, algorithm 1). Before that the average is the
parameters themselves.

The selection of the best parameters by the validation loss, and the early end of a run, are part of the training state:
these parameters stay on the devices and are saved and restored with it. They therefore always belong to the history
that continues, whatever was evaluated between a checkpoint and a stop.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.training.optimizer import materialized

AverageOf = Literal["after", "before"]


def averaged(
    params: Any, state: Any, applied: jax.Array, decay: Any, average_of: AverageOf = "after"
) -> tuple[Any, Any, "Iterates | None"]:
    """Return the updated parameters, their average and its iterates. state: the TrainState before the update.

    applied: if false, the average is unchanged. decay: of the exponential moving average. average_of: the parameters
    that it takes in, those after the update or those before it.
    """
    params, average, iterates = materialized(params), state.average, state.iterates
    if average_of == "before":
        moved = jax.tree.map(lambda a, p: a - (1.0 - decay) * (a - p), average, state.params)
    elif iterates is None:
        moved = updated_average(average, params, state.step + 1, decay)
    else:
        moved = updated_mean(average, params, iterates.averaged)
        counted = applied & (iterates.averaged >= 0)
        iterates = iterates._replace(averaged=iterates.averaged + counted.astype(jnp.int32))
    return params, jax.tree.map(functools.partial(jnp.where, applied), moved, average), iterates


def decay_at(decay: Any, update: Any) -> jax.Array:
    """Return the decay d_t of update t, counted from 1."""
    t = jnp.asarray(update, jnp.float32)
    return jnp.minimum(decay, (1.0 + t) / (10.0 + t))


def updated_average(average: Any, params: Any, update: Any, decay: Any) -> Any:
    """Return the average after update t, counted from 1, that led to `params`."""
    weight = 1.0 - decay_at(decay, update)
    return jax.tree.map(lambda a, p: a - weight * (a - p), average, params)


class Iterates(NamedTuple):
    """The mean of the iterates: how many it has, and the validation losses that decide when it begins.

    averaged: int32, the number of iterates in the mean; 0: the mean begins with the next one; -1: no mean has begun.
    losses: float32 (interval,), the newest validation losses, the oldest first. lowest: float32, the lowest one before
    these. Losses that do not exist yet are inf.
    """

    averaged: jax.Array
    losses: jax.Array
    lowest: jax.Array


def no_iterates(interval: int, *, from_start: bool) -> Iterates:
    """Return the mean before the first update. from_start: begin with the first one, whatever the losses."""
    count = jnp.asarray(0 if from_start else -1, jnp.int32)
    return Iterates(count, jnp.full((interval,), jnp.inf, jnp.float32), jnp.asarray(jnp.inf, jnp.float32))


def with_loss(iterates: Iterates, loss: Any) -> Iterates:
    """Return `iterates` after an evaluation.

    The mean begins if the loss is above the lowest one of all evaluations but the last `interval` ones. The loss itself
    is compared first and recorded after, as in awd-lstm-lm (main.py:275-283).
    """
    begins = (iterates.averaged < 0) & (loss > iterates.lowest)
    losses = jnp.append(iterates.losses[1:], jnp.asarray(loss, jnp.float32))
    lowest = jnp.minimum(iterates.lowest, iterates.losses[0])
    return Iterates(jnp.where(begins, 0, iterates.averaged), losses, lowest)


def updated_mean(mean: Any, params: Any, count: jax.Array) -> Any:
    """Return the mean of the iterates with one more, `params`. count: of the iterates before it; below 0: `params`."""
    weight = 1.0 / (jnp.maximum(count, 0) + 1).astype(jnp.float32)
    return jax.tree.map(lambda a, p: jnp.where(count < 1, p, a + weight * (p - a)), mean, params)


def first_average(params: Any) -> Any:
    """Return the average before the first update, a copy of the parameters with their shardings."""
    shardings = jax.tree.map(lambda p: p.sharding, params)
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings)(params)


class Halving(NamedTuple):
    """The factor of the learning rate, float32, and the newest validation loss, float32, inf before the first one."""

    factor: jax.Array
    loss: jax.Array


def no_halving() -> Halving:
    """Return the factor before the first evaluation."""
    return Halving(jnp.asarray(1.0, jnp.float32), jnp.asarray(jnp.inf, jnp.float32))


def halved(halving: Halving, loss: Any) -> Halving:
    """Return `halving` after an evaluation: a half if the loss is above the one before (onmt/Optim.py:36-48)."""
    factor = jnp.where(loss > halving.loss, 0.5 * halving.factor, halving.factor)
    return Halving(factor, jnp.asarray(loss, jnp.float32))


class Selection(NamedTuple):
    """The evaluations of a run so far.

    loss: float32, the lowest validation loss, inf before the first evaluation. step: int32, its step. waited: int32,
    the evaluations since then.
    """

    loss: jax.Array
    step: jax.Array
    waited: jax.Array


def no_selection() -> Selection:
    """Return the selection before the first evaluation."""
    return Selection(jnp.asarray(jnp.inf, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def evaluated(best: Any, selection: Selection, weights: Any, loss: Any, step: Any) -> tuple[Any, Selection]:
    """Return the best parameters and the selection after an evaluation of `weights` at `step`.

    Strictly better ones replace the ones before: the first of equals stays. best: None if no parameters are kept.
    """
    better = loss < selection.loss
    chosen = Selection(
        jnp.where(better, loss, selection.loss),
        jnp.where(better, step, selection.step),
        jnp.where(better, 0, selection.waited + 1),
    )
    return None if best is None else jax.tree.map(lambda old, new: jnp.where(better, new, old), best, weights), chosen
