"""`evaluate task` and `evaluate ensemble`: metrics of a fine-tuned run, or of several as one, on labelled rows.

An ensemble is the average of the outputs of its runs on the same rows (Devlin et al. 2019, table 2). Probabilities are
averaged for classes, choices and tags, numbers for scores, and logits for spans, as windows are compared by logits.
Outputs for spans and tags are per token, so such runs must share the tokenizer and the length. The threshold of the
score for unanswerable questions is tuned for the ensemble on the dev split of the runs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.mesh import make_mesh, use_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import Ensemble, OnTask
from jaxlm.evaluation.opening import batch_size_for, opened
from jaxlm.evaluation.output import output_file, say
from jaxlm.finetuning.results import write_files
from jaxlm.inference.loaded_run import LoadedRun, load_model, split_run, task_data
from jaxlm.inference.prediction import Predictor, SplitPredictions
from jaxlm.interop.sources import KINDS
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import Encoded, Predicted, Split, Task, predictions, read_labelled
from jaxlm.tasks.metrics.classification import report_lines
from jaxlm.tasks.predicted import LineWriter, check_output, format_of_output, tokens_of, with_inputs
from jaxlm.wording import counted


@dataclass(frozen=True)
class MemberOutputs:
    """Outputs of one run: the encoded rows of each split, and its predictions."""

    run: str
    task: Task
    encoded: dict[str, Encoded]
    labelled: dict[str, SplitPredictions]
    reads: tuple[Any, ...]
    """Everything that the tokens of its rows depend on."""


def member_outputs(run: LoadedRun, parts: dict[str, Split], *, batch_size: int) -> MemberOutputs:
    """Predict every split with one run."""
    predictor = Predictor(run, "evaluate ensemble", batch_size=batch_size)
    encoded = {part: predictor.encode(split.examples, part=part) for part, split in parts.items()}
    labelled = {part: predictor.predict(rows) for part, rows in encoded.items()}
    reads = (run.tokenizer.fingerprint, predictor.limit, predictor.task.options)
    return MemberOutputs(run.name, predictor.task, encoded, labelled, reads)


def check_agreement(members: Sequence[MemberOutputs]) -> None:
    """Raise InputError for runs of other tasks and, for spans and tags, runs with other tokens."""
    first = members[0]

    def identity(task: Task) -> tuple[Any, ...]:
        return task.name, task.kind, task.labels, task.mean, task.deviation, task.no_answer

    for other in members[1:]:
        if identity(other.task) != identity(first.task):
            raise InputError(
                f"all runs must be of the same task, with the same labels, got {other.run} and {first.run}; leave "
                "one out"
            )
        if first.task.of_tokens and other.reads != first.reads:
            raise InputError(
                f"all runs of a {first.task.kind} task must have the same tokenizer, length and options, got "
                f"{other.run} and {first.run}; leave one out"
            )


def parts_of(runs: Sequence[RunDirectory]) -> dict[str, Split]:
    """Read again the splits that runs were evaluated on, from the files of the first run.

    Raises InputError if the files have changed, if a run was imported, or if it was trained on other rows, which may
    include the dev split of the other runs.
    """
    if imported := [run for run in runs if "published" in run.config]:
        raise InputError(f"{imported[0].name} was imported and has no splits of its own; name a file with --input")
    if others := [run for run in runs if "task" not in run.config]:
        raise InputError(f"{others[0].name} must be a fine-tuned run; name another run")
    _, data = task_data(runs[0])
    for run in runs:
        if run.config["fingerprints"].get("task_data") != data.fingerprint():
            raise InputError(
                f"{run.name} was not trained on the rows that the files of {runs[0].name} contain now; name a file "
                "with --input"
            )
    return {part: split for part, split in data.splits.items() if part != "train"}


def with_dev(parts: dict[str, Split], runs: Sequence[RunDirectory], task: Task) -> tuple[dict[str, Split], str]:
    """Return `parts` with the split for tuning a threshold, from the first run that still has it, or a reason."""
    why = "" if runs else "published weights have no splits"
    for run in runs:
        try:
            return parts | {task.selects: parts_of([run, *runs])[task.selects]}, ""
        except InputError as error:
            why = why or str(error).partition(";")[0]
    return parts, why


def together(task: Task, members: Sequence[MemberOutputs], part: str, threshold: float | None) -> Predicted:
    """Return the predictions and metrics of the averaged outputs of a split."""
    of_rows = zip(*(one.labelled[part].outputs for one in members), strict=True)
    outputs = [task.averaged(np.stack([np.asarray(row, np.float64) for row in of_runs])) for of_runs in of_rows]
    return predictions(task, members[0].encoded[part], outputs, threshold=threshold)


def shared_threshold(task: Task, members: Sequence[MemberOutputs], why_no_dev: str) -> float:
    """Return the threshold for unanswerable questions, independent of the order of the runs.

    It is tuned on the split that the runs' own thresholds were tuned on. Without that split it is their mean, as the
    offset of an averaged score is the mean of the runs' offsets.
    """
    if task.selects in members[0].encoded:
        return together(task, members, task.selects, None).metrics["threshold"]
    own = sorted((one.run, one.task.threshold or 0.0) for one in members)
    mean = sum(threshold for _, threshold in own) / len(own)
    listed = ", ".join(f"{threshold:.4f} of {run}" for run, threshold in own)
    say(f"threshold {mean:.4f}, the mean of the runs' own ({listed}), not tuned for the ensemble: {why_no_dev}")
    return mean


def metrics_alone(one: MemberOutputs, part: str) -> dict[str, float]:
    """Return the metrics of a single run, with its threshold tuned on the selection split, else its saved one."""
    own = one.task.threshold or 0.0 if one.task.no_answer and part != one.task.selects else None
    return one.labelled[part].predicted(one.task, one.encoded[part], own)[0].metrics


def averaged_task(run: LoadedRun) -> Task:
    """Return the task of a run. InputError for a run without one, and for a task whose predictions are texts."""
    task, _, _ = run.finetuned_parts("evaluate ensemble")
    if task.generates:
        raise InputError(
            f"an ensemble must have outputs that can be averaged, got {run.name} of a {task.kind} task; evaluate the "
            "runs alone with evaluate task"
        )
    return task


def evaluate_ensemble(arguments: Ensemble) -> dict[str, Any]:
    """Return the metrics of the averaged outputs and of each run."""
    if arguments.with_inputs and arguments.output is None:
        raise InputError("with_inputs must be left out without output, got it alone; give a directory for the files")
    if len(arguments.runs) < 2:
        raise InputError(
            f"an ensemble must have at least two runs, got {' '.join(arguments.runs) or 'none'}; name more"
        )
    mesh = make_mesh(arguments.mesh)
    published = [name for name in arguments.runs if name.startswith(KINDS)]
    if published and arguments.input is None:
        raise InputError(
            f"input must be given with {published[0]}, which has no splits of its own; name a labelled file"
        )
    first = load_model(arguments.runs[0], mesh=mesh)
    task = averaged_task(first)
    directories = [RunDirectory(split_run(name)[0]) for name in arguments.runs if name not in published]
    why_no_dev = ""
    if arguments.input is None:
        parts = tuned_on = parts_of(directories)
    else:
        parts = tuned_on = {"": read_labelled(arguments.input, task, errors=arguments.errors)}
        if task.no_answer:
            tuned_on, why_no_dev = with_dev(parts, directories, task)
    members = []
    with use_mesh(mesh):
        for number, name in enumerate(
            arguments.runs
        ):  # one at a time: their parameters need not fit in memory together
            run = first if number == 0 else load_model(name, mesh=mesh)
            members.append(member_outputs(run, tuned_on, batch_size=batch_size_for(arguments.batch_size, run)))
    check_agreement(members)
    said: dict[str, Any] = {"runs": [one.run for one in members], "task": task.name, "metric": task.metric}
    threshold = shared_threshold(task, members, why_no_dev) if task.no_answer else None
    lines = []
    for part in sorted(parts, key=lambda part: part != task.selects):
        predicted = together(task, members, part, threshold)
        alone = [metrics_alone(one, part) for one in members]
        if predicted.metrics:
            metric = task.metric if task.metric in predicted.metrics else task.metrics[0]  # there is no loss
            said[part or "input"] = predicted.metrics | {"alone": [metrics[metric] for metrics in alone]}
            say(
                f"{part or arguments.input}: {metric} {predicted.metrics[metric]:.4f} of the ensemble; alone "
                + ", ".join(f"{metrics[metric]:.4f}" for metrics in alone)
            )
        for index, (prediction, scores) in enumerate(predicted.lines):
            line = {"split": part, "index": index, "prediction": prediction, "scores": scores}
            example = parts[part].examples[index]
            lines.append(with_inputs(line, task, example) if arguments.with_inputs else line)
        if arguments.output is not None and jax.process_index() == 0:
            write_files(arguments.output, predicted)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with output_file(arguments.output / "predictions.jsonl") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return said


def evaluate_task(arguments: OnTask) -> dict[str, Any]:
    """Return the task's metrics on another labelled file."""
    form = format_of_output(arguments.output)
    run = opened(arguments, custom=arguments.custom)
    predictor = Predictor(run, "evaluate task", batch_size=batch_size_for(arguments.batch_size, run))
    task = predictor.task
    check_output(task, form)
    split = read_labelled(arguments.input, task, errors=arguments.errors)
    if not split.labelled:
        raise InputError(f"--input must have labels, got {arguments.input}; use python -m jaxlm.predict for new rows")
    encoded = predictor.encode(split.examples)
    with use_mesh(run.mesh):
        labelled = predictor.predict(encoded)
    threshold = task.threshold or 0.0 if task.no_answer else None  # tuned when the run was trained, never here
    predicted, metrics = labelled.predicted(task, encoded, threshold)
    if arguments.output is not None:
        lines = [
            {"index": index, "prediction": prediction, "label": example.gold, "scores": scores} | tokens_of(example)
            for index, ((prediction, scores), example) in enumerate(zip(predicted.lines, split.examples, strict=True))
        ]
        with output_file(arguments.output) as file:
            LineWriter(file, form).write(lines)
    report = predicted.report()
    counts = {"examples": encoded.num_examples, "truncated": encoded.truncated, "dropped": len(split.dropped)}
    say(
        f"{run.name} on {arguments.input}: {task.name}, {counted(encoded.num_examples, 'example')} of "
        f"{counted(split.rows_read, 'row')} read, {len(split.dropped)} dropped, {encoded.truncated} truncated to "
        f"{task.limits(predictor.limit)}",
        *(f"  {name:<18}{value:.4f}" for name, value in metrics.items()),
        *([] if task.positive is None else [f"  f1 is of the label {task.positive!r}"]),
        *(f"  {line}" for line in report_lines(report)),
    )
    found = {"run": run.name, "input": str(arguments.input), "task": task.name, "metric": task.metric}
    positive = {} if task.positive is None else {"positive": task.positive}
    return found | positive | metrics | counts | {"report": report}
