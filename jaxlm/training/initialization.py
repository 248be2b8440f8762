"""The ladder of starts: this run's newest checkpoint, another run's parameters or state, or from scratch."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import from_json
from jaxlm.data.versions import CURRENT, DataVersions, saved_versions
from jaxlm.errors import InputError
from jaxlm.interop.published import Published
from jaxlm.interop.sources import KINDS, check_run_path, read_published, tokenizer_spec
from jaxlm.models import ModelConfig, dropout_rates, family_of
from jaxlm.runs.checkpoints import Checkpoints, Metadata, Restored
from jaxlm.runs.directory import RunDirectory, saved_config, split_start
from jaxlm.runs.earlier_versions import completed
from jaxlm.runs.trees import merge_parameters, named_leaves
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.training.averaging import Iterates, first_average
from jaxlm.training.config import MAY_DIFFER
from jaxlm.training.selection import no_selection
from jaxlm.training.spikes import no_norms
from jaxlm.training.step import OPTIONAL, OWN, TrainState, from_saved, saved_part
from jaxlm.training.trained_length import OF_START, trained_length
from jaxlm.training.vocabulary import matched_note, matched_rows, with_rows

log = logging.getLogger(__name__)

Load = Callable[[Any], tuple[Any, Sequence[str]]]


@dataclass(frozen=True)
class Parameters:
    """The parameters of a source. saved: their tree; its leaves have a shape.

    tokenizer: that of the source, None without one. load(tree): reads the leaves of a tree of abstract arrays onto
    their shardings; returns them and notes. fingerprint: SHA-256 of the parameters, independent of their location.
    checkpoints, step: those of a run. earlier_fingerprint: that of a run in earlier versions, which left heads out.
    """

    saved: Any
    load: Load
    fingerprint: str
    tokenizer: Tokenizer | None
    checkpoints: Checkpoints | None = None
    step: int | None = None
    earlier_fingerprint: str | None = None


@dataclass(frozen=True)
class Source:
    """The start of a run: another run, or published weights.

    name: RUN@STEP, or hf:PATH, as in starts.jsonl. fingerprint: as in `Parameters`. trained_length: the number of
    positions that were trained. opened: returns the parameters; a resumed run remembers everything else, and opens its
    start only to read the parameters, which it may never do.
    """

    name: str
    model: Any
    fingerprint: str
    given_tokenizer: Tokenizer | None
    trained_length: int
    opened: Callable[[], Parameters]

    @property
    def saved(self) -> Any:
        """The tree of the parameters."""
        return self.opened().saved

    def load(self, wanted: Any) -> tuple[Any, Sequence[str]]:
        """Load parameters, as in `Parameters`."""
        return self.opened().load(wanted)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the source. InputError without one."""
        if self.given_tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer, and text needs one; put its files beside the weights")
        return self.given_tokenizer

    @property
    def original_tokenizer(self) -> Tokenizer:
        """The tokenizer of the parameters: for a run with a matched vocabulary, not the one that it has now."""
        found = self.opened().tokenizer
        if found is None:
            raise InputError(f"{self.name} has no tokenizer to match; put its files beside the weights")
        return found

    @property
    def tokenizer_spec(self) -> str:
        """The `--tokenizer` that prepares a text for the source; "" for a run, whose store has it."""
        return tokenizer_spec(self.name, self.model)

    @property
    def of_run(self) -> Checkpoints:
        """The checkpoints of a run. InputError for published weights, which have no state beside the parameters."""
        checkpoints = self.opened().checkpoints
        if checkpoints is None:
            raise InputError(f"--start-with must be parameters for {self.name}, got state; leave --start-with out")
        return checkpoints


def open_source(start: str) -> Source:
    """Open the source of `--start`: a run at its newest checkpoint or at RUN@STEP, or published weights (hf:, …)."""
    if start.startswith(KINDS):
        return _published_source(read_published(start))
    path, step = split_start(start)
    if isinstance(path, Path):
        check_run_path(path)
    run = RunDirectory(path)
    config = run.config
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    metadata = checkpoints.metadata(step)
    run.check_config(metadata.config, f"checkpoint {metadata.step}", MAY_DIFFER)
    model = from_json(ModelConfig, completed(config)["model"], "model")
    part = metadata.weights

    def fingerprint_of(*parts: str) -> str:
        begins = tuple(f"{part}/{name}/" for name in parts)
        checksums = {name: value for name, value in metadata.checksums.items() if name.startswith(begins)}
        return hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()

    def load(wanted: Any) -> tuple[Any, Sequence[str]]:
        restored = checkpoints.restore_partial({part: wanted}, step=metadata.step)
        return restored.state[part], restored.notes

    fingerprint = fingerprint_of("backbone", "head")
    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer.exists() else None
    parameters = Parameters(
        metadata.tree[part], load, fingerprint, tokenizer, checkpoints, metadata.step, fingerprint_of("backbone")
    )
    return Source(
        name=f"{path}@{metadata.step}",
        model=model,
        fingerprint=fingerprint,
        given_tokenizer=tokenizer,
        trained_length=trained_length(run, metadata.step),
        opened=lambda: parameters,
    )


def _published_source(published: Published) -> Source:
    def load(wanted: Any) -> tuple[Any, Sequence[str]]:
        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = published.leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

        return jax.tree_util.tree_map_with_path(place, wanted), published.notes

    parameters = Parameters(published.params, load, published.fingerprint, published.tokenizer)
    return Source(
        name=published.name,
        model=published.model,
        fingerprint=published.fingerprint,
        given_tokenizer=published.tokenizer,
        trained_length=published.trained_length,
        opened=lambda: parameters,
    )


def source_of(run: str, start: str) -> Source:
    """Return the source of `--start` for the run at `run`.

    A resumed run has its start pinned to the step that it began from, even if the other run has saved later ones. It
    remembers its properties and does not need to find it again once it has checkpoints of its own.
    """
    saved = saved_config(run)
    if saved is None:
        return open_source(start)
    name = _pinned(start, saved.get("start"))
    tokenizer = _own_tokenizer(RunDirectory(run), saved) if name == saved.get("start") else None
    fingerprint = saved.get("fingerprints", {}).get("start")
    if tokenizer is None:
        source = open_source(name)
        return replace(source, fingerprint=fingerprint) if _is_earlier(fingerprint, source.opened()) else source

    def opened() -> Parameters:
        try:
            parameters = open_source(name).opened()
        except InputError as error:
            raise InputError(f"{error}; {run} needs parameters from there: restore it") from error
        if fingerprint not in (None, parameters.fingerprint) and not _is_earlier(fingerprint, parameters):
            raise InputError(
                f"--start {name} must have the parameters that {run} began from, got others; restore them, or choose "
                "another --run"
            )
        return parameters

    return Source(
        name=name,
        model=from_json(ModelConfig, completed(saved).get("model"), "model"),
        fingerprint=fingerprint or "",
        given_tokenizer=tokenizer,
        trained_length=saved.get(OF_START) or 0,
        opened=functools.cache(opened),
    )


def _is_earlier(fingerprint: str | None, parameters: Parameters) -> bool:
    """Return True if an earlier version has recorded these parameters as the start of a run."""
    return fingerprint is not None and fingerprint == parameters.earlier_fingerprint


def _own_tokenizer(run: RunDirectory, saved: Mapping[str, Any]) -> Tokenizer | None:
    """Return the run's copy of its tokenizer, or None if it is not there yet, or damaged."""
    try:
        tokenizer = load_tokenizer(run.tokenizer)
    except InputError:
        return None
    return tokenizer if tokenizer.fingerprint == saved.get("fingerprints", {}).get("tokenizer") else None


def _pinned(start: str, known: str | None) -> str:
    """Return the saved start of a run if `start` is the same run and no other step of it, else `start`."""
    if known is None or start.startswith(KINDS) or known.startswith(KINDS):
        return start
    (path, step), (known_path, known_step) = split_start(start), split_start(known)
    return known if path == known_path and step in (None, known_step) else start


def pinned_versions(run: str, state_of: str | None = None) -> DataVersions:
    """Return the data versions of a run: a resumed run keeps those it was made with.

    state_of: RUN or RUN@STEP whose state a new run continues, over the rows that follow there.
    """
    directory = RunDirectory(run)
    if not directory.exists():
        if state_of is None or state_of.startswith(KINDS):
            return CURRENT
        directory = RunDirectory(split_start(state_of)[0])
    return saved_versions(directory.config, directory.name)


# Fields of a model that are not sizes. The dropout rates come from the config or the command line. `tables` comes from
# the start, whose parameters were trained with it, unless it is given on the command line.
FREE_FIELDS = ("tables",)


def model_of_source(source: Source, asked: Any, given: set[str], saved: Mapping[str, Any] | None = None) -> Any:
    """Return the source's sizes with the config's dropout rates. InputError for another size on the command line.

    saved: the config.json of a resumed run, which keeps its `tables`.
    """
    if source.model.kind != asked.kind:
        raise InputError(
            f"--start must be {family_of(asked).title} for this config, got {source.name}, "
            f"{family_of(source.model).title}; choose a config of the same family, or another start"
        )
    names, rates = [field.name for field in fields(asked)], dropout_rates(asked)
    for name in names:
        if name in rates or name in FREE_FIELDS:
            continue
        for flag in sorted(flag for flag in given if f"{flag}.".startswith(f"model.{name}.")):
            raise InputError(
                f"--{flag.replace('_', '-')} must be left out with --start: the sizes come from {source.name}"
            )
    asked_for = {*rates, *(name for name in FREE_FIELDS if f"model.{name}" in given)}
    values = {name: getattr(asked if name in asked_for else source.model, name) for name in names}
    if saved is not None and "tables" in values and "tables" not in asked_for:
        values["tables"] = saved["model"].get("tables", values["tables"])
    return type(asked)(**values)


def dropout_notes(source: Source | None, model: Any) -> list[str]:
    """Return a note if the dropout rates of a run differ from those of its start, else none."""
    if source is None:
        return []
    now, before = (list(dropout_rates(of).values()) for of in (model, source.model))
    if now == before:
        return []
    short = len(set(now)) == 1 and len(set(before)) == 1
    ours, theirs = (
        f"dropout {rates[0]:g}"
        if short
        else ", ".join(f"{name} {rate:g}" for name, rate in zip(dropout_rates(model), rates, strict=True))
        for rates in (now, before)
    )
    return [f"{ours}, from the config; {source.name} was trained with {theirs.removeprefix('dropout ')}"]


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

    allow_fresh, grow: as in `merge_parameters`. transfer_layers: load the first n layers only; the others keep their
    values in `state`. tokenizer: that of `state`, if the rows of the source's vocabulary are to be matched with it.
    """
    saved = source.saved
    parts = [part for part in ("backbone", "head") if part in state.params and f"{part}/.*" not in allow_fresh]
    wanted = {part: dict(saved[part]) for part in parts if part in saved}
    if "head" in wanted:  # drop the heads that this run does not have
        wanted["head"] = {name: saved["head"][name] for name in saved["head"] if name in state.params["head"]}
    replicated = state.step.sharding

    def place(path, leaf):
        """Return the leaf with the sharding of the state's leaf, if there is one of that shape, else replicated."""
        node: Any = state.params
        for entry in path:
            node = node.get(entry.key) if isinstance(node, dict) else None
        fits = node is not None and not isinstance(node, dict) and node.shape == leaf.shape
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=node.sharding if fits else replicated)

    abstract = jax.tree_util.tree_map_with_path(place, wanted)
    loaded, loading_notes = source.load(abstract)
    notes, grow = list(loading_notes), dict(grow or {})
    if tokenizer is not None:
        rows = matched_rows(source.original_tokenizer, tokenizer)
        paths = [f"backbone/{name}" for name in family_of(source.model).vocabulary_leaves]
        loaded = with_rows(loaded, rows, paths, state.params)
        notes.append(matched_note(rows, source.name))
    if transfer_layers is not None:
        layers = family_of(source.model).layers
        assert layers is not None  # the config's check
        loaded["backbone"][layers] = jax.tree.map(lambda leaf: leaf[:transfer_layers], loaded["backbone"][layers])
        grow[f"backbone/{layers}/.*"] = 0
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
    restored = _restored(checkpoints, saved_part(abstract))
    notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
    return from_saved(restored.state, abstract, seed), notes


def _restored(checkpoints: Checkpoints, wanted: dict[str, Any], **more: Any) -> Restored:
    """Restore a state as `Checkpoints.restore` does, and convert a carry that was saved in another floating dtype.

    A carry has the compute dtype of the run, which depends on the kind of device; all else has one dtype everywhere.
    """
    if "carry" not in wanted:
        return checkpoints.restore(wanted, **more)

    def as_saved(description: Metadata) -> dict[str, Any]:
        saved = named_leaves(description.tree.get("carry", {}))

        def with_saved_dtype(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            found = saved.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
            floats = all(jnp.issubdtype(one.dtype, jnp.floating) for one in (found, leaf))
            return jax.ShapeDtypeStruct(leaf.shape, (found if floats else leaf).dtype, sharding=leaf.sharding)

        return wanted | {"carry": jax.tree_util.tree_map_with_path(with_saved_dtype, wanted["carry"])}

    restored = checkpoints.restore(as_saved, **more)
    carry = restored.state["carry"]
    pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(wanted["carry"]), strict=True)
    others = sorted({f"{leaf.dtype} to {like.dtype}" for leaf, like in pairs if leaf.dtype != like.dtype})
    notes = [
        f"the carried state of step {restored.step} is converted from {other}, the compute dtype here: from here on "
        "the losses differ by rounding from those of a run on one kind of device"
        for other in others
    ]
    carry = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), carry, wanted["carry"])
    return replace(restored, state=restored.state | {"carry": carry}, notes=(*restored.notes, *notes))


def continue_state(
    source: Source, abstract: TrainState, seed: int, iterates: Callable[[], Iterates] | None = None
) -> tuple[TrainState, list[str]]:
    """Return parameters, moments and step of another run (`--start-with state`).

    Parts that this run needs and the other one lacks are new: an average begins at the parameters, the norms by which
    spikes are found and the validation losses that begin a mean of iterates are collected from here on. Parts that only
    the other run has are left out, and so are its best parameters: their loss is that of another validation text.
    """
    checkpoints, step = source.of_run, source.opened().step
    saved, wanted = checkpoints.metadata(step).tree, saved_part(abstract)
    fresh, unused = (
        [name for name in OPTIONAL if name in some and name not in others]
        for some, others in ((wanted, saved), (saved, wanted))
    )
    known = {name: part for name, part in wanted.items() if name not in (*fresh, *OWN)}
    if "carry" in known:
        _check_streams(source, known["carry"], saved["carry"])
    restored = _restored(checkpoints, known, step=step, without=(*unused, *OWN))
    state = from_saved(restored.state, abstract, seed)
    notes = [*restored.notes, *(f"{source.name} has no {name.replace('_', ' ')} to continue" for name in fresh)]
    if "average" in fresh:
        state = replace(state, average=first_average(state.params))
    if "iterates" in fresh:
        assert iterates is not None
        state = replace(
            state, iterates=jax.device_put(iterates(), jax.tree.map(lambda leaf: leaf.sharding, abstract.iterates))
        )
    if "recent_norms" in fresh:
        state = replace(state, recent_norms=jax.device_put(no_norms(), abstract.recent_norms.sharding))
    if abstract.selection is not None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.selection)
        state = replace(state, selection=jax.device_put(no_selection(), shardings))
    if abstract.selected is not None:
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


OTHER_STORE = "store:DIR of a store with the right tokenizer"


def check_tokenizer(
    what: str, path: Path | str, fingerprint: str, expected: str, expected_of: str, remedy: str = ""
) -> None:
    """Raise InputError for a store or a source made with another tokenizer."""
    if fingerprint != expected:
        remedy = remedy or OTHER_STORE
        raise InputError(
            f"{what} {path} was made with another tokenizer than {expected_of}; prepare it with --tokenizer {remedy}"
        )
