"""Results of the trials of a fine-tuning run, and of the run: results.json, predictions.jsonl, and a table.

A trial has a directory `members/seed-S-rate-R` of its own. After training, `kept/` holds the selected parameters, next
to `result.json` and `predictions.jsonl`. The parameters are below the run's root; the two files, which process 0
writes, are below its path.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError, RunError
from jaxlm.files import read_own, read_regular, write_file, write_json
from jaxlm.finetuning.trial import UNLABELLED, Programs, Progress, Trial, TrialContext, evaluate_split, trial_of
from jaxlm.runs.checkpoints import Checkpoints, DamagedCheckpoint
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.trees import leaf_checksums
from jaxlm.tasks import Predicted, Task, TaskData
from jaxlm.tasks.metrics.classification import report_lines
from jaxlm.tasks.predicted import with_inputs

log = logging.getLogger(__name__)

_OF_ROW = ("split", "index", "seed", "learning_rate")  # the fields of a prediction before those of its row


def trial_result(run: RunDirectory, trial: Trial) -> dict[str, Any] | None:
    """Return the contents of a trial's `result.json`, on every process, or None before the trial is done."""
    file = run.path / trial.directory / "result.json"
    return first_process_decides(lambda: read_own(file, "remove it, and it is written again")) or None


def finish_trial(
    context: TrialContext, programs: Programs, trial: Trial, progress: Progress, params: Any
) -> dict[str, Any]:
    """Save the selected parameters and predict every split with them; return the contents of `result.json`."""
    directory = trial.directory / "kept"
    assert progress.step is not None
    if not _is_kept(context, progress.step, params, directory):
        first_process_decides(lambda: context.run.remove(directory))
        with Checkpoints(context.run.root / directory, keep_newest=1) as kept:
            extra = {"dev": progress.metrics, "step": progress.step}
            kept.save(progress.step, {"params": params}, config=context.resolved | {"seed": trial.seed}, extra=extra)
    return write_result(context, programs, trial, progress, params)


def _is_kept(context: TrialContext, step: int, params: Any, directory: PurePath) -> bool:
    """Return True if exactly these parameters are saved already, by a start that was stopped afterwards."""
    kept = Checkpoints(context.run.root / directory, read_only=True)
    if kept.agreed_steps() != [step]:
        return False
    try:
        return kept.metadata().checksums == leaf_checksums({"params": params})
    except DamagedCheckpoint:  # the parameters are still on the devices and are saved again
        return False


def write_result(
    context: TrialContext, programs: Programs, trial: Trial, progress: Progress, params: Any
) -> dict[str, Any]:
    """Predict every split with the selected parameters and write the results; return the contents of `result.json`.

    The selection split comes first: the threshold for unanswerable questions is tuned on it and then used for the
    others.
    """
    selection_split, sizes = context.task.selects, context.batches(trial.seed).sizes
    splits = [split for split in context.encoded if split not in ("train", UNLABELLED)]
    found: dict[str, tuple[Predicted, dict[str, float]]] = {}
    threshold = None
    for split in sorted(splits, key=lambda split: split != selection_split):
        found[split] = evaluate_split(context, programs, params, context.encoded[split], sizes, threshold)
        threshold = found[selection_split][1].get("threshold")
    scope = {"seed": trial.seed, "learning_rate": trial.rate}
    result: dict[str, Any] = scope | {"step": progress.step}
    if context.config.patience is not None:
        result["stopped_at"] = progress.patience.stopped_at
    result |= {split: found[split][1] for split in splits if found[split][1]}
    reports = [{"split": split} | found[split][0].report() for split in splits if found[split][1]]
    lines: list[str] = []
    for split in splits:
        for index, (prediction, scores) in enumerate(found[split][0].lines):
            line = {"split": split, "index": index} | scope
            lines.append(json.dumps(line | {"prediction": prediction, "scores": scores}, ensure_ascii=False))
    text = "".join(line + "\n" for line in lines)
    result["reports"] = reports
    result["predictions_sha256"] = hashlib.sha256(text.encode()).hexdigest()

    def write() -> None:
        directory = context.run.path / trial.directory
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / "predictions.jsonl", text)
        for split in splits:
            write_files(directory / "files", found[split][0])
        write_json(directory / "result.json", result, signed=True)
        context.run.upload()

    first_process_decides(write)
    return result


def read_predictions(run: RunDirectory, result: dict[str, Any]) -> bytes:
    """Return the predictions that a trial wrote with its result. InputError if they are damaged."""
    directory = run.path / trial_of(result).directory
    file, remedy = directory / "predictions.jsonl", f"remove {directory / 'result.json'}, and both are written again"
    try:
        content = read_regular(file, largest=1 << 40)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    if result.get("predictions_sha256", (found := hashlib.sha256(content).hexdigest())) != found:
        raise InputError(f"{file} was altered: its hash is not the one in result.json; {remedy}")
    return content


def write_failure(context: TrialContext, trial: Trial, reason: str) -> dict[str, Any]:
    """Write the failure of a trial that cannot be trained to its end; return the contents of its `result.json`."""
    result = {"seed": trial.seed, "learning_rate": trial.rate, "failed": reason}

    def write() -> None:
        directory = context.run.path / trial.directory
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "result.json", result)
        context.run.upload()

    first_process_decides(write)
    log.warning("%s failed: %s; the other runs continue", trial, reason)
    return result


def delete_inferior_checkpoints(context: TrialContext, results: Sequence[dict[str, Any]]) -> None:
    """Remove the parameters of trials that another seed at their learning rate has beaten."""
    if context.keep == "all":
        return

    def drop() -> None:
        for runs in _by_rate(results).values():
            best = max(runs, key=functools.partial(_rank, context.task))
            for result in (run for run in runs if run is not best):
                context.run.remove(trial_of(result).directory / "kept")

    first_process_decides(drop)


def write_files(directory: Path, predicted: Predicted) -> None:
    """Write the files for other programs (a submission server, SQuAD's script) below `directory`."""
    for name, content in predicted.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=4, ensure_ascii=False) + "\n"
        write_file(path, text)


def summarize(task: Task, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the contents of results.json, with metrics over the seeds of the best learning rate.

    That is the learning rate with the best mean on the selection split. A failed run is listed and not counted. A
    learning rate with a failed run ranks below all without one. If all runs failed there are no metrics and no best.
    """
    summary: dict[str, Any] = {"task": task.name, "metric": task.metric, "runs": results}
    failed = [result["learning_rate"] for result in results if "failed" in result]
    if not (by_rate := _by_rate(results)):
        return summary
    means = {rate: float(np.mean([_rank(task, run) for run in runs])) for rate, runs in by_rate.items()}
    rate = max(by_rate, key=lambda rate: (rate not in failed, means[rate]))
    summary["learning_rate"] = rate
    if task.positive is not None:
        summary["positive"] = task.positive
    best = max(by_rate[rate], key=functools.partial(_rank, task))
    chosen = {"seed": best["seed"], "learning_rate": rate, "step": best["step"]}
    return summary | over_seeds(by_rate[rate]) | {"best": chosen}


def _by_rate(results: Sequence[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    """Return the results of the trials that did not fail, by their learning rates."""
    found: dict[float, list[dict[str, Any]]] = {}
    for result in (result for result in results if "failed" not in result):
        found.setdefault(result["learning_rate"], []).append(result)
    return found


def _rank(task: Task, result: dict[str, Any]) -> float:
    """Return a number that is higher for a better result of a trial, by the selection metric."""
    return task.rank(result[task.selects][task.metric])


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return split -> metric -> mean and sample deviation (0 for one run) of the runs at one learning rate."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for split in [name for name, value in runs[0].items() if isinstance(value, dict)]:
        values = {name: [run[split][name] for run in runs] for name in runs[0][split]}
        found[split] = {
            name: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0}
            for name, v in values.items()
        }
    return found


def keep_best(context: TrialContext, programs: Any, summary: dict[str, Any]) -> None:
    """Save the best trial's parameters as the run's checkpoint."""
    best = summary["best"]
    kept = context.run.root / trial_of(best).directory / "kept"
    source = Checkpoints(kept, read_only=True)
    restored = source.restore_partial({"params": programs.program.abstract.params})
    with Checkpoints(context.run.checkpoints, keep_newest=1) as checkpoints:
        if not checkpoints.agreed_steps():
            checkpoints.save(restored.step, restored.state, config=context.resolved, extra=best)
            checkpoints.wait()


def write_results(context: TrialContext, summary: dict[str, Any], inputs: TaskData | None = None) -> None:
    """Write all predictions to one file, copy the best trial's files, and then write results.json.

    inputs: the examples whose columns and gold labels are written next to their predictions; None: none are.
    results.json completes the run. The threshold tuned for the best trial goes into task.json, for predict. All inputs
    of this function are kept until it returns, so after a stop at any moment it is repeated.
    """
    finished = [run for run in summary["runs"] if "failed" not in run]
    predictions = b"".join(read_predictions(context.run, run) for run in finished)
    if inputs is not None:
        predictions = _with_inputs(predictions, context.task, inputs)
    write_file(context.run.path / "predictions.jsonl", predictions)
    best = summary["best"]
    files = context.run.path / trial_of(best).directory / "files"
    for file in sorted(path for path in files.rglob("*") if path.is_file()):
        target = context.run.path / file.relative_to(files)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, file.read_bytes())
    (chosen,) = (run for run in finished if trial_of(run) == trial_of(best))
    if "threshold" in chosen[context.task.selects]:
        task = replace(context.task, threshold=chosen[context.task.selects]["threshold"])
        write_json(context.run.path / "task.json", task.to_json(), signed=True)
    write_json(context.run.path / "results.json", summary, signed=True)
    context.run.upload()


def add_inputs(run: RunDirectory, task: Task, data: TaskData) -> bool:
    """Write the columns and gold labels of its rows into the predictions of a complete run; return True if they change.

    The lines may have them already. A run without predictions is left as it is.
    """
    file = run.path / "predictions.jsonl"
    before = file.read_bytes() if file.exists() else b""
    after = _with_inputs(before, task, data)
    if after == before:
        return False
    write_file(file, after)
    run.upload()
    return True


def _with_inputs(predictions: bytes, task: Task, data: TaskData) -> bytes:
    lines = []
    for line in map(json.loads, predictions.splitlines()):
        example = data.splits[line["split"]].examples[line["index"]]
        names = list(line)
        inputs = [name for name in names[: names.index("prediction")] if name not in _OF_ROW]  # of an earlier call
        bare = {name: value for name, value in line.items() if name not in inputs}
        lines.append(json.dumps(with_inputs(bare, task, example), ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def read_results(run: RunDirectory) -> dict[str, Any] | None:
    """Return the content of results.json, or None before the run is complete. InputError if it is damaged."""
    return read_own(run.path / "results.json", "restore it from a copy, or remove it") or None


def clean_up(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Remove the trials of a complete run that keeps its best only; an earlier start may have stopped before this."""
    if summary.get("keep") == "best":
        run.remove(PurePath("members"))


def refuse_failures(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Raise RunError, one line, with the failed runs, if there are any."""
    failed = [entry for entry in summary["runs"] if "failed" in entry]
    if not failed:
        return
    which = "; ".join(f"{trial_of(entry)}: {entry['failed']}" for entry in failed)
    others = "results.json has the others" if len(failed) < len(summary["runs"]) else "none succeeded"
    raise RunError(
        f"{run.name}: {len(failed)} of {len(summary['runs'])} runs failed, {others}: {which}; leave these out in a "
        "new run"
    )


def table(task: Task, summary: dict[str, Any]) -> list[str]:
    """Return the metrics of the best learning rate by split, those of each rate, and the best run's report."""
    by_rate = _by_rate(summary["runs"])
    best = by_rate[summary["learning_rate"]]
    seeds = f"{len(best)} seed{'' if len(best) == 1 else 's'}"
    lines = [
        f"{summary['task']}: {seeds}, learning rate {summary['learning_rate']:g}, selected by {summary['metric']} on "
        f"{task.selects}" + (f"; f1 of the label {task.positive!r}" if task.positive is not None else "")
    ]
    splits = [split for split in best[0] if split in summary and isinstance(summary[split], dict)]
    width = max(5, *(len(split) + 1 for split in splits))
    lines += [f"  {split:<{width}}" + metrics_line(summary, summary[split], len(best)) for split in splits]
    if len(by_rate) > 1:
        lines.append(f"each learning rate on {task.selects}:")
        for rate, runs in by_rate.items():
            chosen = " (selected)" if rate == summary["learning_rate"] else ""
            lines.append(f"  {rate:<8g} {metrics_line(summary, over_seeds(runs)[task.selects], len(runs))}{chosen}")
    (chosen_run,) = (run for run in best if run["seed"] == summary["best"]["seed"])
    for report in chosen_run.get("reports", ()):
        if found := report_lines(report):
            lines += [f"{report['split']}, seed {chosen_run['seed']}:", *(f"  {line}" for line in found)]
    return lines


def metrics_line(summary: dict[str, Any], metrics: dict[str, dict[str, float]], runs: int) -> str:
    """Return the metrics of a split, the selecting one first and the loss last; a single run has no deviation."""
    names = sorted(metrics, key=lambda name: (name != summary["metric"], name == "loss"))
    spread = {name: f" ± {metrics[name]['std']:.4f}" if runs > 1 else "" for name in names}
    return "  ".join(f"{name} {metrics[name]['mean']:.4f}{spread[name]}" for name in names)
