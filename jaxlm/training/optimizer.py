"""The optimizer of a run as an optax transformation: clip, scaling, weight decay, learning rate.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant in its code (openai/finetune-transformer-lm, opt.py:5-49), `bert_adamw` the one in BERT's
code (google-research/bert, optimization.py:31-157). `jaxlm.training.optimizer_variants` has what a plain run does not
need: the other kinds, the published schedules, learning rates by layer, and gradual unfreezing.

The path of a parameter and its logical axes determine its rule. Matrices and tables have the model's width among their
axes and are decayed; biases and norms do not have it and are not decayed.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.training.optimizer_config import Decay, OptimizerConfig

WIDTHS = ("width", "whole_width")  # the model's width, sharded or not
STACKED = ("layers", "qkv")  # axes along which independent parameters are stacked
TIMESCALE = 10_000.0  # of inverse_sqrt without a warmup, and of T5 (Raffel et al., 2020, section 3.1.2)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose whole path matches a regular expression, for example `backbone/blocks/.*`.

    rate: factor of the learning rate and the weight decay; a tuple has one factor per stacked layer. 0: frozen, that is
    no update and no optimizer state; of stacked layers, the first ones can be frozen.
    unfreeze_stage: stage of gradual unfreezing in which training begins; a tuple has one per stacked layer.
    """

    pattern: str
    rate: float | tuple[float, ...] = 1.0
    unfreeze_stage: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class ParameterRule:
    """The treatment of one parameter by the optimizer. axes: its logical axes; the others are those of its group."""

    axes: tuple[str | None, ...]
    rate: float | tuple[float, ...] = 1.0
    unfreeze_stage: int | tuple[int, ...] = 0

    @property
    def decayed(self) -> bool:
        """True if the parameter is decayed: if the model's width is among its axes."""
        return any(width in self.axes for width in WIDTHS)

    @property
    def frozen(self) -> bool:
        """True if the whole parameter is frozen."""
        return not any(self.rate) if isinstance(self.rate, tuple) else not self.rate

    @property
    def frozen_layers(self) -> int:
        """The number of frozen layers of a stacked parameter, its first ones."""
        rates = self.rate if isinstance(self.rate, tuple) else ()
        return len(list(itertools.takewhile(lambda rate: not rate, rates)))

    def scaled(self, rate: Any) -> Any:
        """Return `rate` times the group's factor, in a shape that broadcasts to the trained layers."""
        if isinstance(self.rate, tuple):
            factors = jnp.array(self.rate[self.frozen_layers :], jnp.float32)
            return rate * factors.reshape(-1, *[1] * (len(self.axes) - 1))
        return rate if self.rate == 1.0 else rate * self.rate

    def trainable(self, leaf: Any) -> Any:
        """Return the trained layers of a parameter, boxed if it is; an empty node, optax.MaskedNode, if frozen."""
        if self.frozen:
            return optax.MaskedNode()
        return jax.tree.map(lambda x: x[self.frozen_layers :], leaf) if self.frozen_layers else leaf

    def with_frozen_filled(self, trained: Any, p: Any, fill: float) -> Any:
        """Return a value of the trained layers in the shape of the parameter p, with `fill` for the frozen ones."""
        if self.frozen:
            return jnp.full_like(p, fill)
        if not self.frozen_layers:
            return trained
        return jnp.concatenate([jnp.full_like(p[: self.frozen_layers], fill), trained])


def parameter_rules(boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Any:
    """Return the rule of each parameter, a tree with a ParameterRule in place of each box.

    The first matching group applies; a parameter without a group is trained at the full rate. Raises InputError for a
    group that matches nothing, and for a tuple of factors that does not fit the layers of a parameter.
    """
    matched: set[str] = set()

    def rule(path: Any, box: nn.LogicallyPartitioned) -> ParameterRule:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        group = next((group for group in groups if re.fullmatch(group.pattern, name)), ParameterGroup(".*"))
        matched.add(group.pattern)
        _check_layers(name, group, box)
        return ParameterRule(box.names, group.rate, group.unfreeze_stage)

    rules = jax.tree_util.tree_map_with_path(
        rule, boxed_params, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    for group in groups:
        if group.pattern not in matched:
            raise InputError(f"parameter group {group.pattern!r} must match a parameter, got none; correct the pattern")
    return rules


def without_frozen(rules: Any, tree: Any) -> Any:
    """Return a tree like the parameters without frozen ones (optax.MaskedNode) and without frozen layers."""
    return jax.tree.map(lambda rule, leaf: rule.trainable(leaf), rules, tree)


def with_untrained_kept(trains: str | None, new: Any, old: Any) -> Any:
    """Return a tree with the leaves of `old` for the parameters that a step does not train, and those of `new` else.

    new, old: the parameters, or a tree with such trees among its nodes, as an optimizer's state; a leaf outside of them
    is that of `new`. trains: see `Objective`.
    """
    if trains is None:
        return new

    def chosen(path: Any, new_leaf: Any, old_leaf: Any) -> Any:
        name = "/".join(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
        return new_leaf if not name or re.fullmatch(trains, name) else old_leaf

    return jax.tree_util.tree_map_with_path(chosen, new, old)


def _check_layers(name: str, group: ParameterGroup, box: nn.LogicallyPartitioned) -> None:
    layers = box.value.shape[0] if box.names[:1] == ("layers",) else None
    for field, what in (("rate", "factor"), ("unfreeze_stage", "stage")):
        values = getattr(group, field)
        if isinstance(values, tuple) and len(values) != layers:
            raise InputError(
                f"parameter group {group.pattern!r}: {field} must have a {what} for each of the {layers or 'stacked'} "
                f"layers of {name}, got {len(values)}; give one {what}, or a pattern of stacked parameters"
            )


class Schedule(NamedTuple):
    """The numbers of a learning-rate schedule, float32 scalars: data of a compiled step, not constants in it.

    peak_lr: the highest learning rate. num_steps: the updates of the run. warmup: steps; warmup_fraction: the same as a
    fraction of the run. floor, power, stable: the fields of the decay.
    """

    peak_lr: Any
    num_steps: Any
    warmup: Any
    warmup_fraction: Any
    floor: Any
    power: Any
    stable: Any

    def remaining(self, t: jax.Array, decay: Decay, x: jax.Array) -> jax.Array:
        """Return the fraction of the peak that a decay leaves in update t, at fraction x of its length."""
        if decay in ("constant", "halved_by_validation"):  # the step multiplies by the factor of the state
            return jnp.ones_like(x)
        if decay == "inverse_sqrt":
            scale = jnp.where(self.warmup > 0, self.warmup, TIMESCALE)
            passed = jnp.maximum(0.0, t - self.warmup) / scale
            return jnp.maximum(self.floor, 1.0 / jnp.sqrt(1.0 + passed))
        if decay == "constant_inverse_sqrt":
            return jnp.maximum(self.floor, 1.0 / jnp.sqrt(jnp.maximum(1.0, t / TIMESCALE)))
        if decay == "warmup_stable_decay":
            x = jnp.maximum(0.0, self.after_warmup(t) - self.stable) / (1.0 - self.stable)
        if decay in ("polynomial", "warmup_stable_decay"):
            return self.above_floor(jnp.maximum(0.0, 1.0 - x) ** self.power)
        return self.above_floor(1.0 - x if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * x)))

    def after_warmup(self, t: jax.Array) -> jax.Array:
        """Return the fraction of the steps after the warmup that has passed before update t."""
        length = jnp.maximum(1.0, self.num_steps - self.warmup)
        return jnp.clip((t - self.warmup) * (1.0 / length), 0.0, 1.0)

    def above_floor(self, fraction: jax.Array) -> jax.Array:
        """Return a fraction of the peak from 1 to 0 as one from 1 to the floor; a floor of 0 keeps its bits."""
        return self.floor + (1.0 - self.floor) * fraction


class Optimizer(NamedTuple):
    """An optax transformation with its schedule, and the direction of an update for the log.

    transformation: its update takes two more arguments, learning_rate and applied; see `make_optimizer`.
    rate(step, schedule): the learning rate of update `step`, counted from 0.
    direction(gradient, state, params): the update that led to `state`, without learning rate and decay, with empty
    nodes for frozen parameters and zeros for frozen layers. gradient, params: the inputs of that update.
    trainable(tree): a tree like the parameters without frozen ones and frozen layers.
    last_stage, stage_of, mask_frozen_stage: see `optimizer_variants.unfreeze_gradually`; by default there is one stage,
    in which everything trains.
    """

    transformation: optax.GradientTransformationExtraArgs
    rate: Callable[[Any, Schedule], jax.Array]
    direction: Callable[[Any, Any, Any], Any]
    trainable: Callable[[Any], Any] = lambda tree: tree
    last_stage: int = 0
    stage_of: Callable[[Any, Any], Any] = lambda step, stage_steps: None
    mask_frozen_stage: Callable[..., Any] = lambda tree, stage: tree


def make_optimizer(config: OptimizerConfig, boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Optimizer:
    """Return the optimizer of parameters whose shapes and logical axes are `boxed_params`.

    The gradient is clipped by its global norm and scaled to a direction, which gives the update

        -learning_rate (direction + decay_factor weight_decay p)

    with the decay of matrices and tables, and the learning rate times the factor of the parameter's group. sgd adds
    weight_decay p to the clipped gradient instead. Frozen parameters are left out of norms, have no state, and get an
    update of zeros; so have the frozen layers of stacked parameters.

    learning_rate: a scalar, data of the compiled step. applied (True): if false, the state is unchanged and the
    caller must discard the update. The state is selected before the direction is computed, so that it can be updated
    in place.
    """
    rules = parameter_rules(boxed_params, groups)
    chain = _Chain(config, rules)
    transformation = optax.GradientTransformationExtraArgs(chain.init, chain.update)
    trainable = partial(without_frozen, rules)
    optimizer = Optimizer(transformation, partial(learning_rate, config), chain.direction, trainable)
    last_stage = int(max(np.max(rule.unfreeze_stage) for rule in jax.tree.leaves(rules)))
    if not last_stage:
        return optimizer
    from jaxlm.training.optimizer_variants import unfreeze_gradually

    return unfreeze_gradually(optimizer, rules, last_stage)


class _Chain:
    """The stages of an optimizer, applied in sequence; its state is that of the scaling."""

    def __init__(self, config: OptimizerConfig, rules: Any) -> None:
        self.rules, self.scaling = rules, _scaling_of(config, rules)
        self.clip_norm, self.weight_decay = config.clip_norm, config.weight_decay
        self.couples_decay = config.kind == "sgd"

    def init(self, params: Any) -> Any:
        """Return the state before the first update."""
        return self.scaling.init(without_frozen(self.rules, params))

    def update(
        self, gradient: Any, state: Any, params: Any = None, *, learning_rate: Any, applied: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        """Return the update, which is added to the parameters, and the new state."""
        gradient = self._prepared(gradient, params)
        new = self.scaling.accumulate(gradient, state)
        new = materialized(jax.tree.map(partial(jnp.where, applied), new, state))
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
        return jax.tree.map(lambda rule, u, p: rule.with_frozen_filled(u, p, -0.0), self.rules, updates, params), new

    def direction(self, gradient: Any, state: Any, params: Any) -> Any:
        """Return the direction of the update that led to `state`, times the factors of the groups."""
        if self.scaling.needs_gradient:
            gradient = self._prepared(gradient, params)
        directions = self.scaling.direction(gradient, state, without_frozen(self.rules, params))

        def scaled(rule: ParameterRule, direction: Any, p: jax.Array) -> Any:
            return direction if rule.frozen else rule.with_frozen_filled(rule.scaled(1.0) * direction, p, 0.0)

        return jax.tree.map(scaled, self.rules, directions, params)

    def _prepared(self, gradient: Any, params: Any) -> Any:
        """Return the gradient of the trained parameters, clipped, with sgd's weight decay added."""
        gradient = without_frozen(self.rules, gradient)
        if self.clip_norm > 0:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(optax.tree.norm(gradient), 1e-30))
            gradient = jax.tree.map(lambda g: g * scale, gradient)
        if not self.couples_decay:
            return gradient

        def decayed(rule: ParameterRule, g: Any, p: Any) -> Any:
            return g + self.weight_decay * p if rule.decayed and not rule.frozen else g

        return jax.tree.map(decayed, self.rules, gradient, without_frozen(self.rules, params))


def materialized(state: Any) -> Any:
    """Return the new state behind a barrier, so that it is computed once.

    Without it XLA's CPU backend computes the new state from the old one again at each use. The old one then cannot be
    overwritten, and all moments and parameters are copied in every step.
    """
    return jax.lax.optimization_barrier(state) if devices.platform() == "cpu" else state


def _scaling_of(config: OptimizerConfig, rules: Any) -> "Scaling":
    """Return the scaling of an optimizer's kind. rules: a tree of ParameterRule."""
    if config.kind == "adamw" or config.kind == "openai_adam" or config.kind == "bert_adamw":
        return Adam(config.kind, config.beta1, config.beta2, config.eps)
    from jaxlm.training.optimizer_variants import Adafactor, Adagrad, Momentum

    if config.kind == "sgd":
        return Momentum(config.momentum)
    return Adafactor(rules) if config.kind == "adafactor" else Adagrad(config.initial_accumulator, config.eps)


class Scaling:
    """A scaling of the gradient, with a state that is one of optax's.

    init(params): the state before the first update; its leaves keep the boxes of their parameters.
    accumulate(gradient, state): the state updated with a gradient. direction(gradient, state, params): the direction of
    the update from that new state, before learning rate and decay. The two are separate so that the caller can discard
    an update of the state and can log the direction later. Trees may have empty nodes in place of parameters that are
    not trained. needs_gradient: True if `direction` reads more than the state.
    """

    needs_gradient: bool = True
    init: Callable[..., Any]
    accumulate: Callable[..., Any]
    direction: Callable[..., Any]

    def decay_factor(self, state: Any) -> jax.Array | float:
        """Return the factor of the decoupled weight decay."""
        return 1.0


@dataclass(frozen=True)
class Adam(Scaling):
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
    needs_gradient = False

    def init(self, params: Any) -> optax.ScaleByAdamState:
        mu, nu = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def accumulate(self, gradient: Any, state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        b1, b2 = self.beta1, self.beta2
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradient)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * g), state.nu, gradient)
        return optax.ScaleByAdamState(state.count + 1, mu, nu)

    def direction(self, gradient: Any, state: optax.ScaleByAdamState, params: Any) -> Any:
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


def schedule_of(config: OptimizerConfig, num_steps: int) -> Schedule:
    """Return the numbers of the schedule of a run of `num_steps`."""
    assert config.peak_lr is not None
    total, warmup = max(1, num_steps), config.warmup_steps(num_steps)
    numbers = (config.peak_lr, total, warmup, warmup / total, config.floor, config.power, config.stable)
    return Schedule(*map(np.float32, numbers))


def learning_rate(config: OptimizerConfig, step: Any, schedule: Schedule) -> jax.Array:
    """Return the learning rate of update `step`: a linear warmup, then a decay of the peak.

    The warmup is peak (t + 1) / w, and the rate reaches its minimum one update after the last. With update t counted
    from 0, T updates, w of them warmup, and the fraction x of the decay that has passed, the decays leave this fraction
    of the peak:

        constant, halved_by_validation: 1
        linear               f + (1 - f) (1 - x)
        cosine               f + (1 - f) (1 + cos(pi x)) / 2
        polynomial           f + (1 - f) (1 - x)^p
        inverse_sqrt         max(f, 1 / sqrt(1 + (t - w) / s)), s = w, or 10,000 without a warmup
        constant_inverse_sqrt: max(f, 1 / sqrt(max(1, t / 10,000)))
        warmup_stable_decay  f + (1 - f) (1 - y)^p, y = max(0, x' - q) / (1 - q), x' = (t - w) / (T - w)
        slanted_triangular   f + (1 - f) (1 - x), and f + (1 - f) t / w during the warmup
        one_plus_root        min(1, t / w) / (1 + 0.005 sqrt(t)), during the warmup too

    f: `floor`, p: `power`, q: `stable`. Polynomial decay is that of BERT's code, with p = 1. The inverse square root is
    that of Vaswani et al. (2017) and T5, in the form of big_vision and Hugging Face. Warmup, stable, decay: Hu et al.
    (2024, MiniCPM, section 4). Slanted triangles: Howard and Ruder (2018, ULMFiT, equation 3), with f = 1 / ratio and w
    / T = cut_frac; the fall ends at the last step, as in their code, where the equation rounds. The root: Clark et al.
    (2018, CVT), in tensorflow/models, cvt_text/model/multitask_model.py:80-88. x is measured from the
    end of the warmup, but in the published codes of GPT-1 and BERT from step 0 (`jaxlm.training.optimizer_variants`).
    """
    t = jnp.asarray(step, jnp.float32)
    if config.decay in ("slanted_triangular", "one_plus_root") or config.kind in ("openai_adam", "bert_adamw"):
        from jaxlm.training.optimizer_variants import published_rate

        return published_rate(config, t, schedule)
    rise = jnp.minimum(1.0, (t + 1) * (1.0 / jnp.maximum(1.0, schedule.warmup)))
    fall = schedule.remaining(t, config.decay, schedule.after_warmup(t))
    return schedule.peak_lr * jnp.where(t < schedule.warmup, rise, fall)
