"""Activations of a model for given ids, layer by layer, to compare with another program."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import InputError
from jaxlm.files import atomic_output, parse_json, read_regular
from jaxlm.inference.arguments import Activations
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.rows import padded
from jaxlm.interop.sources import KINDS, read_published
from jaxlm.models import build, family_of
from jaxlm.models.model import Inputs, Model
from jaxlm.nn.config import Execution
from jaxlm.tasks import kinds

ROWS = 8  # rows per batch


class IdRows(NamedTuple):
    """Rows of ids, and for an encoder the segment, 0 or 1, of each token; None: all 0."""

    ids: list[list[int]]
    segments: list[list[int]] | None


def read_ids(file: Path, model: Any) -> IdRows:
    """Read `{"ids": [[…], …], "segments": [[…], …]}`. InputError names the row that does not fit the model."""
    try:
        values = parse_json(read_regular(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or "ids" not in values or set(values) - {"ids", "segments"}:
        shown = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise InputError(
            f'{file} must hold an object with "ids", and for an encoder "segments", got {shown}; correct it'
        )
    ids, segments = values["ids"], values.get("segments")
    if segments is not None and (not isinstance(segments, list) or len(segments) != len(ids)):
        found = f"{len(segments)} for {len(ids)}" if isinstance(segments, list) else f"{segments!r:.80}"
        raise InputError(f'{file}: "segments" must have one row per row of "ids", got {found}; correct it')
    types, longest = family_of(model).num_segments(model), build(model).max_length
    if not isinstance(ids, list) or not ids:
        raise InputError(f'{file}: "ids" must be a list of rows, at least one, got {ids!r:.80}; correct it')
    for row, given in enumerate(ids):
        _check_row(file, f"ids[{row}]", given, model.vocab_size)
        if len(given) > longest:
            raise InputError(
                f"{file}: ids[{row}] has {len(given)} ids and the model {longest} positions; shorten the row"
            )
        if segments is not None:
            _check_row(file, f"segments[{row}]", segments[row], types)
            if len(segments[row]) != len(given):
                raise InputError(f"{file}: segments[{row}] has {len(segments[row])} numbers, ids[{row}] {len(given)}")
    return IdRows(ids, segments)


def activations(config: Any, params: Mapping[str, Any], kind: str | None, rows: IdRows) -> dict[str, np.ndarray]:
    """Return float32 arrays by name, padded with zeros to the longest of R rows.

    kind: the kind of the task of a fine-tuned model's head; None for a pretrained model.
    `hidden_0` (the embeddings) … `hidden_N` (after the final norm, if there is one): (R, L, D). `pooled`: (R, D), if
    there is a pooler. `logits`: of a language model (R, L, V); of a head (R, classes), (R, 1) for a score or a
    choice, (R, L, 2) for a span, (R, L, tags). `next_sentence_logits`: (R, 2).
    """
    model = build(config, Execution(dtype="float32"))
    apply = jax.jit(lambda params, *inputs: model_outputs(model, params, kind, *inputs))
    longest = max(map(len, rows.ids))
    found: dict[str, list[np.ndarray]] = {}
    for first in range(0, len(rows.ids), ROWS):
        some = rows.ids[first : first + ROWS]
        seen, types = [[1] * len(given) for given in some], (rows.segments or [])[first : first + ROWS]
        inputs = (padded(values, ROWS, longest) for values in (some, seen, types))
        for name, values in apply(params, *inputs).items():
            found.setdefault(name, []).append(np.asarray(values, np.float32)[: len(some)])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def model_outputs(
    model: Model, params: Any, kind: str | None, ids_BL: Any, seen_BL: Any, types_BL: Any
) -> dict[str, Any]:
    """Compute `activations` of one batch; seen_BL is 0 at padding."""
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
    head = params.get("head", {})
    outputs = model(params, Inputs(ids_BL, positions_BL, seen_BL, types_BL), layers=True)
    layers_NBLD: Any = outputs.layers
    shown_BL1 = seen_BL[:, :, None] > 0
    found: dict[str, Any] = {f"hidden_{n}": jnp.where(shown_BL1, h_BLD, 0.0) for n, h_BLD in enumerate(layers_NBLD)}
    h_BLD = layers_NBLD[-1]
    # The input of a head for whole sequences: an encoder's pooled state, a decoder's last one.
    last_B = jnp.maximum(jnp.sum(seen_BL, axis=1) - 1, 0)
    whole_BD: Any = jnp.take_along_axis(h_BLD, last_B[:, None, None], axis=1)[:, 0]
    if model.family.pooler in params["backbone"]:
        whole_BD = found["pooled"] = model.pool(params, h_BLD[:, 0])
    if kind is not None:
        states = h_BLD if kinds.KINDS[kind].of_tokens else whole_BD
        found["logits"] = states @ head["kernel"] + head["bias"]
    elif model.output_layer.available(params):
        found["logits"] = model.logits(params, h_BLD, outputs.output)[..., : model.config.vocab_size]
    if "next_sentence" in head and model.next_sentence_head is not None:
        scores = model.next_sentence_head
        found["next_sentence_logits"] = scores.apply({"params": head["next_sentence"]}, whole_BD)
    if found.get("logits") is not None and found["logits"].ndim == 3:
        found["logits"] = jnp.where(shown_BL1, found["logits"], 0.0)
    return found


def _check_row(file: Path, name: str, row: Any, size: int) -> None:
    if not isinstance(row, list) or not row:
        raise InputError(f"{file}: {name} must be a list of numbers, at least one, got {row!r:.80}; correct it")
    wrong: Sequence[Any] = [i for i in row if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < size]
    if wrong:
        raise InputError(f"{file}: {name} must have whole numbers from 0 to {size - 1}, got {wrong[0]!r}; correct it")


def evaluate_activations(arguments: Activations) -> dict[str, Any]:
    """Write every layer's states and the logits to one .npz; return their names and shapes."""
    if arguments.start.startswith(KINDS):
        published = read_published(arguments.start)
        name, model, params, task = published.name, published.model, published.params, published.task
    else:
        run = load_run(arguments.start)
        name, model, params, task = run.name, run.model.config, run.params, run.task
    found = activations(model, params, None if task is None else task.kind, read_ids(arguments.ids, model))
    with atomic_output(arguments.output, "wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]  # its stub has flags among the names
    return {"start": name, "output": str(arguments.output), "arrays": {key: list(x.shape) for key, x in found.items()}}
