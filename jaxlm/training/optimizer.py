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
import optax

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.training.adafactor import Adafactor
from jaxlm.training.parameter_groups import ParameterGroup, ParameterRule, parameter_rules, without_frozen
from jaxlm.training.scaling import Adagrad, Adam, Momentum, Scaling
from jaxlm.training.schedule import Decay, Schedule, bert_rate, make_schedule, openai_rate, warmup_then_decay


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
    """Decay of the learning rate from the peak to `floor`. cosine, linear, polynomial: at the last step. constant: no
    decay. inverse_sqrt: with the inverse root of the step, in units of the warmup. warmup_stable_decay: the peak for
    the fraction `stable` of the steps after the warmup, then polynomial."""
    floor: float = 0.0
    """Lowest learning rate of the decay, as a fraction of peak_lr."""
    power: float = 1.0
    """Power of polynomial and warmup_stable_decay. 1: linear."""
    stable: float = 0.8
    """Fraction of the steps after the warmup at the peak, with warmup_stable_decay."""
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
    layer_decay: float = 1.0
    """Divisor of the learning rate from each layer to the one below. The head has the full rate, the embeddings have
    the lowest. 1: the same rate everywhere."""
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
        self._check_decay()
        if not self.layer_decay > 0:
            raise InputError(f"optimizer.layer_decay must be above 0, got {self.layer_decay:g}; 1 turns it off")
        if self.kind == "adagrad" and not (self.initial_accumulator or self.eps):
            raise InputError("optimizer.initial_accumulator must be above 0 where optimizer.eps is 0; give 0.1")

    def _check_decay(self) -> None:
        """Raise InputError for numbers of a decay that are out of range, or that the chosen one does not use."""
        self._check_range("floor", 0.0, 1.0)
        self._check_range("stable", 0.0, 1.0)
        if not self.power > 0:
            raise InputError(f"optimizer.power must be above 0, got {self.power:g}; the default is 1")
        shaped = ("polynomial", "warmup_stable_decay")
        for name, used in (
            ("floor", self.decay != "constant"),
            ("power", self.decay in shaped),
            ("stable", self.decay == "warmup_stable_decay"),
        ):
            value, default = getattr(self, name), getattr(OptimizerConfig, name)
            if value != default and not used:
                raise InputError(
                    f"optimizer.{name} must be {default:g} with optimizer.decay {self.decay}, got {value:g}; "
                    "leave it out"
                )

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
            f"--optimizer.warmup is {steps:g} steps, but the run has {num_steps}: the learning rate never reaches its "
            "peak; give fewer steps, or a fraction of the run below 1"
        )

    def depends_on_num_steps(self) -> bool:
        """Return True if the learning rate of a step depends on the length of the run."""
        fixed = self.decay in ("constant", "inverse_sqrt")
        return self.kind == "openai_adam" or not fixed or 0 < self.warmup < 1

    def schedule(self, num_steps: int) -> Schedule:
        """Return the numbers of the schedule of a run of `num_steps`."""
        assert self.peak_lr is not None
        decay = {"floor": self.floor, "power": self.power, "stable": self.stable}
        return make_schedule(self.peak_lr, num_steps, self.warmup_steps(num_steps), **decay)

    def learning_rate(self, step: Any, schedule: Schedule) -> jax.Array:
        """Return the learning rate of update `step`, counted from 0. The config gives only the kind and the decay."""
        rate = {"openai_adam": openai_rate, "bert_adamw": bert_rate}.get(self.kind, warmup_then_decay)
        return rate(schedule, step, self.decay)


class Optimizer(NamedTuple):
    """An optax transformation with its schedule, and the direction of an update for the log.

    transformation: its update takes two more arguments, learning_rate and applied; see `make_optimizer`.
    rate(step, schedule): the learning rate of update `step`, counted from 0.
    direction(gradient, state, params): the update that led to `state`, without learning rate and decay, with empty
    nodes for frozen parameters and zeros for frozen layers. gradient, params: the inputs of that update.
    trained(tree): a tree like the parameters without frozen ones and frozen layers.
    """

    transformation: optax.GradientTransformationExtraArgs
    rate: Callable[[Any, Schedule], jax.Array]
    direction: Callable[[Any, Any, Any], Any]
    trained: Callable[[Any], Any] = lambda tree: tree


def make_optimizer(config: OptimizerConfig, boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Optimizer:
    """Return the optimizer of parameters whose shapes and logical axes are `boxed_params`.

    The gradient is clipped by its global norm and scaled to a direction, which gives the update

        -learning_rate (direction + decay_factor weight_decay p)

    with the decay where `jaxlm.training.parameter_groups` has it, and the learning rate times the factor of the
    parameter's group. sgd adds weight_decay p to the clipped gradient instead. Frozen parameters are left out of norms,
    have no state, and get an update of zeros; so have the frozen layers of stacked parameters.

    learning_rate: a scalar, data of the compiled step. applied (True): if false, the state is unchanged and the
    caller must discard the update. The state is selected before the direction is computed, so that it can be updated
    in place.
    """
    chain = _Chain(config, parameter_rules(boxed_params, groups))
    transformation = optax.GradientTransformationExtraArgs(chain.init, chain.update)
    return Optimizer(transformation, config.learning_rate, chain.direction, partial(without_frozen, chain.rules))


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
        applied: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Return the update, which is added to the parameters, and the new state."""
        gradient = self._prepared(gradient, params)
        new = jax.tree.map(partial(jnp.where, applied), self.scaling.accumulate(gradient, state), state)
        new = computed_once(new)
        factor = self.scaling.decay_factor(new) * self.weight_decay

        def update_of(rule: ParameterRule, direction: Any, p: Any) -> Any:
            if rule.frozen:
                return direction
            if rule.decayed and not self.couples_decay:
                direction = direction + factor * p
            return -rule.scaled(learning_rate) * direction

        trained = without_frozen(self.rules, params)
        directions = self.scaling.direction(gradient, new, trained)
        updates = jax.tree.map(update_of, self.rules, directions, trained)
        # p + -0.0 has the bits of p, whatever they are.
        return jax.tree.map(lambda rule, u, p: rule.whole(u, p, -0.0), self.rules, updates, params), new

    def direction(self, gradient: Any, state: Any, params: Any) -> Any:
        """Return the direction of the update that led to `state`, times the factors of the groups."""
        if self.scaling.needs_gradient:
            gradient = self._prepared(gradient, params)
        directions = self.scaling.direction(gradient, state, without_frozen(self.rules, params))

        def scaled(rule: ParameterRule, direction: Any, p: jax.Array) -> Any:
            return direction if rule.frozen else rule.whole(rule.scaled(1.0) * direction, p, 0.0)

        return jax.tree.map(scaled, self.rules, directions, params)

    def _prepared(self, gradient: Any, params: Any) -> Any:
        """Return the gradient of the trained parameters, clipped, with sgd's weight decay added."""
        gradient = _clipped(without_frozen(self.rules, gradient), self.clip_norm)
        if not self.couples_decay:
            return gradient

        def decayed(rule: ParameterRule, g: Any, p: Any) -> Any:
            return g + self.weight_decay * p if rule.decayed and not rule.frozen else g

        return jax.tree.map(decayed, self.rules, gradient, without_frozen(self.rules, params))


def _clipped(gradient: Any, largest: float) -> Any:
    """Return the gradient scaled to a global norm of at most `largest`; 0 does not clip."""
    if not largest > 0:
        return gradient
    scale = jnp.minimum(1.0, largest / jnp.maximum(optax.tree.norm(gradient), 1e-30))
    return jax.tree.map(lambda g: g * scale, gradient)


def computed_once(state: Any) -> Any:
    """Return the new state behind a barrier, so that it is computed once.

    Without it XLA's CPU backend computes the new state from the old one again at each use. The old one then cannot be
    overwritten, and all moments and parameters are copied in every step.
    """
    return jax.lax.optimization_barrier(state) if devices.platform() == "cpu" else state
