"""Names of the leaves of a tree, and text about them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

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
