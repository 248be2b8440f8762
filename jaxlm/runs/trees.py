"""Trees of arrays: the names of their leaves, and a strict merge of loaded parameters into fresh ones."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

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
