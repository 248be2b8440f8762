"""Names for the leaves of a tree, and sentences about them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

PyTree = Any


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their path, written `params/backbone/blocks/0`; in the order of jax.tree.leaves."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves or not name:
            raise ValueError(f"the leaf at {path} has no name of its own in its tree")
        leaves[name] = leaf
    return leaves


def nested_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `named_leaves`, as nested dictionaries whatever the tree was made of."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def shape_and_type(leaf: Any) -> str:
    """`float32[16, 4]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many there are beside them."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
