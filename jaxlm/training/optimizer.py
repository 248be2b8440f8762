"""The optimizer of a run as an optax transformation: clip, scaling, weight decay, learning rate.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant in its code (openai/finetune-transformer-lm, opt.py:5-49), `bert_adamw` the one in BERT's
code (google-research/bert, optimization.py:31-157). `sgd` and `adagrad` follow torch.optim.SGD and TensorFlow,
`adafactor` follows T5 (Shazeer and Stern, 2018).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.training.adafactor import Adafactor
from jaxlm.training.parameter_groups import ParameterGroup, ParameterRule, parameter_rules, without_frozen
from jaxlm.training.scaling import Adagrad, Adam, Momentum, Scaling

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


@dataclass(frozen=True)
class OptimizerConfig:
    """Configuration of an optimizer and its learning-rate schedule. Defaults: GPT-1's pretraining (section 4.1)."""

    kind: Literal["adamw", "openai_adam", "bert_adamw", "sgd", "adagrad", "adafactor"] = "adamw"
    """adamw: bias-corrected, decoupled decay. openai_adam, bert_adamw: as in GPT-1's and BERT's code, with a learning
    rate of 0 in the first update; BERT's does not correct the bias. sgd: with momentum; the decay is added to the
    gradient. adagrad: as in TensorFlow, decoupled decay. adafactor: as for T5; peak_lr is relative to the size of each
    parameter, and eps is not used."""
    peak_lr: float | None = 2.5e-4
    """Highest learning rate. None: the task's, in fine-tuning."""
    warmup: float = 2000.0
    """Linear warmup in steps, or below 1 as a fraction of the run. A fraction of a step is rounded down by bert_adamw,
    kept by openai_adam and rounded up by the others."""
    decay: Decay = "cosine"
    """Decay of the learning rate from the peak to 0 at the last step. constant: no decay."""
    beta1: float = 0.9
    """Decay rate of Adam's first moment."""
    beta2: float = 0.999
    """Decay rate of Adam's second moment."""
    eps: float = 1e-8
    """Constant added to the root of the second moment, in Adam and adagrad."""
    weight_decay: float = 0.01
    """Weight decay of matrices and tables. Biases and norms are not decayed."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient. 0: no clipping."""
    momentum: float = 0.0
    """Momentum of sgd. 0: no momentum and no optimizer state."""
    initial_accumulator: float = 0.1
    """Initial value of adagrad's sums of squared gradients."""

    def check(self) -> None:
        """Raise InputError for values out of range."""
        self._check_range("peak_lr", 0.0)
        for name in ("beta1", "beta2", "momentum"):
            self._check_range(name, 0.0, 1.0)
        for name in ("eps", "weight_decay", "clip_norm", "initial_accumulator"):
            self._check_range(name, 0.0)
        if not self.warmup >= 0:
            raise InputError(
                f"optimizer.warmup must be a number of steps, or a fraction of the run below 1, got {self.warmup:g}; "
                "0 turns the warmup off"
            )
        if self.momentum and self.kind != "sgd":
            raise InputError(
                f"optimizer.momentum must be 0 with optimizer.kind {self.kind}, got {self.momentum:g}; leave it out"
            )
        if self.kind == "adagrad" and not (self.initial_accumulator or self.eps):
            raise InputError("optimizer.initial_accumulator must be above 0 where optimizer.eps is 0; give 0.1")

    def _check_range(self, name: str, lowest: float, below: float = math.inf) -> None:
        value = getattr(self, name)
        if value is None or not lowest <= value < below:
            rule = f"{lowest:g} or above" + (f" and below {below:g}" if below < math.inf else "")
            default = getattr(OptimizerConfig, name)
            raise InputError(f"optimizer.{name} must be {rule}, got {value}; the default is {default:g}")

    def warmup_steps(self, num_steps: int) -> float:
        """Return the warmup in steps of a run of `num_steps`; openai_adam's need not be whole."""
        steps = self.warmup * num_steps if self.warmup < 1 else self.warmup
        if self.kind == "openai_adam":
            return steps
        return math.floor(steps + 1e-9) if self.kind == "bert_adamw" else math.ceil(steps - 1e-9)

    def warmup_note(self, num_steps: int) -> str | None:
        """Return a note on a warmup that is longer than a run of `num_steps`, else None."""
        steps = self.warmup_steps(num_steps)
        if steps <= num_steps:
            return None
        return (
            f"optimizer.warmup is {steps:g} steps, but the run has {num_steps}: the learning rate never reaches its "
            "peak; give fewer steps, or a fraction of the run below 1"
        )

    def depends_on_num_steps(self) -> bool:
        """Return True if the learning rate of a step depends on the length of the run."""
        return self.kind == "openai_adam" or self.decay != "constant" or 0 < self.warmup < 1

    def schedule(self, num_steps: int) -> Schedule:
        """Return the numbers of the schedule of a run of `num_steps`."""
        assert self.peak_lr is not None
        return make_schedule(self.peak_lr, num_steps, self.warmup_steps(num_steps))

    def learning_rate(self, step: Any, schedule: Schedule) -> jax.Array:
        """Return the learning rate of update `step`, counted from 0. The config gives only the kind and the decay."""
        rate = {"openai_adam": openai_rate, "bert_adamw": bert_rate}.get(self.kind, warmup_then_decay)
        return rate(schedule, step, self.decay)


class Optimizer(NamedTuple):
    """An optax transformation with its schedule, and the direction of an update for the log.

    transformation: its update takes two more arguments, learning_rate and is_finite; see `make_optimizer`.
    rate(step, schedule): the learning rate of update `step`, counted from 0.
    direction(gradient, state, params): the update that led to `state`, without learning rate and decay, with empty
    nodes for frozen parameters. gradient, params: the inputs of that update.
    """

    transformation: optax.GradientTransformationExtraArgs
    rate: Callable[[Any, Schedule], jax.Array]
    direction: Callable[[Any, Any, Any], Any]


def make_optimizer(config: OptimizerConfig, boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Optimizer:
    """Return the optimizer of parameters whose shapes and logical axes are `boxed_params`.

    The gradient is clipped by its global norm and scaled to a direction, which gives the update

        -learning_rate (direction + decay_factor weight_decay p)

    with the decay where `jaxlm.training.parameter_groups` has it, and the learning rate times the factor of the
    parameter's group. sgd adds weight_decay p to the clipped gradient instead. Frozen parameters are left out of norms,
    have no state, and get an update of zeros.

    learning_rate: a scalar, data of the compiled step. is_finite (True): if false, the state is unchanged and the
    caller must discard the update. The state is selected before the direction is computed, so that it can be updated
    in place.
    """
    chain = _Chain(config, parameter_rules(boxed_params, groups))
    transformation = optax.GradientTransformationExtraArgs(chain.init, chain.update)
    return Optimizer(transformation, config.learning_rate, chain.direction)


def make_scaling(config: OptimizerConfig, rules: Any) -> Scaling:
    """Return the scaling of an optimizer's kind. rules: those of the parameters."""
    if config.kind == "sgd":
        return Momentum(config.momentum)
    if config.kind == "adagrad":
        return Adagrad(config.initial_accumulator, config.eps)
    if config.kind == "adafactor":
        return Adafactor(rules)
    return Adam(config.kind, config.beta1, config.beta2, config.eps)


class _Chain:
    """The stages of an optimizer, applied in sequence; its state is that of the scaling."""

    def __init__(self, config: OptimizerConfig, rules: Any) -> None:
        self.rules, self.scaling = rules, make_scaling(config, rules)
        self.clip_norm, self.weight_decay = config.clip_norm, config.weight_decay
        self.couples_decay = config.kind == "sgd"

    def init(self, params: Any) -> Any:
        """Return the state before the first update."""
        return self.scaling.init(without_frozen(self.rules, params))

    def update(
        self,
        gradient: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: jax.Array,
        is_finite: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Return the update, which is added to the parameters, and the new state."""
        gradient = self._prepared(gradient, params)
        new = jax.tree.map(partial(jnp.where, is_finite), self.scaling.accumulate(gradient, state), state)
        new = _computed_once(new)
        factor = self.scaling.decay_factor(new) * self.weight_decay

        def update_of(rule: ParameterRule, direction: Any, p: jax.Array) -> jax.Array:
            if rule.frozen:
                return jnp.zeros_like(p)
            if rule.decayed and not self.couples_decay:
                direction = direction + factor * p
            return -rule.scaled(learning_rate) * direction

        directions = self.scaling.direction(gradient, new, without_frozen(self.rules, params))
        return jax.tree.map(update_of, self.rules, directions, params), new

    def direction(self, gradient: Any, state: Any, params: Any) -> Any:
        """Return the direction of the update that led to `state`, times the factors of the groups."""
        if self.scaling.needs_gradient:
            gradient, params = self._prepared(gradient, params), without_frozen(self.rules, params)
        directions = self.scaling.direction(gradient, state, params)
        return jax.tree.map(lambda rule, d: d if rule.frozen else rule.scaled(1.0) * d, self.rules, directions)

    def _prepared(self, gradient: Any, params: Any) -> Any:
        """Return the gradient of the trained parameters, clipped, with sgd's weight decay added."""
        gradient = _clipped(without_frozen(self.rules, gradient), self.clip_norm)
        if not self.couples_decay:
            return gradient

        def decayed(rule: ParameterRule, g: Any, p: jax.Array) -> Any:
            return g + self.weight_decay * p if rule.decayed and not rule.frozen else g

        return jax.tree.map(decayed, self.rules, gradient, params)


def _clipped(gradient: Any, largest: float) -> Any:
    """Return the gradient scaled to a global norm of at most `largest`; 0 does not clip."""
    if not largest > 0:
        return gradient
    scale = jnp.minimum(1.0, largest / jnp.maximum(optax.tree.norm(gradient), 1e-30))
    return jax.tree.map(lambda g: g * scale, gradient)


def _computed_once(state: Any) -> Any:
    """Return the new state behind a barrier, so that it is computed once.

    Without it XLA's CPU backend computes the new state from the old one again at each use. The old one then cannot be
    overwritten, and all moments and parameters are copied in every step.
    """
    return jax.lax.optimization_barrier(state) if devices.platform() == "cpu" else state
