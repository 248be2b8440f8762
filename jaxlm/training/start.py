"""The ladder of starts: this run's newest checkpoint, another run's parameters or state, or from scratch."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxlm.checkpoints import Checkpoints, merge_parameters
from jaxlm.config import from_json
from jaxlm.errors import InputError
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.training.config import ModelConfig
from jaxlm.training.run import RunDirectory, split_start
from jaxlm.training.state import TrainState, from_saved, saved_part

log = logging.getLogger(__name__)

PUBLISHED = ("hf:", "openai:", "google:")


@dataclass(frozen=True)
class Source:
    """Another run that a start takes parameters from."""

    name: str
    """RUN@STEP, as it stands in starts.jsonl."""
    checkpoints: Checkpoints
    step: int
    model: GPTConfig | BertConfig
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 over the checksums of the parameters: the run's place may change, they do not."""


def open_source(start: str) -> Source:
    """The run that `--start` names, at its newest checkpoint or at RUN@STEP."""
    if start.startswith(PUBLISHED):
        raise InputError(f"--start {start}: published weights are not read by this version; start from a run directory")
    path, step = split_start(start)
    run = RunDirectory(path)
    config = run.config
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    metadata = checkpoints.metadata(step)
    model = from_json(ModelConfig, config["model"], "model")
    checksums = {name: value for name, value in metadata.checksums.items() if name.startswith("params/backbone/")}
    fingerprint = hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
    tokenizer = load_tokenizer(run.tokenizer)
    return Source(f"{path}@{metadata.step}", checkpoints, metadata.step, model, tokenizer, fingerprint)


def pinned_start(run: Path, start: str) -> str:
    """`start` as RUN@STEP, where the run that goes on began from RUN: its newest checkpoint may be another by now."""
    directory = RunDirectory(run)
    if not (run / "config.json").exists():
        return start
    saved = directory.config.get("start")
    if saved is None or split_start(start)[1] is not None or split_start(saved)[0] != Path(start):
        return start
    return saved


FREE_FIELDS = ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "embedding_dropout")
_CALLED = {"gpt": "a decoder (gpt)", "bert": "an encoder (bert)"}


Sizes = TypeVar("Sizes", GPTConfig, BertConfig)


def model_of_source(source: Source, asked: Sizes, given: set[str]) -> Sizes:
    """The source's sizes with the dropout rates that were asked for; another size on the command line is refused."""
    if source.model.kind != asked.kind:
        raise InputError(
            f"--start {source.name}: it is {_CALLED[source.model.kind]} and the config is for {_CALLED[asked.kind]}; "
            "give the other's config, or another start"
        )
    names = [field.name for field in fields(asked)]
    for name in names:
        if f"model.{name}" in given and name not in FREE_FIELDS:
            raise InputError(f"--model.{name.replace('_', '-')}: with --start the sizes come from {source.name}")
    values = {name: getattr(asked if name in FREE_FIELDS else source.model, name) for name in names}
    return type(asked)(**values)


def with_parameters(
    state: TrainState,
    source: Source,
    *,
    allow_fresh: Sequence[str] = (),
    grow: Mapping[str, int] | None = None,
    transfer_layers: int | None = None,
) -> tuple[TrainState, list[str]]:
    """`state` with the source's parameters, of its head too where that need not be fresh; and sentences about it.

    allow_fresh, grow: as in `merge_parameters`. transfer_layers: only the first n layers are taken; those above stay as
    they are in `state`.
    """
    saved = source.checkpoints.metadata(source.step).tree["params"]
    parts = [part for part in ("backbone", "head") if part in state.params and f"{part}/.*" not in allow_fresh]
    wanted = {"params": {part: dict(saved[part]) for part in parts if part in saved}}
    if "head" in wanted["params"]:  # a head that this run has not is left behind
        wanted["params"]["head"] = {name: saved["head"][name] for name in saved["head"] if name in state.params["head"]}
    replicated = state.step.sharding  # the step is whole on every device

    def place(path, leaf):
        """Where the state has this leaf, if it has one of that shape; else whole on every device."""
        node: Any = {"params": state.params}
        for entry in path:
            node = node.get(entry.key) if isinstance(node, dict) else None
        fits = node is not None and not isinstance(node, dict) and node.shape == leaf.shape
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=node.sharding if fits else replicated)

    abstract = jax.tree_util.tree_map_with_path(place, wanted)
    restored = source.checkpoints.restore_partial(abstract, step=source.step)
    loaded = restored.state["params"]
    grow = dict(grow or {})
    if transfer_layers is not None:
        loaded["backbone"]["blocks"] = jax.tree.map(lambda leaf: leaf[:transfer_layers], loaded["backbone"]["blocks"])
        grow["backbone/blocks/.*"] = 0
    notes = list(restored.notes)
    params = merge_parameters(state.params, loaded, allow_fresh=allow_fresh, grow=grow, notes=notes)
    return replace(state, params=params), notes


def fresh_parts(source: Source, state: TrainState) -> tuple[str, ...]:
    """What a pretraining run cannot take from `source`: the heads that it has not."""
    saved = source.checkpoints.metadata(source.step).tree["params"].get("head", {})
    heads = state.params.get("head", {})
    missing = [name for name in heads if name not in saved]
    return ("head/.*",) if len(missing) == len(heads) else tuple(f"head/{name}/.*" for name in missing)


def resume(checkpoints: Checkpoints, abstract: TrainState, seed: int) -> tuple[TrainState, list[str]]:
    """The state of the newest sound checkpoint; newer and damaged ones are moved aside."""
    restored = checkpoints.restore(saved_part(abstract))
    notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
    return from_saved(restored.state, abstract, seed), notes


def continue_state(source: Source, abstract: TrainState, seed: int) -> tuple[TrainState, list[str]]:
    """Parameters, moments and step of another run (`--start-with state`)."""
    restored = source.checkpoints.restore(saved_part(abstract), step=source.step)
    return from_saved(restored.state, abstract, seed), list(restored.notes)


def check_tokenizer(what: str, path: Path | str, fingerprint: str, expected: str, expected_of: str) -> None:
    """Refuse a store or a source made with another tokenizer."""
    if fingerprint != expected:
        raise InputError(
            f"{what} {path} was made with another tokenizer ({fingerprint[:12]}) than {expected_of} ({expected[:12]}): "
            f"prepare it with --tokenizer store:DIR of the store whose tokenizer is meant"
        )
