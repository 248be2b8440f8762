"""The optimizer of a run as an optax transformation: clip, scaling, weight decay, learning rate.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant that its code has (openai/finetune-transformer-lm, opt.py:5-49), `bert_adamw` the one of
BERT's (google-research/bert, optimization.py:31-157).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.training.parameter_groups import ParameterGroup, ParameterRule, parameter_rules, without_frozen
from jaxlm.training.scaling import Adam, Scaling
from jaxlm.training.schedule import Decay, Schedule, bert_rate, make_schedule, openai_rate, warmup_then_decay


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
    decay: Decay = "cosine"
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

    def schedule(self, num_steps: int) -> Schedule:
        """Return the numbers of the schedule of a run of `num_steps`."""
        assert self.peak_lr is not None
        return make_schedule(self.peak_lr, num_steps, self.warmup_steps(num_steps))

    def learning_rate(self, step: Any, schedule: Schedule) -> jax.Array:
        """Return the rate of update `step`, counted from 0. Only the kind and the decay are taken from the config."""
        rate = {"openai_adam": openai_rate, "bert_adamw": bert_rate}.get(self.kind, warmup_then_decay)
        return rate(schedule, step, self.decay)


class Optimizer(NamedTuple):
    """An optax transformation with its schedule, and the direction of an update for the log.

    transformation: its update takes two more arguments, learning_rate and sound; see `make_optimizer`.
    rate(step, schedule): the learning rate of update `step`, counted from 0.
    direction(gradient, state, params): the update that led to `state`, without rate and decay. Frozen parameters have
    an empty node there. gradient, params: those that the update was made from.
    """

    transformation: optax.GradientTransformationExtraArgs
    rate: Callable[[Any, Schedule], jax.Array]
    direction: Callable[[Any, Any, Any], Any]


def make_optimizer(config: OptimizerConfig, boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Optimizer:
    """Return the optimizer of parameters whose shapes and logical axes are `boxed_params`.

    The gradient is clipped by its global norm and scaled to a direction, which gives the update

        -learning_rate (direction + decay_factor weight_decay p)

    with the decay where `jaxlm.training.parameter_groups` has it, and the rate times the factor of the parameter's
    group. Frozen parameters count in no norm, have no state, and get an update of zeros.

    learning_rate: a scalar, data of the compiled step. sound (True): where it is false, the state stays as it was, and
    the caller must discard the update. The selection is made here, before the direction is computed, so that the state
    can be updated in place.
    """
    rules = parameter_rules(boxed_params, groups)
    trained = partial(without_frozen, rules)
    scaling = make_scaling(config)

    def init(params: Any) -> Any:
        return scaling.init(trained(params))

    def update(
        gradient: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: jax.Array,
        sound: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, Any]:
        gradient = _clipped(trained(gradient), config.clip_norm)
        new = _computed_once(jax.tree.map(partial(jnp.where, sound), scaling.accumulate(gradient, state), state))
        factor = scaling.decay_factor(new) * config.weight_decay
        directions = scaling.direction(gradient, new, trained(params))

        def moved(rule: ParameterRule, direction: Any, p: jax.Array) -> jax.Array:
            if rule.frozen:
                return jnp.zeros_like(p)
            return -rule.scaled(learning_rate) * (direction + factor * p if rule.decayed else direction)

        return jax.tree.map(moved, rules, directions, params), new

    def direction(gradient: Any, state: Any, params: Any) -> Any:
        if scaling.needs_gradient:
            gradient, params = _clipped(trained(gradient), config.clip_norm), trained(params)
        found = scaling.direction(gradient, state, params)
        return jax.tree.map(lambda rule, d: d if rule.frozen else rule.scaled(1.0) * d, rules, found)

    return Optimizer(optax.GradientTransformationExtraArgs(init, update), config.learning_rate, direction)


def make_scaling(config: OptimizerConfig) -> Scaling:
    """Return the scaling of an optimizer's kind."""
    return Adam(config.kind, config.beta1, config.beta2, config.eps)


def _clipped(gradient: Any, largest: float) -> Any:
    """Return the gradient with a global norm of at most `largest`; as it is where that is 0."""
    if not largest > 0:
        return gradient
    scale = jnp.minimum(1.0, largest / jnp.maximum(optax.tree.norm(gradient), 1e-30))
    return jax.tree.map(lambda g: g * scale, gradient)


def _computed_once(state: Any) -> Any:
    """Return the new state, from which all that follows is computed.

    Without the barrier XLA's CPU backend computes it from the old one again wherever it is used. The old one then
    cannot be overwritten, and all moments and parameters are copied in every step.
    """
    return jax.lax.optimization_barrier(state) if devices.platform() == "cpu" else state
