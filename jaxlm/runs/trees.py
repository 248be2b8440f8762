"""Trees of arrays: the names of their leaves, a strict merge of loaded parameters into fresh ones, and checksums.

A leaf has one 32-bit checksum, computed where the array lives: the sum modulo 2**32 of mix(bits[i] + i * GOLDEN) over
the elements i, in row-major order of the global array. The sum does not depend on the order of its terms, so every
sharding, mesh and number of processes gives the same value. `mix` and the odd multiplier are bijections: a single
changed element is always detected, any other change with probability 1 - 2**-32. Bits are compared, not values: -0.0
differs from 0.0 and a NaN equals itself. `mix` is the finalizer of MurmurHash3 (Appleby, 2011).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.errors import InputError

PyTree = Any


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their path, as `params/backbone/blocks/0`, in the order of jax.tree.leaves."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves or not name:
            raise ValueError(f"the leaf at {path} must have a unique name in its tree")
        leaves[name] = leaf
    return leaves


def nested_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `named_leaves`, always as nested dictionaries."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def shape_and_type(leaf: Any) -> str:
    """Return the dtype and shape of a leaf as `float32[16, 4]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return the first `most` names, followed by the number of the others."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def merge_parameters(
    fresh: PyTree,
    loaded: PyTree,
    *,
    allow_fresh: Sequence[str] = (),
    grow: Mapping[str, int] | None = None,
    notes: list[str] | None = None,
) -> PyTree:
    """Return the tree of `fresh` with the values of `loaded`.

    allow_fresh: regular expressions over whole paths (`head/.*`); these leaves keep their fresh values, and loaded
    leaves of these names are ignored. grow: maps a path, or a regular expression, to an axis along which the loaded
    leaf may be shorter; its rows come first and the fresh rows follow (new special tokens, or layers above the first
    n). notes: sentences about fresh and grown leaves are appended to it.
    Raises InputError, listing the differences (- loaded, + wanted), unless every other leaf is in both trees with the
    same shape and dtype.
    """
    notes = [] if notes is None else notes
    wanted, given = named_leaves(fresh), named_leaves(loaded)
    is_fresh = {name for name in [*wanted, *given] if _match(name, allow_fresh) is not None}
    merged: dict[str, Any] = {}
    differences: list[str] = []
    grown: list[str] = []
    for name, leaf in wanted.items():
        if name in is_fresh:
            merged[name] = leaf
        elif name not in given:
            differences.append(f"+ {name} {shape_and_type(leaf)}")
        elif _fits(given[name], leaf):
            merged[name] = given[name]
        elif (pattern := _match(name, grow or ())) is not None and _fits(given[name], leaf, (grow or {})[pattern]):
            axis = (grow or {})[pattern]
            merged[name] = _grown(leaf, given[name])
            grown.append(f"{name} from {given[name].shape[axis]} to {leaf.shape[axis]}")
        else:
            differences.append(f"- {name} {shape_and_type(given[name])} + {name} {shape_and_type(leaf)}")
    differences += [
        f"- {name} {shape_and_type(leaf)}"
        for name, leaf in given.items()
        if name not in wanted and name not in is_fresh
    ]
    if differences:
        raise InputError(f"the loaded parameters must match the model (- loaded, + wanted): {listed(differences, 8)}")
    if kept := [name for name in wanted if name in is_fresh]:
        notes.append(f"fresh: {', '.join(kept)}")
    if grown:
        notes.append(f"grown: {', '.join(grown)}")
    return jax.tree.unflatten(jax.tree.structure(fresh), [merged[name] for name in wanted])


def _match(name: str, patterns: Any) -> str | None:
    return next((pattern for pattern in patterns if re.fullmatch(pattern, name)), None)


def _fits(given: Any, wanted: Any, axis: int | None = None) -> bool:
    if given.dtype != wanted.dtype or len(given.shape) != len(wanted.shape):
        return False
    pairs = list(zip(given.shape, wanted.shape, strict=True))
    if axis is not None:
        shorter, longer = pairs.pop(axis)
        if shorter > longer:
            return False
    return all(have == want for have, want in pairs)


def _grown(fresh: Any, loaded: Any) -> Any:
    if isinstance(fresh, np.ndarray):
        grown = fresh.copy()
        grown[tuple(slice(size) for size in loaded.shape)] = np.asarray(loaded)
        return grown
    update = jax.jit(jax.lax.dynamic_update_slice, out_shardings=fresh.sharding)
    return update(fresh, loaded, (0,) * fresh.ndim)


GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio, odd


def leaf_checksums(tree: PyTree) -> dict[str, int]:
    """Return the checksum of each leaf by its path, the same under every sharding.

    Leaves are arrays of bool, integers or floats of 8 to 64 bits, of any shape. Every process must call this function.
    Leaves are processed one at a time, and stacks layer by layer: on a CPU, where XLA does not fuse the operations, the
    temporary memory is that of one layer.
    """
    leaves = named_leaves(tree)
    checksum = _compiled(_replicated(leaves.values()))
    return {name: int(checksum(leaf)) for name, leaf in leaves.items()}


def _replicated(leaves) -> NamedSharding | None:
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


@functools.cache
def _compiled(out_sharding: NamedSharding | None):
    return jax.jit(_checksum, out_shardings=out_sharding)


def _checksum(leaf: jax.Array) -> jax.Array:
    if leaf.ndim < 3:
        return _mixed_sum(leaf, jnp.uint32(0))
    # The layers of a stack one at a time, so that the temporaries have the size of one layer.
    stride = jnp.uint32(GOLDEN * (leaf.size // max(1, leaf.shape[0])) % 2**32)

    def add(total: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _mixed_sum(layer[1], layer[0] * stride), None

    total, _ = jax.lax.scan(add, jnp.uint32(0), (jnp.arange(leaf.shape[0], dtype=jnp.uint32), leaf))
    return total


def _mixed_sum(leaf: jax.Array, start: jax.Array) -> jax.Array:
    """Return the sum over a leaf, or one layer of it, whose first element has the index `start` / GOLDEN."""
    bits = _bits(leaf)
    mixed = bits + start
    stride = GOLDEN
    for axis in reversed(range(bits.ndim)):
        mixed = mixed + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _bits(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}.get(leaf.dtype.itemsize)
    if unsigned is None or not (jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise TypeError(
            f"dtype must be bool, an integer or a float of 8 to 64 bits, got {leaf.dtype}; convert the array"
        )
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
