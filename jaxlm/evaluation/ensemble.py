"""Several fine-tuned runs as one: their outputs on the same rows, averaged (Devlin et al. 2019, table 2's ensembles).

Probabilities are averaged for classes, choices and tags, numbers for scores, and logits for spans, whose windows are
compared by them. Spans and tags belong to tokens, so such runs must have read the same ones. The score that an answer
needs above that of none is the ensemble's own, tuned on the runs' dev split; elsewhere each run alone has its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from jaxlm.config import from_json
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.distributed.processes import DistributedConfig
from jaxlm.errors import InputError
from jaxlm.evaluation.command import batch_size_for, output_file, say
from jaxlm.finetuning.trial import write_files
from jaxlm.inference.loaded_run import LoadedRun, load_run, split_run
from jaxlm.inference.prediction import SplitPredictions, make_predict_step, predict_split
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import (
    CustomConfig,
    Encoded,
    Predicted,
    Split,
    Task,
    TaskOptions,
    encode_examples,
    predictions,
    read_labelled,
    read_task,
)
from jaxlm.tasks.batching.batches import standard_lengths
from jaxlm.tasks.reading.files import Errors
from jaxlm.training.compiled import CompiledStep


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


@dataclass(frozen=True)
class Opinion:
    """What one run says of each part: the rows as it read them, and its outputs."""

    run: str
    task: Task
    encoded: dict[str, Encoded]
    labelled: dict[str, SplitPredictions]
    reads: tuple[Any, ...]
    """What its rows depend on, where they are windows or pieces."""


def opinion(run: LoadedRun, parts: dict[str, Split], *, mesh: Mesh, batch_size: int) -> Opinion:
    """Label every part with one run."""
    task, config, network = run.tuned("evaluate ensemble")
    limit = config.length or run.model.max_length
    lengths = standard_lengths(limit)
    step = CompiledStep("evaluation", jax.jit(make_predict_step(network)), expected_shapes=len(lengths))
    encoded = {
        part: encode_examples(task, split.examples, run.tokenizer, limit, run.model.family.input_format, part=part)
        for part, split in parts.items()
    }
    labelled = {
        part: predict_split(step, run.params, rows, mesh, batch_size=batch_size, lengths=lengths)
        for part, rows in encoded.items()
    }
    return Opinion(run.name, task, encoded, labelled, (run.tokenizer.fingerprint, limit, task.options))


def check_agreement(opinions: Sequence[Opinion]) -> None:
    """Refuse runs of other tasks, and of spans or tags those that read other tokens."""
    first = opinions[0]
    what = lambda task: (task.name, task.kind, task.labels, task.mean, task.deviation, task.no_answer)  # noqa: E731
    for other in opinions[1:]:
        if what(other.task) != what(first.task):
            raise InputError(
                f"{other.run} is not of the same task and labels as {first.run}: an ensemble is of one task"
            )
        if first.task.kind in ("span", "tagging") and other.reads != first.reads:
            raise InputError(
                f"{other.run} reads with another tokenizer, length or options than {first.run}: outputs of a "
                f"{first.task.kind} task are averaged token by token, so these must be the same"
            )


def averaged(kind: str, outputs: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """The outputs of all runs as those of one: for each row the mean, or the logarithm of the mean probabilities."""
    rows = [np.stack([np.asarray(row, np.float64) for row in of_runs]) for of_runs in zip(*outputs, strict=True)]
    if kind in ("regression", "span"):
        return [row.mean(axis=0) for row in rows]
    return [np.log(np.maximum(_softmax(row).mean(axis=0), 1e-300)) for row in rows]


def parts_of(runs: Sequence[RunDirectory]) -> dict[str, Split]:
    """The parts that runs were evaluated on, read again from the files of the first.

    InputError where these have changed, where a run was trained on other rows (the others' dev may be among them) or
    imported.
    """
    if imported := [run for run in runs if "published" in run.config]:
        raise InputError(f"{imported[0].name} was imported and has no rows of its own; name a file with --input")
    if others := [run for run in runs if "task" not in run.config]:
        raise InputError(f"{others[0].name} must be a fine-tuned run; name another run")
    saved = runs[0].config
    _, data = read_task(
        saved["task"],
        saved["task_dir"],
        None if saved["custom"] is None else from_json(CustomConfig, saved["custom"], "custom"),
        seed=saved["held_out_seed"],
        options=from_json(TaskOptions, saved["options"], "options"),
    )
    for run in runs:
        if run.config["fingerprints"].get("task_data") != data.fingerprint():
            raise InputError(
                f"{run.name} was not trained on the rows that the files of {runs[0].name} hold now; name a file to "
                "label with --input"
            )
    return {part: split for part, split in data.splits.items() if part != "train"}


def with_dev(parts: dict[str, Split], runs: Sequence[RunDirectory], task: Task) -> tuple[dict[str, Split], str]:
    """`parts` and the part that a threshold is tuned on, from the first run whose files still hold it; or why none."""
    why = ""
    for run in runs:
        try:
            return parts | {task.selects: parts_of([run, *runs])[task.selects]}, ""
        except InputError as error:
            why = why or str(error).partition(";")[0]
    return parts, why


def together(task: Task, opinions: Sequence[Opinion], part: str, threshold: float | None) -> Predicted:
    """Return the predictions and metrics of the averaged outputs of a split."""
    outputs = averaged(task.kind, [one.labelled[part].outputs for one in opinions])
    return predictions(task, opinions[0].encoded[part], outputs, threshold=threshold)


def shared_threshold(task: Task, opinions: Sequence[Opinion], why_no_dev: str) -> float:
    """The score that an answer of the ensemble needs above that of none, whatever the order of the runs.

    It is tuned on the part that the runs' own were tuned on; where that is not at hand it is their mean, as an averaged
    score is offset by the mean of the runs' offsets.
    """
    if task.selects in opinions[0].encoded:
        return together(task, opinions, task.selects, None).metrics["threshold"]
    own = sorted((one.run, one.task.threshold or 0.0) for one in opinions)
    mean = sum(threshold for _, threshold in own) / len(own)
    listed = ", ".join(f"{threshold:.4f} of {run}" for run, threshold in own)
    say(f"threshold {mean:.4f}, the mean of the runs' own ({listed}), not tuned for the ensemble: {why_no_dev}")
    return mean


def figures_alone(one: Opinion, part: str) -> dict[str, float]:
    """A single run's figures: on the part that selects its threshold is tuned there, elsewhere it is its own."""
    own = one.task.threshold or 0.0 if one.task.no_answer and part != one.task.selects else None
    return one.labelled[part].predicted(one.task, one.encoded[part], own)[0].metrics


def _softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def evaluate_ensemble(arguments: Ensemble) -> dict[str, Any]:
    """Figures of the averaged outputs, beside those of each run."""
    if len(arguments.runs) < 2:
        raise InputError(f"{' '.join(arguments.runs) or 'no runs'}: an ensemble has two runs or more")
    mesh = make_mesh(arguments.mesh)
    first = load_run(arguments.runs[0], mesh=mesh)
    task, _, _ = first.tuned("evaluate ensemble")
    directories, why_no_dev = [RunDirectory(split_run(name)[0]) for name in arguments.runs], ""
    if arguments.input is None:
        parts = tuned_on = parts_of(directories)
    else:
        parts = tuned_on = {"": read_labelled(arguments.input, task, errors=arguments.errors)}
        if task.no_answer:
            tuned_on, why_no_dev = with_dev(parts, directories, task)
    opinions = []
    with use_mesh(mesh):
        for number, name in enumerate(arguments.runs):  # one after the other: their parameters need not fit together
            run = first if number == 0 else load_run(name, mesh=mesh)
            opinions.append(opinion(run, tuned_on, mesh=mesh, batch_size=batch_size_for(arguments, run, mesh)))
    check_agreement(opinions)
    said: dict[str, Any] = {"runs": [one.run for one in opinions], "task": task.name, "metric": task.metric}
    threshold = shared_threshold(task, opinions, why_no_dev) if task.no_answer else None
    lines = []
    for part in sorted(parts, key=lambda part: part != task.selects):
        predicted = together(task, opinions, part, threshold)
        alone = [figures_alone(one, part) for one in opinions]
        if predicted.metrics:
            said[part or "input"] = predicted.metrics | {"alone": [figures[task.metric] for figures in alone]}
            say(
                f"{part or arguments.input}: {task.metric} {predicted.metrics[task.metric]:.4f} of the ensemble; alone "
                + ", ".join(f"{figures[task.metric]:.4f}" for figures in alone)
            )
        for index, (prediction, scores) in enumerate(predicted.lines):
            lines.append({"split": part, "index": index, "prediction": prediction, "scores": scores})
        if arguments.output is not None and jax.process_index() == 0:
            write_files(arguments.output, predicted)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with output_file(arguments.output / "predictions.jsonl") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return said
