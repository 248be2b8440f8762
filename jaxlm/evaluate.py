"""Evaluate a run: `python -m jaxlm.evaluate perplexity|task|score --run RUN …`.

perplexity: how well a text that was prepared as a token store is predicted. task: how well a fine-tuned run labels
another labelled file. score: the log-probability of each sentence of a file, or of each choice of its rows. A summary
goes to standard output; its last line is one JSON object with the figures (nan and infinities as strings).
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import jax
import numpy as np
import tyro

from jaxlm.config import command_line
from jaxlm.data.loader import validation_batches
from jaxlm.data.store import Store, open_store
from jaxlm.decoding import left_context
from jaxlm.devices import prepare_process
from jaxlm.errors import InputError, run_command
from jaxlm.labelling import default_batch_size, label_split, make_head, make_label_step
from jaxlm.logs import Progress
from jaxlm.objectives import language_model
from jaxlm.output import whole_file
from jaxlm.scoring import Score, Scored, perplexity, sequence_log_probs, text_sequence
from jaxlm.sharding import MeshConfig, check_batch, host_rows, make_mesh, to_devices, use_mesh
from jaxlm.tasks import Columns, encode_examples, read_labelled
from jaxlm.tasks.files import Errors, numbered_lines, open_input
from jaxlm.tasks.loading import standard_lengths
from jaxlm.tasks.rows import JSON_SUFFIXES, RowReader
from jaxlm.tasks.task import Quoting
from jaxlm.text import Tokenizer
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import FinetuneConfig, check_sizes
from jaxlm.training.loaded import LoadedRun, load_run
from jaxlm.training.processes import DistributedConfig, start_processes
from jaxlm.training.step import make_eval_step

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Stores:
    """The text to evaluate on."""

    store: tuple[str, ...]
    """Token stores, made with the run's tokenizer; they count as one text."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every evaluation has."""

    run: str
    """A run, RUN or RUN@STEP."""
    batch_size: int | None = None
    """Sequences that run together; it does not change the figures."""
    output: Path | None = None
    """A file for the results: a JSON object, or JSONL with a line a row."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True, kw_only=True)
class Perplexity(Evaluation):
    """How well a text is predicted: every token of the stores once."""

    data: Stores
    length: int | None = None
    """Tokens in a row, which see nothing of the row before; the run's own unless given."""


@dataclass(frozen=True, kw_only=True)
class OnTask(Evaluation):
    """How well a fine-tuned run labels another labelled file of its task."""

    input: Path
    """TSV with a header, CSV or JSONL with the task's columns and labels, or a file in the task's own format."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: stop and name them, or put U+FFFD in their place."""


@dataclass(frozen=True, kw_only=True)
class Scoring(Evaluation):
    """The log-probability of each sentence or choice of a file, in nats, from the language model alone."""

    input: str
    """A text file with a sentence a line; or a JSONL, CSV or TSV file with --fields. - is standard input."""
    fields: tuple[str, ...] = ()
    """The field or column to score. Several are choices, of which the most likely is named."""
    choice_list: str | None = None
    """Of JSONL, a field that holds the choices as a list, in place of --fields; they are called 0, 1, …"""
    context: str | None = None
    """A field that stands before each, and is not scored itself."""
    separator: str = " "
    """What parts the context from what follows."""
    label: str | None = None
    """A field that says which choice is right; then accuracies are reported."""
    label_names: tuple[str, ...] = ()
    """How the label spells each choice, in their order; the names of the fields unless given."""
    by: Literal["sum", "per-token"] = "sum"
    """Which choice is the most likely: by the sum over its tokens, or by their mean."""
    quoting: Quoting = "none"
    """Of a TSV: fields are taken as they are, or may be wrapped in double quotes (csv)."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: stop and name them, or put U+FFFD in their place."""


Command = (
    Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
    | Annotated[OnTask, tyro.conf.subcommand("task")]
    | Annotated[Scoring, tyro.conf.subcommand("score")]
)


def evaluate_perplexity(arguments: Perplexity) -> dict[str, Any]:
    """Perplexity and its kin over whole stores."""
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    stores = tuple(open_store(Path(path)) for path in arguments.data.store)
    for store in stores:
        check_store(store, run)
    length = arguments.length or run.config.length or run.model.config.num_positions
    check_sizes(length, 1, run.model.config)
    batch_size = _batch_size(arguments, run, mesh)
    objective = language_model(run.model, loss_chunks=0)
    batches = validation_batches(stores, length=length, batch_size=batch_size, host_rows=host_rows(batch_size, mesh))
    words, size = sum(store.words for store in stores), sum(store.bytes for store in stores)
    with use_mesh(mesh), _progress("batches", len(batches)) as progress:
        from_host = (progress.count(to_devices(batch, mesh, batch_size)) for batch in batches)
        step = CompiledStep("evaluation", jax.jit(make_eval_step(objective)))
        figures = perplexity(step, run.params, from_host, words=words, bytes=size)
    entropy = sum(store.unigram_entropy() * store.num_tokens for store in stores) / sum(s.num_tokens for s in stores)
    _say(
        f"{run.name} on {', '.join(str(store.path) for store in stores)}: {figures['tokens']:,} tokens, {words:,} "
        f"words, {size:,} bytes, in rows of {length}",
        f"  loss            {figures['validation_loss']:.4f} nats a token (from frequencies alone: {entropy:.4f})",
        f"  perplexity      {figures['perplexity']:.3f} a token, {figures['word_perplexity']:.3f} a word",
        f"  bits per byte   {figures['bits_per_byte']:.4f}",
        f"  accuracy        {figures['accuracy']:.4f} of the next tokens",
    )
    found = {"run": run.name, "stores": [str(store.path) for store in stores], "length": length} | figures
    _write_json(arguments.output, found)
    return found


def check_store(store: Store, run: LoadedRun) -> None:
    """Refuse a store made with another tokenizer; a fine-tuned run's may have grown special tokens at its end."""
    tokenizer = store.tokenizer()
    specials = run.tokenizer.specials
    grown = tokenizer.with_specials(sorted(specials, key=lambda role: specials[role]))
    if run.tokenizer.fingerprint not in (tokenizer.fingerprint, grown.fingerprint):
        raise InputError(
            f"{store.path} was made with another tokenizer ({tokenizer.fingerprint[:12]}) than {run.path} "
            f"({run.tokenizer.fingerprint[:12]}): prepare the text again with --tokenizer store:DIR of the run's store"
        )


def evaluate_task(arguments: OnTask) -> dict[str, Any]:
    """The task's metrics on another labelled file."""
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    if run.task is None or not isinstance(run.config, FinetuneConfig):
        raise InputError(f"{run.path} is a pretraining run: evaluate task needs one that jaxlm.finetune made")
    task, config = run.task, run.config
    split = read_labelled(arguments.input, task, errors=arguments.errors)
    if not split.labelled:
        raise InputError(f"{arguments.input} has no labels: python -m jaxlm.predict labels new rows")
    limit = config.length or config.model.num_positions
    encoded = encode_examples(task, split.examples, run.tokenizer, limit)
    lengths = standard_lengths(limit)
    head = make_head(task, config.head_dropout_rate, config.model.init_std)
    step = CompiledStep("evaluation", jax.jit(make_label_step(run.model, head)), expected_shapes=len(lengths))
    with use_mesh(mesh):
        batch_size = _batch_size(arguments, run, mesh)
        labelled = label_split(step, run.params, encoded, mesh, batch_size=batch_size, lengths=lengths)
    figures = labelled.metrics(task, encoded)
    if arguments.output is not None:
        with _output(arguments.output) as file:
            for index, (outputs, example) in enumerate(zip(labelled.outputs, split.examples, strict=True)):
                prediction, scores = task.prediction(outputs)
                line = {"index": index, "prediction": prediction, "label": example.label, "scores": scores}
                file.write(json.dumps(line) + "\n")
    counts = {"examples": len(encoded), "truncated": encoded.truncated, "dropped": len(split.dropped)}
    _say(
        f"{run.name} on {arguments.input}: {task.name}, {len(encoded):,} examples of {split.rows_read:,} rows read, "
        f"{len(split.dropped)} dropped, {encoded.truncated} cut to {limit} tokens",
        *(f"  {name:<14}{value:.4f}" for name, value in figures.items()),
    )
    found = {"run": run.name, "input": str(arguments.input), "task": task.name, "metric": task.metric}
    return found | figures | counts


@dataclass(frozen=True)
class ScoredRow:
    """A row of a file: the sequences to score by name (one sentence, or its choices), and the right one's name."""

    line: int
    texts: tuple[str, ...]
    names: tuple[str, ...]
    sequences: tuple[Scored, ...]
    label: str | None


def evaluate_score(arguments: Scoring) -> dict[str, Any]:
    """Log-probabilities of sentences or choices, row by row."""
    _check_scoring(arguments)
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    left = left_context(run.tokenizer, finetuned=run.task is not None)
    pending: collections.deque[ScoredRow] = collections.deque()

    def sequences() -> Iterator[Scored]:
        for row in rows_to_score(arguments, run.tokenizer, left):
            pending.append(row)
            yield from row.sequences

    batch_size = _batch_size(arguments, run, mesh)
    scores = sequence_log_probs(run.model, run.params, sequences(), mesh=mesh, batch_size=batch_size)
    tally = Tally()
    total, tokens, index = 0.0, 0, 0
    several = len(arguments.fields) > 1 or arguments.choice_list is not None
    with _output(arguments.output) as file, _progress("rows", active=arguments.output is not None) as progress:
        for score in scores:
            row = pending.popleft()
            found = [score, *(next(scores) for _ in row.sequences[1:])]
            total += sum(score.log_probability for score in found)
            tokens += sum(score.tokens for score in found)
            line = row_result(index, row, found, arguments.by, several)
            if row.label is not None:
                tally.add(row, found)
            if arguments.output is not None:
                file.write(json.dumps({k: _finite(v) for k, v in line.items()}, ensure_ascii=False) + "\n")
            else:
                _say(_row_text(line, row, found, several))
            index += 1
            progress.count(None)
    mean = total / tokens if tokens else math.nan
    what = "rows of choices" if several else "sentences"
    given = (
        "their context" if arguments.context else f"{run.tokenizer.pieces(left)[0]}" if left else "their first token"
    )
    _say(
        f"{run.name} on {arguments.input}: {index:,} {what}, {tokens:,} tokens scored given {given}",
        f"  log-probability {mean:.4f} nats a token, {total:.2f} in all",
        *([] if not tally.rows else [f"  accuracy        {tally.by_sum:.4f} by sum, {tally.by_mean:.4f} per token"]),
    )
    figures: dict[str, Any] = {"rows": index, "tokens": tokens, "log_probability": total, "per_token": mean}
    if tally.rows:
        by = {"sum": tally.by_sum, "per-token": tally.by_mean}
        figures |= {"accuracy": by[arguments.by], "accuracy_sum": by["sum"], "accuracy_per_token": by["per-token"]}
    return {"run": run.name, "input": arguments.input} | figures


def rows_to_score(arguments: Scoring, tokenizer: Tokenizer, left: list[int]) -> Iterator[ScoredRow]:
    """The rows of the input, as they come. Blank lines of a text file are left out."""
    if not arguments.fields and arguments.choice_list is None:
        name = "standard input" if arguments.input == "-" else arguments.input
        with open_input(arguments.input) as stream:
            for number, text in numbered_lines(stream, name, arguments.errors):
                if text.strip():
                    yield ScoredRow(number, (text,), ("text",), (text_sequence(tokenizer, text, left=left),), None)
        return
    one = len(arguments.fields) == 1
    context = ((arguments.context,),) if arguments.context else ()
    columns = Columns(
        texts=(*context, (arguments.fields[0],)) if one else context,
        choices=() if one else tuple((name,) for name in arguments.fields),
        choice_list=(arguments.choice_list,) if arguments.choice_list else (),
        label=(arguments.label,) if arguments.label else (),
    )
    rule: Literal["required", "ignored"] = "required" if arguments.label else "ignored"
    reader = RowReader(
        arguments.input, columns, label=rule, quoting=arguments.quoting, errors=arguments.errors, blank_lines="refuse"
    )
    for number, example in reader:
        texts = (example.texts[-1],) if one else example.choices
        names = arguments.label_names or arguments.fields or tuple(str(k) for k in range(len(texts)))
        label = None if example.label is None else str(example.label)
        if len(names) != len(texts) or (label is not None and label not in names):
            raise InputError(
                f"{reader.name} line {number}: the label {label!r} is none of the {len(texts)} choices, "
                f"{', '.join(names)}; say how the label spells them, in their order, with --label-names"
            )
        before = example.texts[0] if arguments.context else ""
        sequences = tuple(
            text_sequence(tokenizer, text, left=left, context=before, separator=arguments.separator) for text in texts
        )
        if texts:
            yield ScoredRow(number, texts, names, sequences, label)


def row_result(index: int, row: ScoredRow, found: list[Score], by: str, several: bool) -> dict[str, Any]:
    """A line of the output: log-probability and tokens of the sentence, or of each choice by its name."""
    if not several:
        return {"index": index, "log_probability": found[0].log_probability, "tokens": found[0].tokens}
    best = int(np.argmax([_merit(score, by) for score in found]))
    line: dict[str, Any] = {
        "index": index,
        "log_probability": {name: score.log_probability for name, score in zip(row.names, found, strict=True)},
        "tokens": {name: score.tokens for name, score in zip(row.names, found, strict=True)},
        "most_likely": row.names[best],
    }
    return line if row.label is None else line | {"label": row.label}


@dataclass
class Tally:
    """How often the right choice was the most likely; where n are equally likely it counts 1/n."""

    rows: int = 0
    right: dict[str, float] = dataclasses.field(default_factory=lambda: {"sum": 0.0, "per-token": 0.0})

    def add(self, row: ScoredRow, found: list[Score]) -> None:
        """Count one labelled row."""
        self.rows += 1
        for by in self.right:
            merits = [_merit(score, by) for score in found]
            first = [name for name, merit in zip(row.names, merits, strict=True) if merit == max(merits)]
            self.right[by] += (row.label in first) / len(first)

    @property
    def by_sum(self) -> float:
        """Accuracy by the sum over tokens."""
        return self.right["sum"] / self.rows

    @property
    def by_mean(self) -> float:
        """Accuracy by the mean over tokens."""
        return self.right["per-token"] / self.rows


def _merit(score: Score, by: str) -> float:
    value = score.log_probability if by == "sum" else score.per_token
    return value if score.tokens else -math.inf


def _row_text(line: dict[str, Any], row: ScoredRow, found: list[Score], several: bool) -> str:
    if not several:
        return f"{found[0].log_probability:12.4f} {found[0].per_token:9.4f} a token  {row.texts[0]}"
    parts = (f"{name} {score.log_probability:.4f}" for name, score in zip(row.names, found, strict=True))
    return f"{line['index']:6d}  {line['most_likely']}  ({', '.join(parts)})"


def _check_scoring(arguments: Scoring) -> None:
    suffix = Path(arguments.input).suffix.lower()
    if arguments.fields and arguments.choice_list:
        raise InputError("--fields and --choice-list: give one of them")
    rows = bool(arguments.fields or arguments.choice_list)
    if not rows and suffix in (*JSON_SUFFIXES, ".csv", ".tsv"):
        raise InputError(f"{arguments.input} has fields: name the one to score with --fields, or several as choices")
    if not rows and (arguments.label or arguments.context):
        raise InputError("--label and --context name fields: give --fields too, the field or fields to score")
    if arguments.label and len(arguments.fields) == 1:
        raise InputError("--label says which of several choices is right: give two --fields or more")
    if len(set(arguments.fields)) < len(arguments.fields):
        raise InputError(f"--fields {' '.join(arguments.fields)}: a field is named twice")


def _batch_size(arguments: Evaluation, run: LoadedRun, mesh: jax.sharding.Mesh) -> int:
    if arguments.batch_size is not None:
        check_batch(arguments.batch_size, 1, mesh)
        return arguments.batch_size
    config = run.config
    return default_batch_size(config.eval_batch_size or config.batch_size or DEFAULT_BATCH_SIZE, mesh)


class _Counted(Progress):
    """Progress that counts by itself."""

    done = 0

    def count(self, value: Any) -> Any:
        self.done += 1
        self.update(self.done)
        return value


@contextlib.contextmanager
def _progress(what: str, total: int | None = None, *, active: bool = True) -> Iterator[_Counted]:
    progress = _Counted(what, total, active=active and jax.process_index() == 0)
    yield progress
    if progress.done and active:
        progress.close()


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """A file that has its name once it is whole; nowhere without a path, and on processes other than the first."""
    if path is None or jax.process_index() > 0:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere
        return
    with whole_file(path) as file:
        yield file


def _write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        with _output(path) as file:
            file.write(_json(figures) + "\n")


def _json(figures: dict[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in figures.items()}, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they become the strings that Python's `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def _say(*lines: str) -> None:
    if jax.process_index() == 0:
        print(*lines, sep="\n", flush=True)


def main() -> None:
    """The command."""
    kind: Any = Command  # a union: one subcommand each
    arguments, _ = command_line(kind, program="evaluate", description=__doc__)
    start_processes(arguments.distributed)
    prepare_process()
    commands: dict[type, Callable[[Any], dict[str, Any]]] = {
        Perplexity: evaluate_perplexity,
        OnTask: evaluate_task,
        Scoring: evaluate_score,
    }
    _say(_json(commands[type(arguments)](arguments)))


if __name__ == "__main__":
    run_command(main)
