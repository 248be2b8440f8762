"""The start of a run: another run, or published weights, and the number of its positions that were trained.

A model of 512 positions that was trained in rows of 128 has 384 rows in its table with their initial values. Commands
that use a model stay within the trained length, unless --beyond-length is given.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from jaxlm.config import from_json
from jaxlm.data.config import DataConfig, check_order
from jaxlm.data.loader import phases, trained_phase
from jaxlm.errors import InputError
from jaxlm.interop.published import Published
from jaxlm.interop.sources import KINDS, check_run_path, read_published
from jaxlm.models import DEFAULT_MODEL, FAMILIES, ModelConfig, dropout_rates, family_of
from jaxlm.models.family import UNLIMITED
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.config import completed
from jaxlm.runs.directory import RunDirectory, saved_config, split_start
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.training.config import FINETUNING, MAY_DIFFER, kind_of_run

Load = Callable[[Any], tuple[Any, Sequence[str]]]


@dataclass(frozen=True)
class Parameters:
    """The parameters of a source. saved: their tree; its leaves have a shape.

    load(tree): reads the leaves of a tree of abstract arrays onto their shardings; returns them and notes. tokenizer:
    that of the source, None without one. fingerprint: SHA-256 of the parameters, independent of their location.
    earlier_fingerprint: that of a run in earlier versions, which left heads out. checkpoints, step: those of a run.
    """

    saved: Any
    load: Load
    tokenizer: Tokenizer | None
    fingerprint: str
    earlier_fingerprint: str | None = None
    checkpoints: Checkpoints | None = None
    step: int | None = None


@dataclass(frozen=True)
class Source:
    """The start of a run: another run, or published weights.

    name: RUN@STEP, or hf:PATH, as in starts.jsonl. fingerprint: as in `Parameters`. trained_length: the number of
    positions that were trained. open_parameters: opens the source and returns its parameters. Called lazily: a resumed
    run usually does not need them.
    """

    name: str
    model: Any
    fingerprint: str
    given_tokenizer: Tokenizer | None
    trained_length: int
    open_parameters: Callable[[], Parameters]

    @property
    def saved(self) -> Any:
        """The tree of the parameters."""
        return self.open_parameters().saved

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the source. InputError without one."""
        if self.given_tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer, and text needs one; put its files next to the weights")
        return self.given_tokenizer

    @property
    def original_tokenizer(self) -> Tokenizer:
        """The tokenizer of the parameters: for a run with a matched vocabulary, not the one that it has now."""
        found = self.open_parameters().tokenizer
        if found is None:
            raise InputError(f"{self.name} has no tokenizer to match; put its files next to the weights")
        return found

    @property
    def of_run(self) -> Checkpoints:
        """The checkpoints of a run. InputError for published weights, which have only parameters."""
        checkpoints = self.open_parameters().checkpoints
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

    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer.exists() else None
    fingerprints = fingerprint_of("backbone", "head"), fingerprint_of("backbone")
    found = Parameters(metadata.tree[part], load, tokenizer, *fingerprints, checkpoints, metadata.step)
    return _opened(f"{path}@{metadata.step}", model, trained_length(run, metadata.step), found)


def _published_source(published: Published) -> Source:
    def load(wanted: Any) -> tuple[Any, Sequence[str]]:
        def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = published.leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

        return jax.tree_util.tree_map_with_path(place, wanted), published.notes

    found = Parameters(published.params, load, published.tokenizer, published.fingerprint)
    return _opened(published.name, published.model, published.trained_length, found)


def _opened(name: str, model: Any, trained_length: int, found: Parameters) -> Source:
    return Source(name, model, found.fingerprint, found.tokenizer, trained_length, lambda: found)


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
        earlier = source.open_parameters().earlier_fingerprint
        return replace(source, fingerprint=earlier) if earlier and earlier == fingerprint else source

    def open_parameters() -> Parameters:
        try:
            parameters = open_source(name).open_parameters()
        except InputError as error:
            raise InputError(f"{error}; {run} needs its parameters: restore it") from error
        if fingerprint not in (None, parameters.fingerprint, parameters.earlier_fingerprint):
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
        open_parameters=functools.cache(open_parameters),
    )


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


def check_rows_of(run: str, state_of: str | None = None) -> None:
    """Raise InputError if the rows of a run that is resumed are of another version than this jaxlm makes.

    state_of: RUN or RUN@STEP whose state a new run continues, over the rows that follow there.
    """
    directory = RunDirectory(run)
    if not directory.exists():
        if state_of is None or state_of.startswith(KINDS):
            return
        directory = RunDirectory(split_start(state_of)[0])
    check_order(directory.config, directory.name)


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


# The field of config.json with the trained length of the run's start.
OF_START = "start_trained_length"


def trained_length(run: RunDirectory, step: int) -> int:
    """Return the trained length of a run's checkpoint of `step`; UNLIMITED for a model without positions.

    It is the length of the longest rows up to that step, or the trained length of the run's start if that is longer. An
    imported model has all its positions, or fewer if its tokenizer said so.
    """
    saved = run.config
    field = FAMILIES[saved["model"].get("kind", DEFAULT_MODEL.kind)].positions
    if field is None:
        return UNLIMITED
    positions = int(saved["model"][field])
    if "published" in saved:
        return min(positions, saved.get("length") or positions)
    length = saved.get("length") or positions
    if kind_of_run(saved) != FINETUNING and saved.get("num_steps"):
        data = from_json(DataConfig, completed(saved)["data"], "data")
        length = trained_phase(step, phases(data, length=length, num_steps=saved["num_steps"])).length
    return min(positions, max(length, saved.get(OF_START) or 0))


def kept_start_length(saved: Mapping[str, Any] | None, of_source: int | None) -> int | None:
    """Return the value of OF_START for a run's config.json: the saved one, as the start may have been moved or changed.

    saved: the run's config.json, None for a new run. of_source: the trained length of its start.
    """
    return saved[OF_START] if saved is not None and OF_START in saved else of_source


def check_trained(name: str, length: int, trained: int, of: str, *, beyond: bool) -> None:
    """Raise InputError for a length above the trained one, unless `beyond` allows it. of: the name of the model."""
    if length > trained and not beyond:
        raise InputError(
            f"{name} must be at most {trained}, the trained length of {of}, got {length}; give a shorter one, or "
            "--beyond-length to use positions that were never trained"
        )


def limited(length: int, positions: int, of: str) -> str:
    """Return a note that a command stays within the trained length `length` of a model with more positions."""
    return f"{of} was trained on {length} of its {positions} positions; --beyond-length uses the others too"
