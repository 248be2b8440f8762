"""Adam in three forms and its schedules, as an optax transformation.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant that its code has (openai/finetune-transformer-lm, opt.py:5-49), `bert_adamw` the one of
BERT's (google-research/bert, optimization.py:31-157). Which leaves are decayed goes by their logical axes: matrices and
tables have a `width`, biases and norms have none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.errors import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. The defaults are GPT-1's pretraining (section 4.1)."""

    kind: Literal["adamw", "openai_adam", "bert_adamw"] = "adamw"
    """adamw: bias-corrected, decoupled decay. openai_adam, bert_adamw: as in GPT-1's and BERT's code, whose first
    update has rate 0; BERT's does not correct the bias."""
    peak_lr: float | None = 2.5e-4
    """None: the one of the task's row, in fine-tuning."""
    warmup: float = 2000.0
    """Linear warmup: steps from 1 on, below 1 a share of the run. adamw rounds it up to whole steps, bert_adamw
    down."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """From the peak to 0 at the last step; constant: no decay."""
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""

    def check(self) -> None:
        """Refuse values that cannot be meant."""
        if self.peak_lr is None or not self.peak_lr >= 0.0:
            raise InputError(f"optimizer.peak_lr {self.peak_lr}: a number from 0 on")
        if self.warmup < 0:
            raise InputError(f"optimizer.warmup {self.warmup}: steps from 1 on, or a share of the run below 1")

    def warmup_steps(self, num_steps: int) -> float:
        """The warmup in steps of a run of `num_steps`; openai_adam's need not be whole."""
        steps = self.warmup * num_steps if self.warmup < 1 else self.warmup
        if self.kind == "openai_adam":
            return steps
        return math.floor(steps + 1e-9) if self.kind == "bert_adamw" else math.ceil(steps - 1e-9)

    def warmup_note(self, num_steps: int) -> str | None:
        """Return a sentence for a warmup that is longer than a run of `num_steps`; None where it is not."""
        steps = self.warmup_steps(num_steps)
        if steps <= num_steps:
            return None
        return (
            f"optimizer.warmup is {steps:g} steps, but the run has {num_steps}: the learning rate never reaches its "
            "peak; give fewer steps, or a fraction of the run below 1"
        )

    def depends_on_num_steps(self) -> bool:
        """Whether another length of the run would change the rate of a step."""
        return self.kind == "openai_adam" or self.decay != "constant" or 0 < self.warmup < 1


class Schedule(NamedTuple):
    """The numbers of a learning-rate schedule, float32 scalars: data of a compiled step, not constants in it.

    peak_lr: the highest rate. num_steps: the updates of the run. warmup: steps; warmup_fraction: the same of the run.
    """

    peak_lr: Any
    num_steps: Any
    warmup: Any
    warmup_fraction: Any


def schedule_of(config: OptimizerConfig, num_steps: int) -> Schedule:
    """Return the numbers of the schedule of a run of `num_steps`."""
    assert config.peak_lr is not None
    total, warmup = max(1, num_steps), config.warmup_steps(num_steps)
    return Schedule(*(np.float32(x) for x in (config.peak_lr, total, warmup, warmup / total)))


def learning_rate(config: OptimizerConfig, schedule: Schedule) -> optax.Schedule:
    """Return the rate of update t = 0, 1, … of a run. Only the kind and the decay are taken from `config`.

    adamw, w warmup steps: peak (t + 1) / w up to the peak, then down to 0 over what is left of the run (the update
    after the last would have rate 0). openai_adam: with x = t / T and w as a share, peak (x / w or 1) (1 - x) for
    linear, and for cosine (1 + cos(pi x)) / 2 after the warmup, x measured from the start of the run (opt.py:5-15).
    bert_adamw: peak t / w before step w, and from there on what the decay from step 0 on has left (optimization.py:31),
    so that the rate falls by a share w / T of the peak where the warmup ends.

    Products with inverses, as XLA compiles a division by a constant: rates are bit for bit those of programs with a
    schedule of constants.
    """
    peak, total, warmup, fraction = schedule
    each, each_warming = 1.0 / total, 1.0 / jnp.maximum(1.0, warmup)

    def bert_rate(t):
        t = jnp.asarray(t, jnp.float32)
        fall = _fall(config.decay, jnp.clip(t * each, 0.0, 1.0))
        return peak * jnp.where(t < warmup, t * each_warming, fall)

    def adamw_rate(t):
        t = jnp.asarray(t, jnp.float32)
        rise = jnp.minimum(1.0, (t + 1) * each_warming)
        x = jnp.clip((t - warmup) * (1.0 / jnp.maximum(1.0, total - warmup)), 0.0, 1.0)
        return peak * jnp.where(t < warmup, rise, _fall(config.decay, x))

    def openai_rate(t):
        t = jnp.asarray(t, jnp.float32)
        x = t * each
        warming = (x <= fraction) & (fraction > 0)
        rise = jnp.where(warming, t * (each * (1.0 / jnp.where(fraction > 0, fraction, 1.0))), 1.0)
        fall = _fall(config.decay, x)
        if config.decay == "cosine":
            fall = jnp.where(warming, 1.0, 0.5 * (1.0 + jnp.cos(t * (jnp.pi * each))))
        return peak * rise * fall

    return {"adamw": adamw_rate, "openai_adam": openai_rate, "bert_adamw": bert_rate}[config.kind]


def _fall(decay: str, x):
    if decay == "constant":
        return jnp.ones_like(x)
    return 1.0 - x if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * x))


def decay_mask(boxed_params: Any) -> Any:
    """True for leaves that are decayed: those with the model's width among their logical axes, cut or whole."""
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    return jax.tree.map(lambda leaf: "width" in leaf.names or "whole_width" in leaf.names, boxed_params, is_leaf=is_box)


class Optimizer(NamedTuple):
    """An optax transformation that can refuse a gradient, and what the log says of an update.

    update(gradient, state, params, schedule, sound=…) -> (updates, state), to be added; not `sound`: the state stays as
    it was. rate(t, schedule): the learning rate of update t from 0 on. direction(state): the last update without rate
    and decay.
    """

    init: Callable[[Any], optax.ScaleByAdamState]
    update: Callable[..., tuple[Any, optax.ScaleByAdamState]]
    rate: Callable[[jax.Array, Schedule], jax.Array]
    direction: Callable[[optax.ScaleByAdamState], Any]


def make_optimizer(config: OptimizerConfig, mask: Any) -> Optimizer:
    """Clip g by its global norm, m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, and with t counted from 1

        p <- p - rate(t - 1) a (c1 m / (sqrt(c2 v) + eps) + decay p), decay where `mask` is true

    adamw: a = 1, c1 = 1 / (1 - b1^t), c2 = 1 / (1 - b2^t). openai_adam: a = sqrt(1 - b2^t) / (1 - b1^t), c1 = c2 = 1,
    so that eps is added to the uncorrected root and the decay is scaled by the correction too (opt.py:23-49).
    bert_adamw: a = c1 = c2 = 1 (optimization.py:87-157). The schedule is given to each update.
    """
    rate = lambda t, schedule: learning_rate(config, schedule)(t)  # noqa: E731
    b1, b2 = config.beta1, config.beta2

    def corrections(count: jax.Array) -> tuple[jax.Array | float, ...]:
        """a, c1 and c2 of update `count`, counted from 1."""
        t = count.astype(jnp.float32)
        mu, nu = 1.0 - b1**t, 1.0 - b2**t
        if config.kind == "adamw":
            return 1.0, 1.0 / mu, 1.0 / nu
        return (jnp.sqrt(nu) / mu if config.kind == "openai_adam" else 1.0), 1.0, 1.0

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(), nu=zeros())

    def update(
        gradient: Any,
        state: optax.ScaleByAdamState,
        params: Any,
        schedule: Schedule,
        *,
        sound: jax.Array | bool = True,
    ):
        if config.clip_norm > 0:
            scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(optax.tree.norm(gradient), 1e-30))
            gradient = jax.tree.map(lambda g: g * scale, gradient)
        mu = jax.tree.map(lambda m, g: jnp.where(sound, b1 * m + (1 - b1) * g, m), state.mu, gradient)
        nu = jax.tree.map(lambda v, g: jnp.where(sound, b2 * v + (1 - b2) * (g * g), v), state.nu, gradient)
        # What follows reads the new moments. Else XLA's CPU backend makes them from the old ones again wherever they
        # are used, which then cannot be overwritten: it copies all moments and parameters in every step.
        if devices.platform() == "cpu":
            mu, nu = jax.lax.optimization_barrier((mu, nu))
        new = optax.ScaleByAdamState(jnp.where(sound, state.count + 1, state.count), mu, nu)
        size, (a, _, _) = rate(state.count, schedule), corrections(new.count)

        def moved(direction: jax.Array, p: jax.Array, decayed: bool) -> jax.Array:
            return -size * (direction + a * config.weight_decay * p if decayed else direction)

        return jax.tree.map(moved, direction(new), params, mask), new

    def direction(state: optax.ScaleByAdamState) -> Any:
        a, c1, c2 = corrections(state.count)
        return jax.tree.map(lambda m, v: (a * c1) * m / (jnp.sqrt(v * c2) + config.eps), state.mu, state.nu)

    return Optimizer(init, update, rate, direction)
