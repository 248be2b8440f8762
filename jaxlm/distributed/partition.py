"""Logical axis names to a PartitionSpec, and constraints that follow them inside a step.

A dimension that its mesh axes do not divide (40,478 words by 4) stays whole: GSPMD would refuse or pad it. Linen's own
logical constraints know no such rule, so its context of rules stays empty and ours is used.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

_rules: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("rules", default=None)


@contextlib.contextmanager
def use_rules(rules: Mapping[str, Any] | None) -> Iterator[None]:
    """Let `constrain` map logical axes by `rules` while a step is traced; None: let it do nothing."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def with_axes(init: Callable[..., jax.Array], names: Sequence[str | None]) -> Callable[..., jax.Array]:
    """`init` with the logical axes of what it makes: a box, which `Module.param` keeps and gives the array of."""
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init, tuple(names))
    return boxed


def partition_spec(
    names: Sequence[str | None], shape: Sequence[int], rules: Mapping[str, Any], mesh_shape: Mapping[str, int]
) -> tuple[PartitionSpec, list[str]]:
    """The spec of an array with these axes, and a note for each dimension kept whole because it does not divide."""
    spec, kept_whole = [], []
    for name, size in zip(names, shape, strict=True):
        target = rules.get(name) if name is not None else None
        axes = (target,) if isinstance(target, str) else tuple(target or ())
        pieces = 1
        for axis in axes:
            pieces *= mesh_shape[axis]
        if size % pieces:
            kept_whole.append(f"{name} ({size}) by {' x '.join(axes)} ({pieces})")
            axes = ()
        spec.append((axes if len(axes) > 1 else axes[0]) if axes else None)
    return PartitionSpec(*spec), kept_whole


def current_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """The spec of an array with these logical axes under `jax.set_mesh` and `use_rules`; None without them."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _rules.get()
    if rules is None or mesh.empty or mesh.size == 1:
        return None
    return partition_spec(names, shape, rules, mesh.shape)[0]


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """`x` laid out by its logical axes under `jax.set_mesh` and `use_rules`; as it is without them."""
    spec = current_spec(names, x.shape)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)
