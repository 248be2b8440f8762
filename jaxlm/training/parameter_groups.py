"""Rules for the parameters of a model: weight decay, freezing, and learning rates of their own.

The path of a parameter and its logical axes determine its rule. Matrices and tables have the model's width among their
axes and are decayed; biases and norms do not have it and are not decayed.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.models.family import Family

WIDTHS = ("width", "whole_width")  # the model's width, sharded or not
STACKED = ("layers", "qkv")  # axes along which independent parameters are stacked


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose whole path matches a regular expression, for example `backbone/blocks/.*`.

    rate: factor of the learning rate and the weight decay; a tuple has one factor per stacked layer. 0: frozen, that is
    no update and no optimizer state; of stacked layers, the first ones can be frozen.
    begins: stage of gradual unfreezing in which training begins (`jaxlm.training.unfreezing`); a tuple has one per
    stacked layer.
    """

    pattern: str
    rate: float | tuple[float, ...] = 1.0
    begins: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class ParameterRule:
    """The treatment of one parameter by the optimizer. axes: its logical axes; rate, begins: those of its group."""

    axes: tuple[str | None, ...]
    rate: float | tuple[float, ...] = 1.0
    begins: int | tuple[int, ...] = 0

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

    def trained(self, leaf: Any) -> Any:
        """Return the trained layers of a parameter, boxed if it is; an empty node, optax.MaskedNode, if frozen."""
        if self.frozen:
            return optax.MaskedNode()
        return jax.tree.map(lambda x: x[self.frozen_layers :], leaf) if self.frozen_layers else leaf

    def whole(self, trained: Any, p: Any, fill: float) -> Any:
        """Return a value of the trained layers in the shape of the parameter p, with `fill` for the frozen ones."""
        if self.frozen:
            return jnp.full_like(p, fill)
        if not self.frozen_layers:
            return trained
        return jnp.concatenate([jnp.full_like(p[: self.frozen_layers], fill), trained])


def layer_groups(
    family: Family,
    num_layers: int,
    *,
    decay: float = 1.0,
    frozen_layers: int = 0,
    freeze_embeddings: bool = False,
    gradual: bool = False,
) -> tuple[ParameterGroup, ...]:
    """Return groups for a learning rate that falls from layer to layer, for frozen layers and for gradual unfreezing.

    The parameters above the last layer, heads among them, have the full learning rate, layer n of N, counted from 1,
    has it times decay^-(N + 1 - n), and the embeddings, the layer 0, times decay^-(N + 1) (Howard and Ruder, 2018,
    section 3.2, with 2.6; Clark et al., 2020, appendix B, with 1 / 0.8). frozen_layers: the number of first layers to
    freeze. gradual: the last layer begins to train in stage 1, the one below in stage 2, and so on, with the embeddings
    after the lowest trained layer (section 3.3 of Howard and Ruder).
    """
    if decay == 1.0 and not frozen_layers and not freeze_embeddings and not gradual:
        return ()
    rates = [decay ** (depth - num_layers - 1) for depth in range(num_layers + 1)]
    rates[1 : frozen_layers + 1] = [0.0] * frozen_layers
    if freeze_embeddings:
        rates[0] = 0.0
    begins = [0] * (num_layers + 1)
    if gradual:
        for stage, depth in enumerate((depth for depth in reversed(range(num_layers + 1)) if rates[depth]), start=1):
            begins[depth] = stage
    embeddings = ParameterGroup(f"backbone/{family.embeddings}/.*", rates[0], begins[0])
    if family.layers is not None:
        return embeddings, ParameterGroup(f"backbone/{family.layers}/.*", tuple(rates[1:]), tuple(begins[1:]))
    names = map(family.layer_name, range(num_layers))
    layers = zip(names, rates[1:], begins[1:], strict=True)
    return embeddings, *(ParameterGroup(f"backbone/{name}/.*", rate, stage) for name, rate, stage in layers)


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
                return ParameterRule(box.names, group.rate, group.begins)
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
    """Return a tree like the parameters without frozen ones (optax.MaskedNode) and without frozen layers."""
    return jax.tree.map(lambda rule, leaf: rule.trained(leaf), rules, tree)


def _check_layers(name: str, group: ParameterGroup, box: nn.LogicallyPartitioned) -> None:
    layers = box.value.shape[0] if box.names[:1] == ("layers",) else None
    for field, what in (("rate", "factor"), ("begins", "stage")):
        values = getattr(group, field)
        if isinstance(values, tuple) and len(values) != layers:
            raise InputError(
                f"parameter group {group.pattern!r}: {field} must have a {what} for each of the {layers or 'stacked'} "
                f"layers of {name}, got {len(values)}; give one {what}, or a pattern of stacked parameters"
            )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)
