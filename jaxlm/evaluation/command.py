"""The evaluations as one function of their arguments, the calls for programs in Python, and what the evaluations share.

`evaluation` runs a subcommand. A call in Python returns its metrics: messages go to the logger `jaxlm`, and with
several processes each must make the same calls. The evaluations share the run, the sizes, the output and the progress.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TextIO

import jax

from jaxlm.config import listed, of_call, to_json, with_fields
from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import RunError, names_arguments
from jaxlm.evaluation.arguments import EVALUATIONS, Ensemble, OnTask, Perplexity, Stores, ZeroShot, ZeroShotOptions
from jaxlm.files import atomic_output
from jaxlm.inference.loaded_run import LoadedRun, load_model
from jaxlm.inference.rows import default_batch_size
from jaxlm.progress import Progress
from jaxlm.ranges import checked
from jaxlm.training.config import check_sizes
from jaxlm.training.start import check_trained
from jaxlm.wording import finite

DEFAULT_BATCH_SIZE = 32
log = logging.getLogger("jaxlm")
# True in a call in Python, whose lines go to the logger, and which shows no progress.
_is_call: ContextVar[bool] = ContextVar("is_call", default=False)


def evaluation(arguments: Any) -> Any:
    """Return the values of the evaluation that the type of the arguments names. RunError if the memory is exhausted."""
    module, function = next(place for kind, *place in EVALUATIONS.values() if kind is type(arguments))
    try:
        return getattr(importlib.import_module(module), function)(arguments)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            "out of device memory: give a smaller --batch-size, a smaller --length, or a shorter memory "
            f"({str(error).splitlines()[0][:200]})"
        ) from error


def shows_progress() -> bool:
    """Return True on process 0 of a command."""
    return jax.process_index() == 0 and not _is_call.get()


def opened(arguments: Any, **options: Any) -> LoadedRun:
    """Return the run or the published weights of the arguments, on their mesh. options: of `load_model`."""
    return load_model(arguments.run, mesh=make_mesh(arguments.mesh), weights=arguments.weights, **options)


def length_for(arguments: Any, run: LoadedRun, default: int) -> int:
    """Return the length of the arguments, or the default. InputError unless the model has been trained on it."""
    length = default if arguments.length is None else arguments.length
    check_sizes(length, 1, run.model.config)
    check_trained("--length", length, run.trained_length, run.name, beyond=arguments.beyond_length)
    return int(length)


def batch_size_for(given: int | None, run: LoadedRun) -> int:
    """Return the given batch size, or the default of the run, rounded for its mesh."""
    if given is not None:
        check_batch(given, 1, run.mesh)
        return given
    config = run.config
    return default_batch_size(config.eval_batch_size or config.batch_size or DEFAULT_BATCH_SIZE, run.mesh)


class Counted(Progress):
    """Progress with a counter."""

    done = 0

    def count(self, value: Any) -> Any:
        """Count one item and return it."""
        self.done += 1
        self.update(self.done)
        return value


@contextlib.contextmanager
def progress_of(
    what: str, total: int | None = None, *, active: bool = True, compiles: bool = False
) -> Iterator[Counted]:
    """Show a progress line on process 0 while the block runs. compiles: see `Progress`."""
    progress = Counted(what, total, active=active and shows_progress(), compiles=compiles)
    yield progress
    if progress.done and active and not _is_call.get():
        progress.close()


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """Open `path` for an atomic write, or the null device without a path or on processes other than 0."""
    if path is None or jax.process_index() > 0:
        with open(os.devnull, "w", encoding="utf-8") as null:
            yield null
        return
    with atomic_output(path) as file:
        yield file


def values_json(values: dict[str, Any]) -> str:
    """Return metrics as one line of JSON, with NaN and infinities as strings."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on process 0, or log them in a call in Python. stream: default, standard output."""
    if jax.process_index() > 0:
        return
    if _is_call.get():
        for line in lines:
            log.info("%s", line)
    else:
        print(*lines, sep="\n", file=stream or sys.stdout, flush=True)


@names_arguments
def evaluate_perplexity(
    run: str | Path,
    *,
    store: str | Path | Sequence[str | Path] = (),
    input: str | Path | None = None,
    length: int | None = None,
    layout: Literal["windows", "packed", "streams"] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the perplexity of a language model on token stores or on a text file. The same as `evaluate perplexity`.

    Args:
      run: A run, RUN or RUN@STEP, or published weights: hf:DIR.
      store: Token stores, made with the run's tokenizer; they count as one text.
      input: A text file, instead of stores; it is one document.
      length: Tokens in a row. Default: the length of the run.
      layout: Layout of the text in rows. Default: the layout of the run.
      changes: Other options, by the names of their flags: `{"stride": 64, "batch_size": 8}`.

    Returns:
      `validation_loss` in nats per token, `perplexity`, `word_perplexity`, `bits_per_byte`, `accuracy`, `tokens` and
      the other metrics of the command.

    Example:
      >>> metrics = jaxlm.evaluate_perplexity("runs/gpt", store="stores/valid")
      >>> metrics["tokens"] > 0, metrics["perplexity"] > 1
      (True, True)
    """
    return _called(Perplexity, locals(), data=to_json(Stores()) | {"store": listed(store)})


@names_arguments
def evaluate_task(
    run: str | Path, *, input: str | Path, output: str | Path | None = None, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the metrics of a fine-tuned model on a labelled file of its task. The same as `evaluate task`.

    Args:
      run: A fine-tuned run, RUN or RUN@STEP, or published weights with a head: hf:DIR.
      input: A labelled file with the task's columns.
      output: A file for the predictions and labels of the rows.
      changes: Other options, by the names of their flags: `{"batch_size": 8}`.

    Returns:
      The metrics of the task, `loss`, the number of `examples`, and a `report` by label.

    Example:
      >>> metrics = jaxlm.evaluate_task("runs/tuned", input="rows.tsv")
      >>> metrics["examples"], 0 <= metrics["accuracy"] <= 1
      (12, True)
    """
    return _called(OnTask, locals())


@names_arguments
def evaluate_zero_shot(
    run: str | Path,
    *,
    task: str | Sequence[str],
    output: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the values of tasks without fine-tuning. The same as `evaluate zero-shot`.

    Args:
      run: A run, RUN or RUN@STEP, or published weights: hf:DIR.
      task: NAME:PATH, a task and its file or directory; or several.
      output: A file for the values, as JSON lines.
      changes: Other options, by the names of their flags: `{"sample": 100, "batch_size": 8}`.

    Returns:
      A dictionary per value: `task`, `protocol`, `metric`, `value`, `stderr`, `examples`, `scored` and others.

    Example:
      >>> with open("blimp.jsonl", "w") as file:
      ...     _ = file.write('{"sentence_good": "The cat sat.", "sentence_bad": "Cat the sat."}\\n')
      >>> values = jaxlm.evaluate_zero_shot("runs/gpt", task="blimp:blimp.jsonl")
      >>> values[0]["task"], values[0]["examples"]
      ('blimp', 1)
    """
    own = {field.name for field in dataclasses.fields(ZeroShotOptions)}  # whose flags have no prefix
    named = {name.replace("-", "_"): value for name, value in (changes or {}).items()}
    changes = {f"options.{name}" if name in own else name: value for name, value in named.items()}
    return _called(ZeroShot, locals())


@names_arguments
def evaluate_ensemble(
    runs: Sequence[str | Path],
    *,
    input: str | Path | None = None,
    output: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the metrics of the average of fine-tuned models of one task. The same as `evaluate ensemble`.

    Args:
      runs: Runs, RUN or RUN@STEP, at least two.
      input: A labelled file of the task. Default: the splits that the runs were evaluated on.
      output: A directory for predictions.jsonl and the other files of the task.
      changes: Other options, by the names of their flags.

    Returns:
      The metrics of each split, or of `input`, with the selecting metric of each run as `alone`.

    Example:
      >>> metrics = jaxlm.evaluate_ensemble(["runs/tuned", "runs/tuned"], input="rows.tsv")
      >>> metrics["input"]["accuracy"] == metrics["input"]["alone"][0]
      True
    """
    return _called(Ensemble, locals(), runs=listed(runs))


def _called(kind: type, given: Mapping[str, Any], **more: Any) -> Any:
    """Return the values of an evaluation for the arguments of a call, which has other options as `changes`.

    The lines of the evaluation go to the logger `jaxlm` instead of the standard streams.
    """
    arguments = of_call(kind, given, **more)
    if given["changes"]:
        arguments = checked(with_fields(arguments, given["changes"]))
    token = _is_call.set(True)
    try:
        return evaluation(arguments)
    finally:
        _is_call.reset(token)
