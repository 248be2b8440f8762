"""The learning rate of each update: a linear warmup, then a decay of the peak.

With update t counted from 0, T updates, w of them warmup, and the fraction x of the decay that has passed, the decays
leave this fraction of the peak:

    constant             1
    linear               f + (1 - f) (1 - x)
    cosine               f + (1 - f) (1 + cos(pi x)) / 2
    polynomial           f + (1 - f) (1 - x)^p
    inverse_sqrt         max(f, 1 / sqrt(1 + (t - w) / s)), s = w, or 10,000 without a warmup
    warmup_stable_decay  f + (1 - f) (1 - y)^p, y = max(0, x' - q) / (1 - q), x' = (t - w) / (T - w)
    slanted_triangular   f + (1 - f) (1 - x), and f + (1 - f) t / w during the warmup

f: `floor`, p: `power`, q: `stable`. Polynomial decay is that of BERT's code, with p = 1. The inverse square root is
that of Vaswani et al. (2017) and T5, in the form of big_vision and Hugging Face. Warmup, stable, decay: Hu et al.
(2024, MiniCPM, section 4). Slanted triangles: Howard and Ruder (2018, ULMFiT, equation 3), with f = 1 / ratio and w / T
= cut_frac; the fall ends at the last step, as in their code, where the equation rounds. Most kinds of optimizers
measure x from the end of the warmup. The published codes of GPT-1 and BERT measure it from step 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.training.optimizer_config import Decay, OptimizerConfig

TIMESCALE = 10_000.0  # of inverse_sqrt without a warmup (Raffel et al., 2020, section 3.1.2)


class Schedule(NamedTuple):
    """The numbers of a learning-rate schedule, float32 scalars: data of a compiled step, not constants in it.

    peak_lr: the highest learning rate. num_steps: the updates of the run. warmup: steps; warmup_fraction: the same as a
    fraction of the run. floor, power, stable: those of the decay.
    """

    peak_lr: Any
    num_steps: Any
    warmup: Any
    warmup_fraction: Any
    floor: Any
    power: Any
    stable: Any


def make_schedule(
    peak_lr: float, num_steps: int, warmup: float, *, floor: float = 0.0, power: float = 1.0, stable: float = 0.0
) -> Schedule:
    """Return the numbers of the schedule of a run of `num_steps`, with `warmup` steps."""
    total = max(1, num_steps)
    return Schedule(*(np.float32(x) for x in (peak_lr, total, warmup, warmup / total, floor, power, stable)))


def schedule_of(config: OptimizerConfig, num_steps: int) -> Schedule:
    """Return the numbers of the schedule of a run of `num_steps`."""
    assert config.peak_lr is not None
    decay = {"floor": config.floor, "power": config.power, "stable": config.stable}
    return make_schedule(config.peak_lr, num_steps, config.warmup_steps(num_steps), **decay)


def learning_rate(config: OptimizerConfig, step: Any, schedule: Schedule) -> jax.Array:
    """Return the learning rate of update `step`, counted from 0. The config gives only the kind and the decay."""
    if config.decay == "slanted_triangular":
        return slanted_triangular_rate(schedule, step)
    rate = {"openai_adam": openai_rate, "bert_adamw": bert_rate}.get(config.kind, warmup_then_decay)
    return rate(schedule, step, config.decay)


def warmup_then_decay(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the rate of update `step`, counted from 0: a linear warmup, then the decay over the rest of the run.

    With w warmup steps: peak (t + 1) / w up to the peak. The update after the last would have the lowest rate.
    """
    t = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(1.0, (t + 1) * (1.0 / jnp.maximum(1.0, schedule.warmup)))
    remaining = _remaining(schedule, t, decay, _after_warmup(schedule, t))
    return schedule.peak_lr * jnp.where(t < schedule.warmup, rise, remaining)


def slanted_triangular_rate(schedule: Schedule, step: Any) -> jax.Array:
    """Return the rate of update `step`, counted from 0, of every kind of optimizer: the floor in the first update, the
    peak after the warmup, and the floor again in the update after the last.
    """
    t = jnp.asarray(step, jnp.float32)
    rise = t * (1.0 / jnp.maximum(1.0, schedule.warmup))
    p = jnp.where(t < schedule.warmup, rise, 1.0 - _after_warmup(schedule, t))
    return schedule.peak_lr * _above_floor(schedule, p)


def bert_rate(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the learning rate of update `step` in BERT's code.

    It is peak t / w before step w, and from there on the decay counted from step 0, so that the learning rate falls by
    a fraction w / T of the peak at the end of the warmup.
    """
    each, each_warming = 1.0 / schedule.num_steps, 1.0 / jnp.maximum(1.0, schedule.warmup)
    t = jnp.asarray(step, jnp.float32)
    remaining = _remaining(schedule, t, decay, jnp.clip(t * each, 0.0, 1.0))
    return schedule.peak_lr * jnp.where(t < schedule.warmup, t * each_warming, remaining)


def openai_rate(schedule: Schedule, step: Any, decay: Decay) -> jax.Array:
    """Return the learning rate of update `step` in GPT-1's code.

    With x = t / T and w as a fraction of the run: peak (x / w or 1) (1 - x) for linear, and for cosine
    (1 + cos(pi x)) / 2 after the warmup, x measured from the start of the run.
    """
    fraction, each = schedule.warmup_fraction, 1.0 / schedule.num_steps
    t = jnp.asarray(step, jnp.float32)
    x = t * each
    warming = (x <= fraction) & (fraction > 0)
    rise = jnp.where(warming, t * (each * (1.0 / jnp.where(fraction > 0, fraction, 1.0))), 1.0)
    remaining = _remaining(schedule, t, decay, x)
    if decay == "cosine":
        fall = _above_floor(schedule, 0.5 * (1.0 + jnp.cos(t * (jnp.pi * each))))
        remaining = jnp.where(warming, 1.0, fall)
    return schedule.peak_lr * rise * remaining


def _remaining(schedule: Schedule, t: jax.Array, decay: Decay, x: jax.Array) -> jax.Array:
    """Return the fraction of the peak that a decay leaves in update t, at fraction x of its length."""
    if decay == "constant":
        return jnp.ones_like(x)
    if decay == "inverse_sqrt":
        scale = jnp.where(schedule.warmup > 0, schedule.warmup, TIMESCALE)
        passed = jnp.maximum(0.0, t - schedule.warmup) / scale
        return jnp.maximum(schedule.floor, 1.0 / jnp.sqrt(1.0 + passed))
    if decay == "warmup_stable_decay":
        x = jnp.maximum(0.0, _after_warmup(schedule, t) - schedule.stable) / (1.0 - schedule.stable)
    if decay in ("polynomial", "warmup_stable_decay"):
        return _above_floor(schedule, jnp.maximum(0.0, 1.0 - x) ** schedule.power)
    return _above_floor(schedule, 1.0 - x if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * x)))


def _after_warmup(schedule: Schedule, t: jax.Array) -> jax.Array:
    """Return the fraction of the steps after the warmup that has passed before update t."""
    length = jnp.maximum(1.0, schedule.num_steps - schedule.warmup)
    return jnp.clip((t - schedule.warmup) * (1.0 / length), 0.0, 1.0)


def _above_floor(schedule: Schedule, fraction: jax.Array) -> jax.Array:
    """Return a fraction of the peak from 1 to 0 as one from 1 to the floor; a floor of 0 keeps its bits."""
    return schedule.floor + (1.0 - schedule.floor) * fraction
