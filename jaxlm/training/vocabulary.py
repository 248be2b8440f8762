"""A start with another vocabulary: each token's row comes from the same token of the start.

ULMFiT trains a language model on the target task's text with the words of that text (Howard and Ruder, 2018; fastai,
courses/dl2/imdb_scripts/finetune_lm.py:107-123). A token that the start lacks begins at the mean of the start's rows.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import InputError
from jaxlm.text import Tokenizer

NEW = -1


def matched_rows(old: Tokenizer, new: Tokenizer) -> np.ndarray:
    """Return the id in `old` of each token of `new`, int32 (V,), or NEW for a token that `old` lacks.

    Special tokens match by their role, other tokens by their spelling. InputError if the tokenizers are of different
    kinds, or have no token in common that is not special.
    """
    known = {token: i for i, token in reversed(list(enumerate(_tokens(old))))}
    rows = np.array([known.get(token, NEW) for token in _tokens(new)], np.int32)
    plain = [i for i in range(new.size) if i not in set(new.specials.values())]
    if old.kind != new.kind or (rows[plain] == NEW).all():
        raise InputError(
            f"--start-vocabulary matched must have tokenizers of one kind with tokens in common, got {old.kind!r} "
            f"({old.size:,} ids) in the start and {new.kind!r} ({new.size:,} ids) in the store; prepare the store with "
            "a tokenizer like that of the start"
        )
    return rows


def with_rows(loaded: Any, rows: np.ndarray, paths: Sequence[str], like: Any) -> Any:
    """Return the tree `loaded` with the leaves at `paths`, (old ids, …), as (new ids, …) in the order of `rows`.

    A row of NEW is the mean of all loaded rows. paths: regular expressions. like: a tree with the new leaves, for their
    shardings. InputError for a table in clusters.
    """

    def taken(leaf: jax.Array) -> jax.Array:
        is_new = (rows == NEW).reshape(-1, *[1] * (leaf.ndim - 1))
        mean = jnp.mean(leaf.astype(jnp.float32), axis=0, keepdims=True).astype(leaf.dtype)
        return jnp.where(is_new, mean, jnp.take(leaf, np.maximum(rows, 0), axis=0))

    def of_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not any(re.fullmatch(pattern, name) for pattern in paths):
            return leaf
        if shapes.get(name) != (len(rows), *leaf.shape[1:]):
            raise InputError(
                "--start-vocabulary must be same for a model with an adaptive softmax, got matched; leave it out"
            )
        return jax.jit(taken, out_shardings=shardings[name])(leaf)

    named = jax.tree_util.tree_flatten_with_path(like)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
    shardings = {name: leaf.sharding for name, (_, leaf) in zip(names, named, strict=True)}
    shapes = {name: leaf.shape for name, (_, leaf) in zip(names, named, strict=True)}
    return jax.tree_util.tree_map_with_path(of_leaf, loaded)


def matched_note(rows: np.ndarray, name: str) -> str:
    """Return a sentence with the number of rows that the start `name` has."""
    found = int((rows != NEW).sum())
    return f"vocabulary: {found:,} of {len(rows):,} rows come from {name}, {len(rows) - found:,} begin at their mean"


def _tokens(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return what identifies each token: its role, or its spelling."""
    roles = {i: role for role, i in sorted(tokenizer.specials.items(), reverse=True)}
    pieces = tokenizer.pieces(range(tokenizer.size))
    return [("role", roles[i]) if i in roles else ("piece", piece) for i, piece in enumerate(pieces)]
