"""Rules for the parameters of a model: weight decay, freezing, and learning rates of their own.

The path of a parameter and its logical axes determine its rule. Matrices and tables have the model's width among their
axes and are decayed; biases and norms do not have it and are not decayed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxlm.errors import InputError

WIDTHS = ("width", "whole_width")  # the model's width, sharded or not
STACKED = ("layers", "qkv")  # axes along which independent parameters are stacked


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose whole path matches a regular expression, for example `backbone/blocks/.*`.

    rate: factor of the learning rate and the weight decay; a tuple has one factor per stacked layer.
    frozen: no update and no optimizer state.
    """

    pattern: str
    rate: float | tuple[float, ...] = 1.0
    frozen: bool = False


@dataclass(frozen=True)
class ParameterRule:
    """The treatment of one parameter by the optimizer. axes: its logical axes; rate, frozen: those of its group."""

    axes: tuple[str | None, ...]
    rate: float | tuple[float, ...] = 1.0
    frozen: bool = False

    @property
    def decayed(self) -> bool:
        """True if the parameter is decayed: if the model's width is among its axes."""
        return any(width in self.axes for width in WIDTHS)

    def scaled(self, rate: Any) -> Any:
        """Return `rate` times the group's factor, in a shape that broadcasts to the parameter."""
        if isinstance(self.rate, tuple):
            return rate * jnp.array(self.rate, jnp.float32).reshape(-1, *[1] * (len(self.axes) - 1))
        return rate if self.rate == 1.0 else rate * self.rate


def parameter_rules(boxed_params: Any, groups: Sequence[ParameterGroup] = ()) -> Any:
    """Return the rule of each parameter, a tree with a ParameterRule in place of each box.

    The first matching group applies; a parameter without a group is trained at the full rate. Raises InputError for a
    group that matches nothing, and for a tuple of factors that does not fit the layers of a parameter.
    """
    matched: set[str] = set()

    def rule(path: Any, box: nn.LogicallyPartitioned) -> ParameterRule:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for group in groups:
            if re.fullmatch(group.pattern, name):
                matched.add(group.pattern)
                _check_layers(name, group, box)
                return ParameterRule(box.names, group.rate, group.frozen)
        return ParameterRule(box.names)

    rules = jax.tree_util.tree_map_with_path(rule, boxed_params, is_leaf=_is_box)
    for group in groups:
        if group.pattern not in matched:
            raise InputError(f"parameter group {group.pattern!r} must match a parameter, got none; correct the pattern")
    return rules


def decay_mask(boxed_params: Any) -> Any:
    """Return a tree that is True for each decayed parameter."""
    return jax.tree.map(lambda rule: rule.decayed, parameter_rules(boxed_params))


def without_frozen(rules: Any, tree: Any) -> Any:
    """Return a tree like the parameters with an empty node, optax.MaskedNode, for each frozen one."""
    return jax.tree.map(lambda rule, leaf: optax.MaskedNode() if rule.frozen else leaf, rules, tree)


def _check_layers(name: str, group: ParameterGroup, box: nn.LogicallyPartitioned) -> None:
    if not isinstance(group.rate, tuple):
        return
    layers = box.value.shape[0] if box.names[:1] == ("layers",) else None
    if len(group.rate) != layers:
        raise InputError(
            f"parameter group {group.pattern!r}: rate must have a factor for each of the {layers or 'stacked'} layers "
            f"of {name}, got {len(group.rate)}; give one factor, or a pattern of stacked parameters"
        )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)
