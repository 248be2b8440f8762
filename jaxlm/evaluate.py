"""Evaluate a run: `python -m jaxlm.evaluate perplexity|task|score|features|ensemble|activations …`.

perplexity: how well a text that was prepared as a token store is predicted. task: how well a fine-tuned run labels
another labelled file. score: the log-probability of each sentence of a file, or of each choice of its rows; of an
encoder the pseudo-log-likelihood, or the best fillings of [MASK]. features: what an encoder's layers give for each
token. ensemble: several fine-tuned runs as one. activations: all layers and logits for some ids. A summary goes to
standard output; its last line is one JSON object with the figures (nan and infinities as strings).
"""

import collections
import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import numpy as np
import tyro

from jaxlm.activations import activations, read_ids
from jaxlm.cloze import Answered, answers, check_cloze, fillings_text, named_fillings, text_cloze
from jaxlm.config import command_line
from jaxlm.data.loader import validation_batches
from jaxlm.data.store import Store, open_store
from jaxlm.decoding import left_context
from jaxlm.devices import prepare_process
from jaxlm.ensembles import averaged, check_agreement, opinion, parts_of
from jaxlm.errors import InputError, run_command
from jaxlm.features import token_features
from jaxlm.interop.sources import KINDS, read_published
from jaxlm.logs import Progress
from jaxlm.models.bert import Bert
from jaxlm.objectives import language_model
from jaxlm.output import whole_file
from jaxlm.scored_rows import RowsToScore, ScoredRow, Tally, check_rows, row_result, row_text, rows_to_score
from jaxlm.scoring import Scored, perplexity, sequence_log_probs, text_sequence
from jaxlm.sharding import MeshConfig, check_batch, host_rows, make_mesh, to_devices, use_mesh
from jaxlm.tasks import SpanExample, TaggedSentence, encode_examples, predictions, read_labelled
from jaxlm.tasks.files import Errors, numbered_lines, open_input
from jaxlm.tasks.loading import standard_lengths
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import check_sizes
from jaxlm.training.labelling import default_batch_size, label_split, make_label_step
from jaxlm.training.loaded import LoadedRun, load_run, split_run
from jaxlm.training.members import write_files
from jaxlm.training.processes import DistributedConfig, start_processes
from jaxlm.training.run import RunDirectory
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
class Scoring(Evaluation, RowsToScore):
    """The log-probability of each sentence or choice of a file, in nats, from the language model alone.

    An encoder gives pseudo-log-likelihoods, each token being masked in turn; a sentence with [MASK] gets fillings.
    """

    top: int = 5
    """Fillings of each [MASK]."""


@dataclass(frozen=True, kw_only=True)
class FeaturesOf(Evaluation):
    """What chosen layers of an encoder give for each token, as JSON lines like google-research/bert's."""

    input: str
    """A text file with a sentence, or two parted by ` ||| `, a line; - is standard input."""
    layers: tuple[int, ...] = (-1, -2, -3, -4)
    """Which: -1 is the last, 0 are the embeddings."""
    length: int | None = None
    """Longest sequence; longer ones are cut and counted. The model's position table unless given."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: stop and name them, or put U+FFFD in their place."""


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Fine-tuned runs of one task as one, by averaged probabilities (numbers for scores, logits for spans)."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Runs, RUN or RUN@STEP."""
    input: Path | None = None
    """A labelled file of the task; unless given the parts that the runs themselves were evaluated on."""
    batch_size: int | None = None
    """Sequences that run together; it does not change the figures."""
    output: Path | None = None
    """A directory for predictions.jsonl and what else the task writes."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8 in --input: stop and name them, or put U+FFFD in their place."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a model gives for rows of ids, layer by layer, in float32, for another program to compare."""

    start: str
    """A run, RUN or RUN@STEP, or published weights, hf:PATH, openai:PATH, google:PATH."""
    ids: Path
    """A JSON file, {"ids": [[…], …], "segments": [[…], …]}; segments are for an encoder, and may be left out."""
    output: Path
    """An .npz file: hidden_0 … hidden_N, pooled, logits."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


Command = (
    Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
    | Annotated[OnTask, tyro.conf.subcommand("task")]
    | Annotated[Scoring, tyro.conf.subcommand("score")]
    | Annotated[FeaturesOf, tyro.conf.subcommand("features")]
    | Annotated[Ensemble, tyro.conf.subcommand("ensemble")]
    | Annotated[Activations, tyro.conf.subcommand("activations")]
)


def evaluate_perplexity(arguments: Perplexity) -> dict[str, Any]:
    """Perplexity and its kin over whole stores."""
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    remedy = "score sentences with python -m jaxlm.evaluate score, or read the validation figures in its metrics.jsonl"
    model = run.decoder("evaluate perplexity", remedy)
    stores = tuple(open_store(Path(path)) for path in arguments.data.store)
    for store in stores:
        check_store(store, run)
    length = arguments.length or run.config.length or run.model.config.num_positions
    check_sizes(length, 1, run.model.config)
    batch_size = _batch_size(arguments, run, mesh)
    objective = language_model(model, loss_chunks=0)
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
    task, config, network = run.tuned("evaluate task")
    split = read_labelled(arguments.input, task, errors=arguments.errors)
    if not split.labelled:
        raise InputError(f"{arguments.input} has no labels: python -m jaxlm.predict labels new rows")
    limit = config.length or config.model.num_positions
    encoded = encode_examples(task, split.examples, run.tokenizer, limit, config.model.kind)
    lengths = standard_lengths(limit)
    step = CompiledStep("evaluation", jax.jit(make_label_step(network)), expected_shapes=len(lengths))
    with use_mesh(mesh):
        batch_size = _batch_size(arguments, run, mesh)
        labelled = label_split(step, run.params, encoded, mesh, batch_size=batch_size, lengths=lengths)
    threshold = task.threshold or 0.0 if task.no_answer else None  # tuned when the run was trained, never here
    predicted, figures = labelled.predicted(task, encoded, threshold)
    if arguments.output is not None:
        with _output(arguments.output) as file:
            for index, ((prediction, scores), example) in enumerate(zip(predicted.lines, split.examples, strict=True)):
                line = {"index": index, "prediction": prediction, "label": label_of(example), "scores": scores}
                file.write(json.dumps(line) + "\n")
    counts = {"examples": encoded.num_examples, "truncated": encoded.truncated, "dropped": len(split.dropped)}
    _say(
        f"{run.name} on {arguments.input}: {task.name}, {encoded.num_examples:,} examples of {split.rows_read:,} rows "
        f"read, {len(split.dropped)} dropped, {encoded.truncated} cut to {limit} tokens",
        *(f"  {name:<14}{value:.4f}" for name, value in figures.items()),
    )
    found = {"run": run.name, "input": str(arguments.input), "task": task.name, "metric": task.metric}
    return found | figures | counts


def label_of(example: Any) -> Any:
    """What an example's file says is right: a label or score, the texts of the answers, the tags."""
    if isinstance(example, SpanExample):
        return [text for text, _ in example.answers or ()]
    return list(example.tags or ()) if isinstance(example, TaggedSentence) else example.label


def evaluate_score(arguments: Scoring) -> dict[str, Any]:
    """Log-probabilities of sentences or choices, row by row."""
    check_rows(arguments)
    if arguments.top < 1:
        raise InputError(f"--top {arguments.top}: a number above 0")
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    batch_size = _batch_size(arguments, run, mesh)
    encode, answer, given = _scorer(run, mesh, batch_size, arguments.top)
    pending: collections.deque[ScoredRow] = collections.deque()

    def sequences() -> Iterator[Any]:
        for row in rows_to_score(arguments, encode):
            pending.append(row)
            yield from row.sequences

    answered = answer(sequences())
    tally = Tally()
    total, tokens, index = 0.0, 0, 0
    several = len(arguments.fields) > 1 or arguments.choice_list is not None
    with _output(arguments.output) as file, _progress("rows", active=arguments.output is not None) as progress:
        for first in answered:
            row = pending.popleft()
            found = [first, *(next(answered) for _ in row.sequences[1:])]
            scores = [one.score for one in found]
            total += sum(score.log_probability for score in scores)
            tokens += sum(score.tokens for score in scores)
            if first.fillings and not several:
                line: dict[str, Any] = {"index": index, "fillings": named_fillings(run.tokenizer, first.fillings)}
                text = fillings_text(row.texts[0], line["fillings"])
            else:
                line = row_result(index, row, scores, arguments.by, several)
                text = row_text(line, row, scores, several)
            if row.label is not None:
                tally.add(row, scores)
            if arguments.output is not None:
                file.write(json.dumps({k: _finite(v) for k, v in line.items()}, ensure_ascii=False) + "\n")
            else:
                _say(text)
            index += 1
            progress.count(None)
    mean = total / tokens if tokens else math.nan
    what = "rows of choices" if several else "sentences"
    given = "their context" if arguments.context and not isinstance(run.model, Bert) else given
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


def _scorer(run: LoadedRun, mesh: jax.sharding.Mesh, batch_size: int, top: int) -> tuple[Any, Any, str]:
    """How a text becomes what is scored, how many of these are answered in order, and what each token is given."""
    if isinstance(run.model, Bert):
        model = check_cloze(run.model, run.params, run.tokenizer, run.name)
        return (
            lambda text, context, separator: text_cloze(run.tokenizer, text, context=context, separator=separator),
            lambda clozes: answers(model, run.params, clozes, run.tokenizer, mesh=mesh, batch_size=batch_size, top=top),
            "all others of their sentence",
        )
    left = left_context(run.tokenizer, finetuned=run.task is not None)
    decoder = run.model

    def answer(sequences: Iterator[Scored]) -> Iterator[Answered]:
        for score in sequence_log_probs(decoder, run.params, sequences, mesh=mesh, batch_size=batch_size):
            yield Answered(score, [])

    return (
        lambda text, context, separator: text_sequence(
            run.tokenizer, text, left=left, context=context, separator=separator
        ),
        answer,
        run.tokenizer.pieces(left)[0] if left else "their first token",
    )


def evaluate_features(arguments: FeaturesOf) -> dict[str, Any]:
    """The states of chosen layers, a line of JSON a sentence."""
    if arguments.output is None:
        raise InputError("--output is not given: features are many numbers; name a file for them")
    mesh = make_mesh(arguments.mesh)
    run = load_run(arguments.run, mesh=mesh)
    if not isinstance(run.model, Bert):
        raise InputError(f"{run.path} is a decoder (gpt): evaluate features needs an encoder (bert)")
    length = arguments.length or run.model.config.num_positions
    check_sizes(length, 1, run.model.config)
    batch_size = _batch_size(arguments, run, mesh)
    name = "standard input" if arguments.input == "-" else arguments.input
    count = tokens = cut = 0
    with open_input(arguments.input) as stream, _output(arguments.output) as file, _progress("rows") as progress:
        texts = (text for _, text in numbered_lines(stream, name, arguments.errors))
        for found in token_features(
            run.model,
            run.params,
            run.tokenizer,
            texts,
            arguments.layers,
            mesh=mesh,
            batch_size=batch_size,
            length=length,
        ):
            file.write(json.dumps(found.to_json(count, arguments.layers), ensure_ascii=False) + "\n")
            count, tokens, cut = count + 1, tokens + len(found.pieces), cut + found.cut
            progress.count(None)
    _say(f"{run.name} on {name}: {count:,} lines, {tokens:,} tokens, {cut} lines cut to {length} tokens")
    figures = {"lines": count, "tokens": tokens, "truncated": cut, "layers": list(arguments.layers)}
    return {"run": run.name, "input": arguments.input, "output": str(arguments.output)} | figures


def evaluate_ensemble(arguments: Ensemble) -> dict[str, Any]:
    """Figures of the averaged outputs, beside those of each run."""
    if len(arguments.runs) < 2:
        raise InputError(f"{' '.join(arguments.runs) or 'no runs'}: an ensemble has two runs or more")
    mesh = make_mesh(arguments.mesh)
    first = load_run(arguments.runs[0], mesh=mesh)
    task, _, _ = first.tuned("evaluate ensemble")
    if arguments.input is not None:
        parts = {"": read_labelled(arguments.input, task, errors=arguments.errors)}
    else:
        parts = parts_of([RunDirectory(split_run(name)[0]) for name in arguments.runs])
    opinions = []
    with use_mesh(mesh):
        for number, name in enumerate(arguments.runs):  # one after the other: their parameters need not fit together
            run = first if number == 0 else load_run(name, mesh=mesh)
            opinions.append(opinion(run, parts, mesh=mesh, batch_size=_batch_size(arguments, run, mesh)))
    check_agreement(opinions)
    said: dict[str, Any] = {"runs": [one.run for one in opinions], "task": task.name, "metric": task.metric}
    threshold, lines = (task.threshold or 0.0) if arguments.input is not None and task.no_answer else None, []
    for part in sorted(parts, key=lambda part: part != task.selects):
        rows = opinions[0].encoded[part]
        outputs = averaged(task.kind, [one.labelled[part].outputs for one in opinions])
        predicted = predictions(task, rows, outputs, threshold=threshold)
        threshold = predicted.figures.get("threshold", threshold)
        alone = [one.labelled[part].predicted(task, one.encoded[part])[0].figures for one in opinions]
        if predicted.figures:
            said[part or "input"] = predicted.figures | {"alone": [figures[task.metric] for figures in alone]}
            _say(
                f"{part or arguments.input}: {task.metric} {predicted.figures[task.metric]:.4f} of the ensemble; alone "
                + ", ".join(f"{figures[task.metric]:.4f}" for figures in alone)
            )
        for index, (prediction, scores) in enumerate(predicted.lines):
            lines.append({"split": part, "index": index, "prediction": prediction, "scores": scores})
        if arguments.output is not None and jax.process_index() == 0:
            write_files(arguments.output, predicted)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with _output(arguments.output / "predictions.jsonl") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return said


def _batch_size(arguments: Any, run: LoadedRun, mesh: jax.sharding.Mesh) -> int:
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


def evaluate_activations(arguments: Activations) -> dict[str, Any]:
    """Every layer's states and the logits, in one .npz."""
    if arguments.start.startswith(KINDS):
        published = read_published(arguments.start)
        name, model, params, task = published.name, published.model, published.params, published.task
    else:
        run = load_run(arguments.start)
        name, model, params, task = run.name, run.model.config, run.params, run.task
    found = activations(model, params, None if task is None else task.kind, read_ids(arguments.ids, model))
    with whole_file(arguments.output, "wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]  # its stub has flags among the names
    return {"start": name, "output": str(arguments.output), "arrays": {key: list(x.shape) for key, x in found.items()}}


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
        FeaturesOf: evaluate_features,
        Ensemble: evaluate_ensemble,
        Activations: evaluate_activations,
    }
    _say(_json(commands[type(arguments)](arguments)))


if __name__ == "__main__":
    run_command(main)
