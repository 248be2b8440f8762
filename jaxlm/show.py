"""Show what a program sees: `python -m jaxlm.show STORE|RUN|CONFIG`.

A token store: its counts and some of its documents, decoded. A run: how far it is, how good, how it was started; with
--step N the batch of that step. A config: the decoded batch of a step, which needs the store (`--data.store`) or, for
fine-tuning, the task (`--task`, and `--tokenizer` or `--start`), with any of its fields changed as for training.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from jaxlm.batch import Batch, ExampleBatch, PairBatch
from jaxlm.checkpoints import Checkpoints
from jaxlm.checkpoints.trees import named_leaves
from jaxlm.config import command_line, from_json, load_config
from jaxlm.data.loader import batch_at, row_origins
from jaxlm.data.origin import RowOrigin
from jaxlm.data.pairs import pair_figures
from jaxlm.data.phases import phase_at, phased_rows
from jaxlm.data.store import DESCRIPTION, Store, open_store
from jaxlm.errors import InputError, run_command
from jaxlm.logs import read_metrics
from jaxlm.tasks import (
    ROLES,
    CustomConfig,
    SpanExample,
    TaggedSentence,
    Task,
    TaskOptions,
    encode_examples,
    encode_split,
    read_task,
    train_batches,
)
from jaxlm.tasks.spans import SpanSplit
from jaxlm.text import Tokenizer, load_tokenizer, tokenizer_from_spec
from jaxlm.training.config import FinetuneConfig, PretrainConfig, filled, one_duration
from jaxlm.training.loaded import run_config, split_run
from jaxlm.training.run import RunDirectory

TEXT = 600  # characters of a document that are shown
HEAD, TAIL = 12, 3  # slots of a segment that are shown, from its beginning and its end
SENTENCES = 8  # sentences of a document that are shown
CURVE = 10  # lines of a run's metrics that are shown


@dataclass(frozen=True)
class Arguments:
    """Show a token store or a run."""

    target: tyro.conf.Positional[str]
    """A token store, a run directory (or RUN@STEP), or a config file or its name."""
    step: int | None = None
    """Of a run: show the batch of this step, counted from 0."""
    count: int = 3
    """Documents or rows to show."""


@dataclass(frozen=True)
class PretrainArguments:
    """Show the batch that a pretraining config makes of its stores."""

    config: tyro.conf.Positional[str]
    """A config file, or its name."""
    step: int = 0
    """The step, counted from 0."""
    count: int = 3
    """Rows to show."""
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


@dataclass(frozen=True)
class FinetuneArguments:
    """Show the batch that a fine-tuning config makes of a task."""

    config: tyro.conf.Positional[str]
    """A config file, or its name."""
    task: str
    """The task: cola, sst2, …, or custom for files of your own."""
    task_dir: str | None = None
    """Where the task's files are; tfds or tfds:DATA_DIR for TFDS's copy."""
    custom: CustomConfig = field(default_factory=CustomConfig)
    start: str | None = None
    """A run whose tokenizer is used."""
    tokenizer: str | None = None
    """Or a tokenizer: sentencepiece:FILE, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR."""
    held_out_seed: int = 0
    """Decides which rows become the dev part where the task has none."""
    step: int = 0
    """The step, counted from 0."""
    count: int = 3
    """Examples to show."""
    settings: Annotated[FinetuneConfig, tyro.conf.arg(name="")] = field(default_factory=FinetuneConfig)


def store_lines(store: Store, count: int) -> Iterator[str]:
    """Counts by section, the tokenizer, and `count` documents spread over the store."""
    tokenizer = store.tokenizer()
    yield f"token store {store.path}"
    yield f"  {store.documents:,} documents, {store.num_tokens:,} tokens, {store.words:,} words, {store.bytes:,} bytes"
    yield (
        f"  {_ratio(store.bytes, store.num_tokens)} bytes a token, {_ratio(store.num_tokens, store.words)} tokens a "
        f"word, unigram entropy {store.unigram_entropy():.4f} nats a token"
    )
    if store.sentences is not None:
        yield f"  {store.sentences:,} sentences, {_ratio(store.num_tokens, store.sentences)} tokens a sentence"
    yield f"  fingerprint {store.fingerprint[:16]}"
    for section in store.sections:
        share = "" if section.weight is None else f", weight {section.weight:g}"
        yield f"  {section.source}: {section.documents:,} documents, {section.tokens:,} tokens{share}"
    yield from tokenizer_lines(tokenizer)
    counts = np.asarray(store.token_counts)
    most = np.argsort(-counts, kind="stable")[:12]
    often = ", ".join(f"{tokenizer.pieces([i])[0]!r} {counts[i]:,}" for i in most if counts[i])
    yield f"  most frequent: {often}; {int((counts == 0).sum()):,} of {len(counts):,} ids never occur"
    for document in np.unique(np.linspace(0, store.documents - 1, min(count, store.documents)).astype(int)):
        first, end = (int(offset) for offset in store.document_starts[document : document + 2])
        ids = np.asarray(store.tokens[first : min(end, first + TEXT)]).tolist()
        yield ""
        yield f"document {document}: {end - first:,} tokens from {first:,}"
        if store.sentence_starts is None:
            yield from _indented(_cut(tokenizer.decode(ids), end - first > len(ids)))
        else:
            yield from _sentence_lines(store, tokenizer, first, end)
        yield f"    pieces: {' '.join(map(repr, tokenizer.pieces(ids[:HEAD])))}{' …' if end - first > HEAD else ''}"


def _sentence_lines(store: Store, tokenizer: Tokenizer, first: int, end: int) -> Iterator[str]:
    """The first sentences of the document in tokens first … end, a line each."""
    starts = np.asarray(store.sentence_starts)
    begin, stop = np.searchsorted(starts, (first, end)).tolist()
    yield f"    {stop - begin:,} sentences"
    for k in range(begin, min(stop, begin + SENTENCES)):
        ids = np.asarray(store.tokens[starts[k] : min(starts[k + 1], starts[k] + TEXT)]).tolist()
        yield from _indented(f"{k - begin}: {_cut(tokenizer.decode(ids).strip())}")
    if stop - begin > SENTENCES:
        yield "    | …"


def tokenizer_lines(tokenizer: Tokenizer) -> Iterator[str]:
    """Kind, size and special tokens."""
    specials = ", ".join(f"{role} {i}" for role, i in sorted(tokenizer.specials.items(), key=lambda item: item[1]))
    yield f"  tokenizer {tokenizer.kind}, {tokenizer.size:,} ids, fingerprint {tokenizer.fingerprint[:16]}"
    yield f"  special tokens: {specials or 'none'}"


def run_lines(run: RunDirectory) -> Iterator[str]:
    """How far a run is, how good, what it learns from, and its starts."""
    config, saved = run_config(run), run.config
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    steps = checkpoints.steps()
    kind = "pretraining" if isinstance(config, PretrainConfig) else f"fine-tuning on {saved.get('task')}"
    model = config.model
    yield f"run {run.path}: {kind}"
    sizes = f"{model.num_layers} layers x {model.width}, {model.num_heads} heads, {model.num_positions} positions"
    if steps:
        params = named_leaves(checkpoints.metadata(steps[-1]).tree["params"])
        sizes += f", {sum(int(np.prod(leaf.shape)) for leaf in params.values()):,} parameters"
    yield f"  model: {sizes}, vocabulary {model.vocab_size:,}"
    optimizer = config.optimizer
    yield (
        f"  training: batch {config.batch_size} x {config.length}, {optimizer.kind}, rate {optimizer.peak_lr:g}, "
        f"warmup {optimizer.warmup:g}, decay {optimizer.decay}, seed {config.seed}"
    )
    if isinstance(config, PretrainConfig):
        yield f"  data: {', '.join(config.data.store)}; validation: {', '.join(config.data.validation) or 'none'}"
    else:
        yield f"  start: {saved.get('start') or 'from scratch'}; seeds: {saved.get('seeds')}"
    yield f"  checkpoints: {', '.join(map(str, steps)) or 'none yet'}"
    if run.tokenizer.exists():
        yield from tokenizer_lines(load_tokenizer(run.tokenizer))
    lines = list(read_metrics(run.path / "metrics.jsonl")) if (run.path / "metrics.jsonl").exists() else []
    yield from _metrics_lines(lines, config.num_steps)
    yield from _results_lines(run.path / "results.json")
    starts = run.starts()
    yield f"{len(starts)} start{'' if len(starts) == 1 else 's'}"
    for start in starts:
        devices, commit = start.get("devices", {}), (start.get("commit") or "no commit")[:12]
        yield (
            f"  {start.get('time')}  {start.get('started_from') or 'from scratch'}, {devices.get('count')} x "
            f"{devices.get('kind')}, {commit}"
        )
        yield f"    {start.get('command')}"


def _metrics_lines(lines: Sequence[dict[str, Any]], num_steps: int | None) -> Iterator[str]:
    training = [line for line in lines if "loss" in line]
    if not training:
        yield "  no step is logged yet"
        return
    last = training[-1]
    total = f" of {num_steps:,}" if num_steps else ""
    speed = f", {last['tokens_per_second']:,.0f} tokens/s" if last.get("tokens_per_second") else ""
    yield f"  step {last['step']:,}{total}: loss {last['loss']:.4f}{speed}"
    for line in (training[k] for k in np.unique(np.linspace(0, len(training) - 1, CURVE).astype(int))):
        seed = f" seed {line['seed']}" if "seed" in line else ""
        yield f"    step {line['step']:>8,}{seed}  loss {line['loss']:8.4f}  rate {line.get('learning_rate', 0):.3g}"
    validation = [line for line in lines if "validation_loss" in line]
    if validation:
        best = min(validation, key=lambda line: line["validation_loss"])
        for name, line in (("best", best), ("last", validation[-1])):
            yield (
                f"  {name} validation: step {line['step']:,}, loss {line['validation_loss']:.4f}, perplexity "
                f"{line['perplexity']:.2f} a token, {line['word_perplexity']:.2f} a word, "
                f"{line['bits_per_byte']:.4f} bits a byte"
            )


def _results_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    results = from_file(path)
    yield f"  results: {len(results['runs'])} runs, {results['metric']} first"
    for part in ("dev", "test"):
        figures = results.get(part) or {}
        names = sorted(figures, key=lambda name: (name != results["metric"], name))
        if names:
            parts = (f"{name} {figures[name]['mean']:.4f} ± {figures[name]['std']:.4f}" for name in names)
            yield f"    {part:<5}{'  '.join(parts)}"


def from_file(path: Path) -> Any:
    """A JSON file of a run. InputError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; put it back from a copy") from error


def pretrain_lines(config: PretrainConfig, step: int, count: int) -> Iterator[str]:
    """The batch of a pretraining step: where each row came from, its text, and its slots."""
    if not config.data.store:
        raise InputError("data.store is not given: name the token store with --data.store")
    stores = [open_store(path) for path in config.data.store]
    by_path = {str(store.path): store for store in stores}
    tokenizer = stores[0].tokenizer()
    rows = phased_rows(
        stores,
        config.data,
        length=config.length,
        seed=config.seed,
        num_steps=config.num_steps or step + 1,
        batch_size=config.batch_size,
    )
    batch = batch_at(rows, step, config.batch_size)
    phase = phase_at(step, rows.phases)
    if len(rows.phases) > 1:
        yield f"phase {phase.number + 1} of {len(rows.phases)}: steps {phase.first_step:,} to {phase.end_step - 1:,}"
    yield f"step {step}: {config.batch_size} rows of {phase.length}, layout {config.data.layout}, seed {config.seed}"
    padding = int((np.asarray(batch.segments) == 0).sum())
    if isinstance(batch, PairBatch):
        yield f"  {pair_figures(rows.rows[phase.number].sources)}"
        pairs, random = int(batch.pair_weights.sum()), int(batch.next_labels.sum())
        yield f"  {pairs} pairs, {pairs - random} true; {padding:,} of {batch.ids.size:,} slots are padding"
    else:
        yield (f"  {int(batch.weights.sum()):,} of {batch.weights.size:,} slots are predicted, {padding:,} are padding")
    origins = row_origins(rows, step, config.batch_size)
    for row in range(min(count, config.batch_size)):
        yield ""
        yield f"row {row}"
        if isinstance(batch, PairBatch):
            yield from pair_row_lines(batch, row, tokenizer, origins[row])
            continue
        for segment, origin in enumerate(origins[row], start=1):
            assert isinstance(origin, RowOrigin)
            whole = int(np.diff(by_path[origin.store].document_starts[origin.document : origin.document + 2])[0])
            part = "" if origin.tokens >= whole else f" of {whole:,}"
            part += ", cut" if part and config.data.layout == "packed" else ""
            yield f"  segment {segment}: {origin}, {origin.tokens:,} tokens{part}"
        yield from row_lines(batch, row, tokenizer)


def pair_row_lines(batch: PairBatch, row: int, tokenizer: Tokenizer, origins: Sequence[Any]) -> Iterator[str]:
    """The pairs of a row: where they came from, their text, and their first and last slots. Masks are made later."""
    segments, types = np.asarray(batch.segments[row]), np.asarray(batch.types[row])
    yield f"  masks are drawn from {batch.mask_seeds[row].tolist()}"
    for segment, origin in enumerate(origins, start=1):
        yield f"  pair {segment}: {'true' if origin.is_next else 'random'}, label {batch.next_labels[row, segment - 1]}"
        yield f"    A: {origin.first}, {origin.first.tokens:,} tokens"
        yield f"    B: {origin.second}, {origin.second.tokens:,} tokens"
        chunk = origin.chunk
        yield f"    of {chunk.tokens:,} tokens from token {chunk.token} on, {origin.dropped:,} are dropped"
        for kind, name in enumerate("AB"):
            slots = np.flatnonzero((segments == segment) & (types == kind))
            text = tokenizer.decode(np.asarray(batch.ids[row, slots]).tolist())
            yield from _indented(f"{name}: {_cut(text.strip())}")

    def line(slot: int) -> str:
        i = int(batch.ids[row, slot])
        return f"{int(types[slot]):>4} {int(batch.positions[row, slot]):>8} {i:>6}  {tokenizer.pieces([i])[0]!r}"

    yield from _slot_lines(f"{'type':>4} {'position':>8} {'id':>6}  piece", segments, line)


def row_lines(batch: Batch, row: int, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of a row, and of each segment its first and last slots: piece, position, target, weight."""
    segments = np.asarray(batch.segments[row])
    yield from _indented(_cut(tokenizer.decode(np.asarray(batch.ids[row])[segments > 0].tolist())))

    def line(slot: int) -> str:
        i, target, weight = int(batch.ids[row, slot]), int(batch.targets[row, slot]), batch.weights[row, slot]
        wanted = repr(tokenizer.pieces([target])[0]) if weight > 0 else "-"
        piece = repr(tokenizer.pieces([i])[0])
        return f"{int(batch.positions[row, slot]):>8} {i:>6}  {piece:<16} {wanted:<16} {weight:g}"

    yield from _slot_lines(f"{'position':>8} {'id':>6}  {'piece':<16} {'target':<16} weight", segments, line)


def _slot_lines(title: str, segments: np.ndarray, line: Callable[[int], str]) -> Iterator[str]:
    """A table of the first and last slots of each segment of a row; `line` is what it says of a slot."""
    yield f"    {'slot':>5} {'segment':>7} {title}"
    for segment in dict.fromkeys(segments.tolist()):
        slots = np.flatnonzero(segments == segment).tolist()
        if segment == 0:
            yield f"    {slots[0]:>5} … {slots[-1]}: padding"
            continue
        for slot in _ends(slots):
            yield "      …" if slot is None else f"    {slot:>5} {segment:>7} {line(slot)}"


def finetune_lines(
    config: FinetuneConfig, task: Task, data: Any, tokenizer: Tokenizer, step: int, count: int
) -> Iterator[str]:
    """The batch of a fine-tuning step: each example's texts, label and token sequences, and what was cut."""
    kind = config.model.kind
    tokenizer = tokenizer.with_specials(ROLES) if kind == "gpt" else tokenizer
    config, length, batch_size = filled(config, task.paper_for(kind))
    encoded = encode_split(task, data, "train", tokenizer, length, kind)
    batches = train_batches(
        encoded,
        batch_size=batch_size,
        num_epochs=config.num_epochs or 0,
        seed=config.seed,
        num_steps=config.num_steps,
    )
    if step >= len(batches):
        raise InputError(f"--step {step}: the run has {len(batches)} steps, counted from 0")
    batch = batches[step]
    yield f"task {task.name}: {task.kind}, input form {task.form}, labels {', '.join(task.labels) or 'none'}"
    for line in data.report():
        yield f"  {line}"
    buckets = ", ".join(map(str, batches.lengths))
    yield f"  cut to {length} tokens in train: {encoded.truncated}; bucket lengths {buckets}"
    yield (
        f"step {step} of {len(batches)}: {int(batch.weights.sum())} examples of {batch.ids.shape[1]} sequences, length "
        f"{batch.ids.shape[2]}, {int(batch.lengths.sum()):,} of {batch.ids.size:,} slots are tokens, seed {config.seed}"
    )
    for row in range(min(count, int(batch.weights.sum()))):
        number = int(batch.index[row])
        if isinstance(encoded, SpanSplit):  # a row is a window of a question
            number = int(encoded.question_of[number])
        example = data.splits["train"].examples[number]
        cut = ", cut" if encode_examples(task, (example,), tokenizer, length, kind).truncated else ""
        yield ""
        yield f"example {number} of train, {label_of(batch, row, example)}{cut}"
        yield from example_lines(batch, row, example, tokenizer)


def label_of(batch: ExampleBatch, row: int, example: Any) -> str:
    """A row's label as the file has it, and as the loss sees it."""
    labels = np.asarray(batch.labels[row])
    if isinstance(example, SpanExample):
        answers = ", ".join(repr(text) for text, _ in example.answers or ()) or "none"
        return f"answers {answers}, in this window tokens {labels[0]} to {labels[1]}"
    if isinstance(example, TaggedSentence):
        return f"{int((labels >= 0).sum())} tags"
    return f"label {example.label!r}, as a number {labels:g}"


def example_lines(batch: ExampleBatch, row: int, example: Any, tokenizer: Tokenizer) -> Iterator[str]:
    """An example as the file has it, and as the model reads it; tags stand behind the pieces that have one."""
    texts = (" ".join(example.tokens),) if isinstance(example, TaggedSentence) else example.parts
    for text in texts:
        yield from _indented(_cut(text))
    for number in range(batch.ids.shape[1]):
        tokens, extract = int(batch.lengths[row, number]), int(batch.extract[row, number])
        pieces = [repr(piece) for piece in tokenizer.pieces(batch.ids[row, number, :tokens].tolist())]
        reads = f"the head reads position {extract}"
        if isinstance(example, SpanExample):
            reads = "the head reads all of them"
        if isinstance(example, TaggedSentence):
            reads = "the head reads those with a number, their tag"
            pieces = [
                piece if tag < 0 else f"{piece}/{tag}"
                for piece, tag in zip(pieces, batch.labels[row, :tokens], strict=True)
            ]
        shown = " ".join("…" if k is None else pieces[k] for k in _ends(list(range(tokens)), head=40, tail=10))
        yield f"    sequence {number}: {tokens} tokens, {reads}: {shown}"


def run_batch_lines(run: RunDirectory, step: int, count: int) -> Iterator[str]:
    """The batch of a step of a run, from its own config. InputError where its data is not the same any more."""
    config, saved = run_config(run), run.config
    if "published" in saved:
        raise InputError(f"{run.path} was imported: no step was trained there, so it has no batch to show")
    prints = saved.get("fingerprints", {})
    if isinstance(config, PretrainConfig):
        found = [open_store(path).fingerprint for path in config.data.store]
        if found != prints.get("stores", found):
            raise InputError(f"{run.path}: the stores {', '.join(config.data.store)} are not those it was trained on")
        yield from pretrain_lines(config, step, count)
        return
    custom = from_json(CustomConfig, saved["custom"], "custom") if saved.get("custom") else None
    options = from_json(TaskOptions, saved["options"], "options") if saved.get("options") else None
    seed = saved.get("held_out_seed", 0)
    task, data = read_task(saved["task"], saved.get("task_dir"), custom, seed=seed, options=options)
    if data.fingerprint() != prints.get("task_data", data.fingerprint()):
        raise InputError(
            f"{run.path}: the files of {saved['task']} are not those it was trained on, or split otherwise"
        )
    yield from finetune_lines(config, task, data, load_tokenizer(run.tokenizer), step, count)


def show_config(name: str) -> Iterator[str]:
    """What the batch of a config looks like; its fields are flags, as for training."""
    try:
        loaded = load_config(name, object)
    except InputError as error:
        raise InputError(f"{name} is no token store, no run directory and no config that works: {error}") from error
    if isinstance(loaded, PretrainConfig):
        arguments, _ = command_line(PretrainArguments, PretrainConfig, program="show", description=__doc__)
        _check_counts(arguments)
        arguments.settings.check()
        return pretrain_lines(arguments.settings, arguments.step, arguments.count)
    if not isinstance(loaded, FinetuneConfig):
        raise InputError(
            f"config {name}: config() returns {type(loaded).__name__}, neither pretraining nor fine-tuning"
        )
    arguments, _ = command_line(FinetuneArguments, FinetuneConfig, program="show", description=__doc__)
    _check_counts(arguments)
    config = one_duration(arguments.settings, loaded)
    if arguments.start is not None:
        run = RunDirectory(split_run(arguments.start)[0])
        config = dataclasses.replace(config, model=run_config(run).model)
        tokenizer = load_tokenizer(run.tokenizer)
    elif arguments.tokenizer is not None:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
    else:
        raise InputError("which tokenizer? give --tokenizer, or --start a run")
    config.check()
    task, data = read_task(arguments.task, arguments.task_dir, arguments.custom, seed=arguments.held_out_seed)
    return finetune_lines(config, task, data, tokenizer, arguments.step, arguments.count)


def _check_counts(arguments: Any) -> None:
    for name in ("step", "count"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise InputError(f"--{name} {value}: a number from 0 on")


def _ends(slots: list[int], *, head: int = HEAD, tail: int = TAIL) -> list[int | None]:
    """The first and the last of `slots`, None between them for what is left out."""
    return [*slots] if len(slots) <= head + tail + 1 else [*slots[:head], None, *slots[-tail:]]


def _indented(text: str) -> Iterable[str]:
    return (f"    | {line}" for line in text.split("\n"))


def _cut(text: str, more: bool = False) -> str:
    return text[:TEXT] + (" …" if more or len(text) > TEXT else "")


def _ratio(count: float, by: float) -> str:
    return f"{count / by:.2f}" if by else "-"


def main() -> None:
    """The command."""
    target = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    path = Path(target)
    if target and not path.is_dir() and ("@" not in target or path.is_file()):
        lines = show_config(target)
    else:
        arguments, _ = command_line(Arguments, program="show", description=__doc__)
        _check_counts(arguments)
        if (path / DESCRIPTION).is_file():
            lines = store_lines(open_store(path), arguments.count)
        else:
            run = RunDirectory(split_run(arguments.target)[0])
            step = arguments.step
            lines = run_lines(run) if step is None else run_batch_lines(run, step, arguments.count)
    for line in lines:
        print(line)


if __name__ == "__main__":
    run_command(main)
