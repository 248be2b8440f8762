"""The first state of a run: its newest checkpoint, the state or the parameters of another run, or from scratch.

With another vocabulary, each token's row comes from the same token of the start. ULMFiT trains a language model on the
target task's text with the words of that text (Howard and Ruder, 2018; fastai, courses/dl2/imdb_scripts/
finetune_lm.py:107-123). A token that the start lacks begins at the mean of the start's rows.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.distributed.mesh import abstract_leaf
from jaxlm.errors import InputError
from jaxlm.models import family_of
from jaxlm.runs.checkpoints import Checkpoints, Metadata, Restored
from jaxlm.runs.trees import merge_parameters, named_leaves
from jaxlm.text import Tokenizer
from jaxlm.training.loss_scale import first_scale
from jaxlm.training.start import Source
from jaxlm.training.step import OPTIONAL, OWN, TrainState, from_saved, no_norms, saved_part
from jaxlm.training.weights import Iterates, first_average, no_halving, no_selection

NEW = -1  # a token that the start lacks


def with_parameters(
    state: TrainState,
    source: Source,
    *,
    allow_fresh: Sequence[str] = (),
    grow: Mapping[str, int] | None = None,
    transfer_layers: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[TrainState, list[str]]:
    """Return `state` with the source's parameters, including those of a head that may be loaded, and notes.

    allow_fresh, grow: as in `merge_parameters`. transfer_layers: load the first n layers only, those of several stacks
    in order; the others keep their values in `state`. tokenizer: that of `state`, if the rows of the source's
    vocabulary are to be matched with it.
    """
    saved = source.saved
    parts = [part for part in ("backbone", "head") if part in state.params and f"{part}/.*" not in allow_fresh]
    wanted = {part: dict(saved[part]) for part in parts if part in saved}
    if "head" in wanted:  # drop the heads that this run does not have
        wanted["head"] = {name: saved["head"][name] for name in saved["head"] if name in state.params["head"]}
    replicated, known = state.step.sharding, named_leaves(state.params)

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        """Return the leaf with the sharding of the state's leaf, if there is one of that shape, else replicated."""
        own = known.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        sharding = own.sharding if own is not None and own.shape == leaf.shape else replicated
        return abstract_leaf(leaf, sharding)

    abstract = jax.tree_util.tree_map_with_path(place, wanted)
    loaded, loading_notes = source.open_parameters().load(abstract)
    notes, grow = list(loading_notes), dict(grow or {})
    if tokenizer is not None:
        rows = matched_rows(source.original_tokenizer, tokenizer)
        paths = [f"backbone/{name}" for name in family_of(source.model).vocabulary_leaves]
        loaded = with_rows(loaded, rows, paths, state.params)
        found, size = int((rows != NEW).sum()), len(rows)
        notes.append(
            f"vocabulary: {found:,} of {size:,} rows come from {source.name}, {size - found:,} begin at their mean"
        )
    if transfer_layers is not None:
        left = transfer_layers
        for name, count in family_of(source.model).stacks.items():
            kept = min(left, getattr(source.model, count))
            loaded["backbone"][name] = jax.tree.map(operator.itemgetter(slice(kept)), loaded["backbone"][name])
            grow[f"backbone/{name}/.*"] = 0
            left -= kept
    params = merge_parameters(state.params, loaded, allow_fresh=allow_fresh, grow=grow, notes=notes)
    average = None if state.average is None else first_average(params)
    return replace(state, params=params, average=average), notes


def fresh_parts(source: Source, state: TrainState) -> tuple[str, ...]:
    """Return patterns of the parameters that `source` lacks for a pretraining run: heads, and the pooler."""
    saved = source.saved.get("head", {})
    heads = state.params.get("head", {})
    missing = [name for name in heads if name not in saved]
    fresh = ("head/.*",) if len(missing) == len(heads) else tuple(f"head/{name}/.*" for name in missing)
    return fresh + fresh_pooler(source, state)


def fresh_pooler(source: Source, state: TrainState) -> tuple[str, ...]:
    """Return the pattern of the pooler if the model has one and the published encoder lacks it."""
    pooler = family_of(source.model).pooler
    missing = pooler in state.params["backbone"] and pooler not in source.saved["backbone"]
    return (f"backbone/{pooler}/.*",) if missing else ()


def resume(checkpoints: Checkpoints, abstract: TrainState, seed: int) -> tuple[TrainState, list[str]]:
    """Return the state of the newest valid checkpoint; newer and damaged ones are moved aside."""
    restored = restore_state(checkpoints, saved_part(abstract))
    notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
    return from_saved(restored.state, abstract, seed), notes


def restore_state(
    checkpoints: Checkpoints,
    wanted: dict[str, Any],
    *,
    optional: Mapping[str, Any] | None = None,
    step: int | None = None,
    without: Sequence[str] = (),
) -> Restored:
    """Restore a state as `Checkpoints.restore` does, for the compute dtype of this start, which may be another one.

    A carry has the compute dtype and is converted; all else has one dtype everywhere. A loss scale that was not saved
    begins at the first one, and one that is not wanted is not read. optional: parts that are read if they were saved.
    """

    def as_saved(description: Metadata) -> dict[str, Any]:
        saved = description.tree
        parts = {name: part for name, part in wanted.items() if name != "loss_scale" or name in saved}
        parts |= {name: part for name, part in (optional or {}).items() if name in saved}
        return parts | ({"carry": _as_saved(wanted["carry"], saved.get("carry", {}))} if "carry" in wanted else {})

    unread = () if "loss_scale" in wanted else ("loss_scale",)
    restored = checkpoints.restore(as_saved, step=step, without=(*without, *unread))
    if "loss_scale" in wanted and "loss_scale" not in restored.state:
        first = jax.tree.map(_filled, first_scale(), wanted["loss_scale"])
        restored = replace(restored, state=restored.state | {"loss_scale": first})
    return _converted(restored, wanted["carry"]) if "carry" in wanted else restored


def _filled(value: jax.Array, like: Any) -> jax.Array:
    """Return an array of equal values, with the shape and the sharding of `like`."""
    return jax.device_put(jnp.broadcast_to(value, like.shape), like.sharding)


def _as_saved(wanted: Any, carry: Any) -> Any:
    """Return the abstract carry `wanted` with the floating dtypes of a saved one."""
    saved = named_leaves(carry)

    def with_saved_dtype(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        found = saved.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        floats = all(jnp.issubdtype(one.dtype, jnp.floating) for one in (found, leaf))
        return jax.ShapeDtypeStruct(leaf.shape, (found if floats else leaf).dtype, sharding=leaf.sharding)

    return jax.tree_util.tree_map_with_path(with_saved_dtype, wanted)


def _converted(restored: Restored, wanted: Any) -> Restored:
    """Return a restored state with its carry in the dtypes of `wanted`, and a note where these are other ones."""
    carry = restored.state["carry"]
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(wanted), strict=True)
    others = sorted({f"{leaf.dtype} to {like.dtype}" for leaf, like in pairs if leaf.dtype != like.dtype})
    notes = [
        f"the carried state of step {restored.step} is converted from {other}, the compute dtype here: from here on "
        "the losses differ by rounding from those of a run on one kind of device"
        for other in others
    ]
    carry = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), carry, wanted)
    return replace(restored, state=restored.state | {"carry": carry}, notes=(*restored.notes, *notes))


def continue_state(
    source: Source, abstract: TrainState, seed: int, iterates: Callable[[], Iterates] | None = None
) -> tuple[TrainState, list[str]]:
    """Return parameters, moments and step of another run (`--start-with state`).

    Parts that this run needs and the other one lacks are new: an average begins at the parameters, the norms by which
    spikes are found and the validation losses that begin a mean of iterates are collected from here on, and a loss
    scale begins at the first one. Parts that only
    the other run has are left out, and so are its best parameters: their loss is that of another validation text.
    """
    checkpoints, step = source.of_run, source.open_parameters().step
    saved, wanted = checkpoints.metadata(step).tree, saved_part(abstract)
    fresh, unused = (
        [name for name in OPTIONAL if name in some and name not in others]
        for some, others in ((wanted, saved), (saved, wanted))
    )
    known = {name: part for name, part in wanted.items() if name not in (*fresh, *OWN)}
    if "carry" in known:
        _check_streams(source, known["carry"], saved["carry"])
    restored = restore_state(checkpoints, known, step=step, without=(*unused, *OWN))
    state = from_saved(restored.state, abstract, seed)
    notes = [
        *restored.notes,
        *(f"{source.name} has no {name.replace('_', ' ')} to continue: new from here on" for name in fresh),
    ]
    if "average" in fresh:
        state = replace(state, average=first_average(state.params))
    makers: dict[str, Any] = {"iterates": iterates, "recent_norms": no_norms, "selection": no_selection}
    makers |= {"loss_scale": first_scale, "halving": no_halving}
    for name, make in makers.items():
        if name in fresh or (name in OWN and name in wanted):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted[name])
            state = replace(state, **{name: jax.device_put(make(), shardings)})
    if "selected" in wanted:
        state = replace(state, selected=first_average(state.weights))
    return state, notes


def _check_streams(source: Source, wanted: Any, saved: Any) -> None:
    """Raise InputError if the state of `source` is carried for another number of rows."""
    here, there = (named_leaves(carry) for carry in (wanted, saved))
    if here.keys() != there.keys():
        return  # another model, which restoring names
    rows, others = ({leaf.shape[1] for leaf in leaves.values()} for leaves in (here, there))
    if rows != others:
        raise InputError(
            f"batch_size must be {min(others)}, the streams that the state of {source.name} has read, got {min(rows)}; "
            "give that one, or --start-with parameters"
        )


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
        if name not in wanted or wanted[name].shape != (len(rows), *leaf.shape[1:]):
            raise InputError(
                "--start-vocabulary must be same for a model with an adaptive softmax, got matched; leave it out"
            )
        return jax.jit(taken, out_shardings=wanted[name].sharding)(leaf)

    wanted = named_leaves(like)
    return jax.tree_util.tree_map_with_path(of_leaf, loaded)


def _tokens(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return what identifies each token: its role, or its spelling."""
    roles = {i: role for role, i in sorted(tokenizer.specials.items(), reverse=True)}
    pieces = tokenizer.pieces(range(tokenizer.size))
    return [("role", roles[i]) if i in roles else ("piece", piece) for i, piece in enumerate(pieces)]
