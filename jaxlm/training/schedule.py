"""Learning-rate schedules as functions of the step, whose numbers are data of the compiled step.

`warmup_then_decay` is the usual schedule (GPT-1's paper, section 4.1). `openai_rate` is that of GPT-1's code
(openai/finetune-transformer-lm, opt.py:5-15), `bert_rate` that of BERT's (google-research/bert, optimization.py:31-54).

Each multiplies by inverses, as XLA compiles a division by a constant: learning rates are bit for bit those of a program
that has the schedule's numbers as constants.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Decay = Literal["cosine", "linear", "constant"]


class Schedule(NamedTuple):
    """The numbers of a learning-rate schedule, float32 scalars: data of a compiled step, not constants in it.

    peak_lr: the highest learning rate. num_steps: the updates of the run. warmup: steps; warmup_fraction: the same as a
    fraction of the run.
    """

    peak_lr: Any
    num_steps: Any
    warmup: Any
    warmup_fraction: Any


def make_schedule(peak_lr: float, num_steps: int, warmup: float) -> Schedule:
    """Return the numbers of the schedule of a run of `num_steps`, with `warmup` steps."""
    total = max(1, num_steps)
    return Schedule(*(np.float32(x) for x in (peak_lr, total, warmup, warmup / total)))


def warmup_then_decay(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the rate of update `step`, counted from 0: a linear warmup, then the decay over the rest of the run.

    With w warmup steps: peak (t + 1) / w up to the peak. The update after the last would have rate 0.
    """
    peak, total, warmup, _ = schedule
    t = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(1.0, (t + 1) * (1.0 / jnp.maximum(1.0, warmup)))
    x = jnp.clip((t - warmup) * (1.0 / jnp.maximum(1.0, total - warmup)), 0.0, 1.0)
    return peak * jnp.where(t < warmup, rise, _remaining(decay, x))


def bert_rate(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the learning rate of update `step` in BERT's code.

    It is peak t / w before step w, and from there on the decay counted from step 0, so that the learning rate falls by
    a fraction w / T of the peak at the end of the warmup.
    """
    peak, total, warmup, _ = schedule
    each, each_warming = 1.0 / total, 1.0 / jnp.maximum(1.0, warmup)
    t = jnp.asarray(step, jnp.float32)
    remaining = _remaining(decay, jnp.clip(t * each, 0.0, 1.0))
    return peak * jnp.where(t < warmup, t * each_warming, remaining)


def openai_rate(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the learning rate of update `step` in GPT-1's code.

    With x = t / T and w as a fraction of the run: peak (x / w or 1) (1 - x) for linear, and for cosine
    (1 + cos(pi x)) / 2 after the warmup, x measured from the start of the run.
    """
    peak, total, _, fraction = schedule
    each = 1.0 / total
    t = jnp.asarray(step, jnp.float32)
    x = t * each
    warming = (x <= fraction) & (fraction > 0)
    rise = jnp.where(warming, t * (each * (1.0 / jnp.where(fraction > 0, fraction, 1.0))), 1.0)
    remaining = _remaining(decay, x)
    if decay == "cosine":
        remaining = jnp.where(warming, 1.0, 0.5 * (1.0 + jnp.cos(t * (jnp.pi * each))))
    return peak * rise * remaining


def _remaining(decay: Decay, x: jax.Array) -> jax.Array:
    """Return the fraction of the peak that a decay leaves at fraction x of its length."""
    if decay == "constant":
        return jnp.ones_like(x)
    return 1.0 - x if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * x))
