"""PartitionSpecs from logical axis names, and constraints that apply them inside a step.

A dimension that its mesh axes do not divide (40,478 words by 4) is replicated: GSPMD would reject or pad it. Linen's
own logical constraints lack this rule, so its context of rules stays empty and the one here is used.
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
    """Make `constrain` map logical axes by `rules` while a step is traced; None makes it a no-op."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def with_axes(init: Callable[..., jax.Array], names: Sequence[str | None]) -> Callable[..., jax.Array]:
    """Return `init` with logical axes for its result: a box, which `Module.param` stores and unboxes on access."""
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init, tuple(names))
    return boxed


def partition_spec(
    names: Sequence[str | None], shape: Sequence[int], rules: Mapping[str, Any], mesh_shape: Mapping[str, int]
) -> tuple[PartitionSpec, list[str]]:
    """Return the spec of an array with these axes, and a note for each dimension that is not divisible."""
    spec, kept_whole = [], []
    for name, size in zip(names, shape, strict=True):
        target = rules.get(name) if name is not None else None
        axes = (target,) if isinstance(target, str) else tuple(target or ())
        shards = 1
        for axis in axes:
            shards *= mesh_shape[axis]
        if size % shards:
            kept_whole.append(f"{name} ({size}) by {' x '.join(axes)} ({shards})")
            axes = ()
        spec.append((axes if len(axes) > 1 else axes[0]) if axes else None)
    return PartitionSpec(*spec), kept_whole


def current_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """Return the spec of an array with these logical axes under `jax.set_mesh` and `use_rules`; None without them."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _rules.get()
    if rules is None or mesh.empty or mesh.size == 1:
        return None
    return partition_spec(names, shape, rules, mesh.shape)[0]


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Return `x` sharded by its logical axes under `jax.set_mesh` and `use_rules`; unchanged without them."""
    spec = current_spec(names, x.shape)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)
