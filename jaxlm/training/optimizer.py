"""The optimizer of a run as an optax transformation: clip, scaling, weight decay, learning rate.

`adamw` is Adam with decoupled decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), which GPT-1's paper describes.
`openai_adam` is the variant in its code (openai/finetune-transformer-lm, opt.py:5-49), `bert_adamw` the one in BERT's
code (google-research/bert, optimization.py:31-157). `sgd` and `adagrad` follow torch.optim.SGD and TensorFlow,
`adafactor` follows T5 (Shazeer and Stern, 2018).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlm.distributed import devices
from jaxlm.training.adafactor import Adafactor
from jaxlm.training.optimizer_config import OptimizerConfig
from jaxlm.training.parameter_groups import ParameterGroup, ParameterRule, parameter_rules, without_frozen
from jaxlm.training.scaling import Adagrad, Adam, Momentum, Scaling
from jaxlm.training.schedule import Schedule, learning_rate
from jaxlm.training.unfreezing import begun, last_stage


class Optimizer(NamedTuple):
    """An optax transformation with its schedule, and the direction of an update for the log.

    transformation: its update takes two more arguments, learning_rate and applied; see `make_optimizer`.
    rate(step, schedule): the learning rate of update `step`, counted from 0.
    direction(gradient, state, params): the update that led to `state`, without learning rate and decay, with empty
    nodes for frozen parameters and zeros for frozen layers. gradient, params: the inputs of that update.
    trained(tree): a tree like the parameters without frozen ones and frozen layers.
    last_stage: the last stage of gradual unfreezing, 0 without it. begun(tree, stage, fill): the tree with `fill` (0)
    where training has not begun.
    """

    transformation: optax.GradientTransformationExtraArgs
    rate: Callable[[Any, Schedule], jax.Array]
    direction: Callable[[Any, Any, Any], Any]
    trained: Callable[[Any], Any] = lambda tree: tree
    last_stage: int = 0
    begun: Callable[..., Any] = lambda tree, stage, fill=0.0: tree


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
    return Optimizer(
        transformation,
        partial(learning_rate, config),
        chain.direction,
        partial(without_frozen, chain.rules),
        last_stage(chain.rules),
        partial(begun, chain.rules),
    )


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
