"""The ladder of starts: this run's newest checkpoint, another run's parameters or state, or from scratch."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from jaxlm.checkpoints import Checkpoints, merge_parameters
from jaxlm.config import from_json
from jaxlm.errors import InputError
from jaxlm.models.gpt import GPTConfig
from jaxlm.text import Tokenizer, load_tokenizer
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
    model: GPTConfig
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
    model = from_json(GPTConfig, config["model"], "model")
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


def model_of_source(source: Source, asked: GPTConfig, given: set[str]) -> GPTConfig:
    """The source's sizes with the dropout rates that were asked for; another size on the command line is refused."""
    free = ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "embedding_dropout")
    for field in fields(GPTConfig):
        if f"model.{field.name}" in given and field.name not in free:
            raise InputError(f"--model.{field.name.replace('_', '-')}: with --start the sizes come from {source.name}")
    values = {field.name: getattr(source.model, field.name) for field in fields(GPTConfig)}
    return GPTConfig(**values | {name: getattr(asked, name) for name in free})


def with_parameters(
    state: TrainState,
    source: Source,
    *,
    allow_fresh: Sequence[str] = (),
    grow: Mapping[str, int] | None = None,
    transfer_layers: int | None = None,
) -> tuple[TrainState, list[str]]:
    """`state` with the source's parameters, and sentences about what is fresh or grown.

    transfer_layers: only the first n layers are taken; those above stay as they are in `state`.
    """
    wanted = {"params": {"backbone": source.checkpoints.metadata(source.step).tree["params"]["backbone"]}}
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
