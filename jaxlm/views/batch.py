"""View of the batch of a step, decoded: rows of text, sentence pairs, or examples of a task."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxlm.data.batch import Batch, ExampleBatch, PairBatch
from jaxlm.data.config import check_order
from jaxlm.data.loader import batch_at, row_origins
from jaxlm.data.origin import RowOrigin
from jaxlm.data.phases import phase_at, phased_rows
from jaxlm.data.store import Store, open_store
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import run_config, task_data
from jaxlm.models import family_of
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.earlier_versions import completed
from jaxlm.tasks import (
    FORMATS,
    Task,
    TrainBatches,
    encode_examples,
    encode_split,
    steps_of_epochs,
)
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.training.config import FinetuneConfig, PretrainConfig, filled
from jaxlm.views.data import ends, indented, truncated


def pretrain_lines(config: PretrainConfig, step: int, count: int) -> Iterator[str]:
    """Yield the batch of a pretraining step: the origin, text and positions of each row."""
    if not config.data.store:
        raise InputError("data.store must be given, got none; name a token store with --data.store")
    stores = [open_store(path) for path in config.data.store]
    by_path = {str(store.path): store for store in stores}
    tokenizer = stores[0].tokenizer()
    rows = phased_rows(
        stores,
        config.data,
        length=config.length,
        seed=config.seed,
        num_steps=_num_steps(config, stores, step),
        batch_size=config.batch_size,
    )
    batch = batch_at(rows, step, config.batch_size)
    phase = phase_at(step, rows.phases)
    if len(rows.phases) > 1:
        yield f"phase {phase.number + 1} of {len(rows.phases)}: steps {phase.first_step:,} to {phase.end_step - 1:,}"
    yield f"step {step}: {config.batch_size} rows of {phase.length}, layout {config.data.layout}, seed {config.seed}"
    padding = int((np.asarray(batch.segments) == 0).sum())
    if (said := rows.rows[rows.phases.index(phase)].description()) is not None:
        yield f"  {said}"
    if isinstance(batch, PairBatch):
        pairs, random = int(batch.pair_weights.sum()), int(batch.next_labels.sum())
        yield f"  {pairs} pairs, {pairs - random} true; {padding:,} of {batch.ids.size:,} positions are padding"
    else:
        yield (
            f"  {int(batch.weights.sum()):,} of {batch.weights.size:,} positions are predicted, {padding:,} are padding"
        )
    origins = row_origins(rows, step, config.batch_size)
    for row in range(min(count, config.batch_size)):
        yield ""
        yield f"row {row}" + (", with an empty carry" if _begins(batch, row) else "")
        if isinstance(batch, PairBatch):
            yield from pair_row_lines(batch, row, tokenizer, origins[row])
            continue
        for segment, origin in enumerate(origins[row], start=1):
            assert isinstance(origin, RowOrigin)
            whole = int(np.diff(by_path[origin.store].document_starts[origin.document : origin.document + 2])[0])
            part = "" if origin.tokens >= whole else f" of {whole:,}"
            part += ", truncated" if part and config.data.of_documents else ""
            yield f"  segment {segment}: {origin}, {origin.tokens:,} tokens{part}"
        yield from row_lines(batch, row, tokenizer)


def _begins(batch: Batch | PairBatch, row: int) -> bool:
    """Return True if a row of a stream begins with an empty carry."""
    return isinstance(batch, Batch) and batch.begins is not None and bool(batch.begins[row])


def _num_steps(config: PretrainConfig, stores: Sequence[Store], step: int) -> int:
    """Return the steps of the run, which determine where its rows change their length."""
    if config.num_steps is not None:
        return config.num_steps
    if config.num_epochs is not None:
        sizes = {"length": config.length, "batch_size": config.batch_size, "seed": config.seed}
        return config.data.steps_of_passes(stores, num_epochs=config.num_epochs, **sizes)
    if len(lengths := config.data.lengths(config.length)) > 1:
        raise InputError(
            f"num_steps must be given with data.short_length {lengths[0][0]}, got none; give --num-steps or "
            "--num-epochs"
        )
    return step + 1


def pair_row_lines(batch: PairBatch, row: int, tokenizer: Tokenizer, origins: Sequence[Any]) -> Iterator[str]:
    """Yield the pairs of a row, before masking: their origin, text, and first and last positions."""
    segments, types = np.asarray(batch.segments[row]), np.asarray(batch.types[row])
    yield f"  seed of the masks: {batch.mask_seeds[row].tolist()}"
    for segment, origin in enumerate(origins, start=1):
        yield f"  pair {segment}: {'true' if origin.is_next else 'random'}, label {batch.next_labels[row, segment - 1]}"
        yield f"    A: {origin.first}, {origin.first.tokens:,} tokens"
        yield f"    B: {origin.second}, {origin.second.tokens:,} tokens"
        chunk = origin.chunk
        yield f"    {origin.dropped:,} of {chunk.tokens:,} tokens from token {chunk.token} are dropped"
        for kind, name in enumerate("AB"):
            slots = np.flatnonzero((segments == segment) & (types == kind))
            text = tokenizer.decode(np.asarray(batch.ids[row, slots]).tolist())
            yield from indented(f"{name}: {truncated(text.strip())}")

    def line(slot: int) -> str:
        i = int(batch.ids[row, slot])
        return f"{int(types[slot]):>4} {int(batch.positions[row, slot]):>8} {i:>6}  {tokenizer.pieces([i])[0]!r}"

    yield from _slot_lines(f"{'type':>4} {'position':>8} {'id':>6}  token", segments, line)


def row_lines(batch: Batch, row: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of a row, and the first and last positions of each segment: token, target and weight."""
    segments = np.asarray(batch.segments[row])
    yield from indented(truncated(tokenizer.decode(np.asarray(batch.ids[row])[segments > 0].tolist())))

    def line(slot: int) -> str:
        i, target, weight = int(batch.ids[row, slot]), int(batch.targets[row, slot]), batch.weights[row, slot]
        wanted = repr(tokenizer.pieces([target])[0]) if weight > 0 else "-"
        piece = repr(tokenizer.pieces([i])[0])
        return f"{int(batch.positions[row, slot]):>8} {i:>6}  {piece:<16} {wanted:<16} {weight:g}"

    yield from _slot_lines(f"{'position':>8} {'id':>6}  {'token':<16} {'target':<16} weight", segments, line)


def _slot_lines(title: str, segments: np.ndarray, line: Callable[[int], str]) -> Iterator[str]:
    """Yield a table of the first and last slots of each segment of a row, with `line(slot)` for each."""
    yield f"    {'slot':>5} {'segment':>7} {title}"
    for segment in dict.fromkeys(segments.tolist()):
        slots = np.flatnonzero(segments == segment).tolist()
        if segment == 0:
            yield f"    {slots[0]:>5} … {slots[-1]}: padding"
            continue
        for slot in ends(slots):
            yield "      …" if slot is None else f"    {slot:>5} {segment:>7} {line(slot)}"


def finetune_lines(
    config: FinetuneConfig,
    task: Task,
    data: Any,
    tokenizer: Tokenizer,
    step: int,
    count: int,
    longest: int | None = None,
) -> Iterator[str]:
    """Yield the batch of a fine-tuning step: the texts, label and token sequences of each example.

    longest: number of positions of the model that may be used. Default: all.
    """
    kind = family_of(config.model).input_format
    tokenizer = FORMATS[kind].with_special_tokens(tokenizer, config.special_tokens)
    task = replace(task, special_tokens=config.special_tokens)
    config, length, batch_size = filled(config, task.papers.get(kind, {}), longest)
    encoded = encode_split(task, data, "train", tokenizer, length, kind)
    num_steps = config.num_steps or steps_of_epochs(
        kind, encoded, batch_size=batch_size, num_epochs=config.num_epochs or 0
    )
    batches = TrainBatches(encoded, batch_size=batch_size, seed=config.seed, num_steps=num_steps)
    if step >= len(batches):
        raise InputError(f"--step must be below {len(batches)}, the number of steps, got {step}")
    batch = batches[step]
    yield f"task {task.name}: {task.kind}, input form {task.form}, labels {', '.join(task.labels) or 'none'}"
    for line in data.report():
        yield f"  {line}"
    buckets = ", ".join(map(str, batches.lengths))
    yield f"  truncated to {length} tokens in train: {encoded.truncated}; bucket lengths {buckets}"
    yield (
        f"step {step} of {len(batches)}: {int(batch.weights.sum())} examples of {batch.ids.shape[1]} sequences, length "
        f"{batch.ids.shape[2]}, {int(batch.lengths.sum()):,} of {batch.ids.size:,} positions are tokens, seed "
        f"{config.seed}"
    )
    for row in range(min(count, int(batch.weights.sum()))):
        number = encoded.example_of(int(batch.index[row]))
        example = data.splits["train"].examples[number]
        truncated = ", truncated" if encode_examples(task, (example,), tokenizer, length, kind).truncated else ""
        yield ""
        yield f"example {number} of train, {example.shown_label(np.asarray(batch.labels[row]))}{truncated}"
        yield from example_lines(batch, row, example, tokenizer)


def example_lines(batch: ExampleBatch, row: int, example: Any, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield an example as in the file and as token sequences; tags follow their tokens after a slash."""
    for text in example.shown:
        yield from indented(truncated(text))
    for number in range(batch.ids.shape[1]):
        tokens, extract = int(batch.lengths[row, number]), int(batch.extract[row, number])
        pieces = [repr(piece) for piece in tokenizer.pieces(batch.ids[row, number, :tokens].tolist())]
        pieces = example.shown_pieces(pieces, np.asarray(batch.labels[row]))
        reads = f"the head reads {example.head_reads.format(extract=extract)}"
        shown = " ".join("…" if k is None else pieces[k] for k in ends(list(range(tokens)), head=40, tail=10))
        yield f"    sequence {number}: {tokens} tokens, {reads}: {shown}"


def run_batch_lines(run: RunDirectory, step: int, count: int) -> Iterator[str]:
    """Yield the batch of a step of a run, from its config. Raises InputError if its data has changed."""
    config, saved = run_config(run), completed(run.config)
    if "published" in saved:
        raise InputError(f"{run.name} was imported, so it has no steps to show; name a trained run")
    prints = saved.get("fingerprints", {})
    if isinstance(config, PretrainConfig):
        stores = tuple(run.located(path) for path in config.data.store)
        config = replace(config, data=replace(config.data, store=stores))
        found = [open_store(path).fingerprint for path in stores]
        if found != prints.get("stores", found):
            raise InputError(
                f"{run.name}: the stores {', '.join(config.data.store)} are not those it was trained on; put them back"
            )
        check_order(saved, run.name)
        yield from pretrain_lines(config, step, count)
        return
    task, data = task_data(run)
    if data.fingerprint() != prints.get("task_data", data.fingerprint()):
        raise InputError(f"{run.name}: the files of {saved['task']} are not those it was trained on; put them back")
    yield from finetune_lines(config, task, data, load_tokenizer(run.tokenizer), step, count)
