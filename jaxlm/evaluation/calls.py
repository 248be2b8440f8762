"""The evaluations as one function of their arguments, and the calls for programs in Python.

`evaluation` runs a subcommand. A call in Python returns its metrics: messages go to the logger `jaxlm`, and with
several processes each must make the same calls.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxlm.config import listed, of_call, to_json, with_fields
from jaxlm.errors import RunError, names_arguments
from jaxlm.evaluation.arguments import EVALUATIONS, Ensemble, OnTask, Perplexity, Stores, ZeroShot, ZeroShotOptions
from jaxlm.evaluation.output import as_call
from jaxlm.ranges import checked


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
    """Return the values of an evaluation for the arguments of a call, which has other options as `changes`."""
    arguments = of_call(kind, given, **more)
    if given["changes"]:
        arguments = checked(with_fields(arguments, given["changes"]))
    with as_call():
        return evaluation(arguments)
