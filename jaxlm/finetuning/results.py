"""Results of a fine-tuning run: results.json with the metrics of all trials, predictions.jsonl, and a table."""

import json
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from jaxlm.errors import InputError, RunError
from jaxlm.files import read_signed, write_file, write_json
from jaxlm.finetuning.trial import TrialContext, read_predictions, trial_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import Task, TaskData
from jaxlm.tasks.metrics.report import report_lines
from jaxlm.tasks.prediction_lines import with_inputs

_OF_ROW = ("split", "index", "seed", "learning_rate")  # the fields of a prediction before those of its row


def summarize(task: Task, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the contents of results.json, with metrics over the seeds of the best learning rate.

    That is the learning rate with the best mean on the selection split. A failed run is listed and not counted. A
    learning rate with a failed run ranks below all without one. If all runs failed there are no metrics and no best.
    """
    by_rate: dict[float, list[dict]] = {}
    failed = [result["learning_rate"] for result in results if "failed" in result]
    for result in results:
        if "failed" not in result:
            by_rate.setdefault(result["learning_rate"], []).append(result)
    if not by_rate:
        return {"task": task.name, "metric": task.metric, "runs": results}

    def ranked(run: dict[str, Any]) -> float:
        return task.rank(run[task.selects][task.metric])

    means = {rate: float(np.mean([ranked(run) for run in runs])) for rate, runs in by_rate.items()}
    rate = max(by_rate, key=lambda rate: (rate not in failed, means[rate]))
    summary: dict[str, Any] = {"task": task.name, "metric": task.metric, "runs": results, "learning_rate": rate}
    if task.positive is not None:
        summary["positive"] = task.positive
    best = max(by_rate[rate], key=ranked)
    return (
        summary
        | over_seeds(by_rate[rate])
        | {"best": {"seed": best["seed"], "learning_rate": rate, "step": best["step"]}}
    )


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
    restored = source.restore_partial({"params": programs.abstract.params})
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

    def directory_of(run: dict[str, Any]) -> Path:
        return context.run.path / trial_of(run).directory

    finished = [run for run in summary["runs"] if "failed" not in run]
    predictions = b"".join(read_predictions(context.run, run) for run in finished)
    if inputs is not None:
        predictions = _with_inputs(predictions, context.task, inputs)
    write_file(context.run.path / "predictions.jsonl", predictions)
    best = summary["best"]
    files = directory_of(best) / "files"
    for file in sorted(path for path in files.rglob("*") if path.is_file()):
        target = context.run.path / file.relative_to(files)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, file.read_bytes())
    (chosen,) = (run for run in finished if all(run[name] == best[name] for name in ("seed", "learning_rate")))
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
    file = run.path / "results.json"
    try:
        return read_signed(file) if file.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; restore it from a copy, or remove it") from error


def clean_up(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Remove the trials of a complete run that keeps its best only; an earlier start may have stopped before this."""
    if summary.get("keep") == "best":
        run.remove(PurePath("members"))


def refuse_failures(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Raise RunError, one line, with the failed runs, if there are any."""
    failed = [entry for entry in summary["runs"] if "failed" in entry]
    if not failed:
        return
    which = "; ".join(
        f"seed {run['seed']} at learning rate {run['learning_rate']:g}: {run['failed']}" for run in failed
    )
    others = "results.json has the others" if len(failed) < len(summary["runs"]) else "none succeeded"
    raise RunError(
        f"{run.name}: {len(failed)} of {len(summary['runs'])} runs failed, {others}: {which}; leave these out in a "
        "new run"
    )


def table(task: Task, summary: dict[str, Any]) -> list[str]:
    """Return the metrics of the best learning rate by split, those of each rate, and the best run's report."""
    finished = [run for run in summary["runs"] if "failed" not in run]
    rates = list(dict.fromkeys(run["learning_rate"] for run in finished))
    by_rate = {rate: [run for run in finished if run["learning_rate"] == rate] for rate in rates}
    best = by_rate[summary["learning_rate"]]
    seeds = f"{len(best)} seed{'' if len(best) == 1 else 's'}"
    lines = [
        f"{summary['task']}: {seeds}, learning rate {summary['learning_rate']:g}, selected by {summary['metric']} on "
        f"{task.selects}" + (f"; f1 of the label {task.positive!r}" if task.positive is not None else "")
    ]
    splits = [split for split in finished[0] if split in summary and isinstance(summary[split], dict)]
    width = max(5, *(len(split) + 1 for split in splits))
    lines += [f"  {split:<{width}}" + metrics_line(summary, summary[split], len(best)) for split in splits]
    if len(rates) > 1:
        lines.append(f"each learning rate on {task.selects}:")
        for rate, runs in by_rate.items():
            chosen = " (selected)" if rate == summary["learning_rate"] else ""
            lines.append(f"  {rate:<8g} {metrics_line(summary, over_seeds(runs)[task.selects], len(runs))}{chosen}")
    (chosen_run,) = (run for run in best if run["seed"] == summary["best"]["seed"])
    for report in chosen_run.get("reports", ()):
        lines.append(f"{report['split']}, seed {chosen_run['seed']}:")
        lines += [f"  {line}" for line in report_lines(report)]
    return lines


def metrics_line(summary: dict[str, Any], metrics: dict[str, dict[str, float]], runs: int) -> str:
    """Return the metrics of a split, the selecting one first and the loss last; a single run has no deviation."""
    names = sorted(metrics, key=lambda name: (name != summary["metric"], name == "loss"))
    spread = {name: f" ± {metrics[name]['std']:.4f}" if runs > 1 else "" for name in names}
    return "  ".join(f"{name} {metrics[name]['mean']:.4f}{spread[name]}" for name in names)
