"""Fine-tune a pretrained model on a labelled task: `python -m jaxlm.finetune CONFIG --run RUN --start RUN --task TASK`.

The same command resumes a stopped run, and reports when the run is complete.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import jax
import numpy as np

from jaxlm.atomic_write import write_file, write_json
from jaxlm.bounded_read import read_signed
from jaxlm.compiler.memory import check_batch_memory
from jaxlm.config import command_line, to_json
from jaxlm.distributed.agreement import first_process_decides
from jaxlm.distributed.devices import prepare_process
from jaxlm.distributed.mesh import make_mesh, use_mesh
from jaxlm.distributed.processes import DistributedConfig, StopSignal, start_processes
from jaxlm.distributed.watchdog import watching
from jaxlm.errors import InputError, RunError, run_command
from jaxlm.finetuning.arguments import TaskArguments
from jaxlm.finetuning.trial import TrialContext, make_programs, read_predictions, trial_directory
from jaxlm.finetuning.vectorized import run_trials
from jaxlm.models import build, family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory, saved_config
from jaxlm.tasks import (
    ROLES,
    Task,
    TaskData,
    encode_split,
    read_task,
    steps_of_epochs,
    train_batches,
)
from jaxlm.text import Tokenizer, tokenizer_from_spec
from jaxlm.training.config import (
    FinetuneConfig,
    check_batches,
    check_finite,
    check_positive,
    check_seed,
    check_sizes,
    filled,
    kept_value,
    one_duration,
    resolved_json,
    run_fields,
)
from jaxlm.training.initialization import Source, dropout_notes, model_of_source, source_of
from jaxlm.training.loop import explain_failure
from jaxlm.training.trained_length import OF_START, check_trained, kept_start_length, limited

log = logging.getLogger("jaxlm.finetune")


@dataclass(frozen=True, kw_only=True)
class Arguments(TaskArguments):
    """Fine-tune on a labelled task."""

    run: str
    """The run directory, or gs://BUCKET/RUN, to create or to resume."""
    seeds: int = 1
    """Number of runs, each with a seed of its own: `seed`, `seed` + 1, ..."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try instead of optimizer.peak_lr. The one with the best mean on dev is reported."""
    beyond_length: bool = False
    """Use positions of the start's table that were never trained. The limit is the task's length, or --length."""
    keep: Literal["best", "all"] = "best"
    """Keep the parameters of the run that is best on dev, or of all runs."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class Plan:
    """All decisions made before a device is used. length, batch_size: those of the config, with defaults filled in."""

    config: FinetuneConfig
    length: int
    batch_size: int
    task: Task
    data: TaskData
    tokenizer: Tokenizer
    source: Source | None
    rates: tuple[float, ...]
    notes: tuple[str, ...]


def plan(arguments: Arguments, given: set[str]) -> Plan:
    """Read the task and the start, fill in the config from them, and raise InputError for inconsistent arguments."""
    config = one_duration(arguments.settings, given)
    source = None
    if arguments.start is not None:
        if arguments.tokenizer is not None:
            raise InputError(
                f"--tokenizer must be left out with --start, got {arguments.tokenizer}; the start has its own tokenizer"
            )
        source = source_of(arguments.run, arguments.start)
        tokenizer = source.tokenizer
        config = replace(config, model=model_of_source(source, config.model, given, saved_config(arguments.run)))
    elif arguments.tokenizer is None:
        raise InputError("--tokenizer must be given without --start; give one of them")
    else:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
    of_tokenizer = [f"tokenizer {arguments.tokenizer}: {note}" for note in tokenizer.notes if source is None]
    config.check()
    if source is None and (config.transfer_layers is not None or config.reinit_layers):
        name = "transfer_layers" if config.transfer_layers is not None else "reinit_layers"
        value = getattr(config, name)
        raise InputError(f"{name} must be left out without --start, got {value}; give --start or leave it out")
    check_positive(arguments, "seeds")
    check_seed(f"the last of {arguments.seeds} seeds", config.seed + arguments.seeds - 1)
    arguments.options.check()
    task, data = read_task(
        arguments.task,
        arguments.task_dir,
        arguments.custom,
        seed=arguments.held_out_seed,
        options=arguments.options,
        strict=arguments.strict,
    )
    family = family_of(config.model)
    if family.input_format == "gpt1":
        tokenizer = tokenizer.with_specials(ROLES)
    # A published model's table may have more rows than its tokenizer has ids.
    rows = tokenizer.size if source is None else max(tokenizer.size, source.model.vocab_size)
    config = replace(config, model=replace(config.model, vocab_size=rows))
    saved = saved_config(arguments.run)
    longest = build(config.model).max_length
    if source is not None and not arguments.beyond_length:
        longest = source.trained_length
        if config.length is not None and (saved is None or config.length != saved.get("length")):
            check_trained("length", config.length, longest, source.name, beyond=False)
    paper = task.paper_for(family.input_format)
    config, length, batch_size = filled(kept_value(config, saved, "length"), paper, longest)
    config = kept_value(config, saved, "num_steps", derived_from=("num_epochs", "batch_size"))
    rates = arguments.learning_rates or (config.optimizer.peak_lr or 0.0,)
    for rate in rates:
        check_finite(rate, "learning_rates")
        replace(config.optimizer, peak_lr=rate).check()
    if len(set(rates)) < len(rates):
        raise InputError(f"learning_rates must differ from each other, got {' '.join(map(str, rates))}; leave one out")
    check_sizes(length, 1, config.model)
    notes = (*of_tokenizer, *_notes_on_length(config, length, source, paper, task))
    return Plan(config, length, batch_size, task, data, tokenizer, source, rates, notes)


def _notes_on_length(
    config: FinetuneConfig, length: int, source: Source | None, paper: Mapping[str, float], task: Task
) -> tuple[str, ...]:
    """Return notes on the length: if it is limited to the trained one, and if windows of a text do not overlap."""
    notes, positions = [], build(config.model).max_length
    if source is not None and length == source.trained_length < min(int(paper.get("length", positions)), positions):
        notes.append(f"length {length}: {limited(length, positions, source.name)}")
    room = length - task.options.question_length - 3
    if task.kind == "span" and room < task.options.stride:
        notes.append(
            f"length {length}: beside a question of {task.options.question_length} tokens a window has room for "
            f"{max(room, 1)} of its text, fewer than options.stride {task.options.stride}: windows do not overlap, and "
            "an answer that crosses two of them is in neither; give a smaller --options.stride"
        )
    return tuple(notes)


def finetune(arguments: Arguments, given: set[str]) -> None:
    """Start or resume a run and train it until it is complete or a signal stops it."""
    stop = StopSignal()
    planned = plan(arguments, given)
    config, task, source = planned.config, planned.task, planned.source
    batch_size = planned.batch_size
    mesh = make_mesh(config.mesh)
    check_batches(config, mesh)
    input_format = family_of(config.model).input_format
    encoded = {
        split: encode_split(task, planned.data, split, planned.tokenizer, planned.length, input_format)
        for split in planned.data.splits
    }
    row = encoded["train"].batch(np.array([0]), planned.length, 1)
    check_batch_memory(row, batch_size)
    check_batch_memory(row, config.eval_batch_size or batch_size, "eval_batch_size")
    num_steps = config.num_steps
    if num_steps is None:
        epochs = config.num_epochs or 0
        num_steps = steps_of_epochs(input_format, encoded["train"], batch_size=batch_size, num_epochs=epochs)
        config = replace(config, num_steps=num_steps)
    chunks = config.execution.loss_chunks
    for length in train_batches(encoded["train"], batch_size=batch_size, seed=0, num_steps=1).lengths:
        check_sizes(length, chunks, config.model)

    run = RunDirectory(arguments.run)
    trials = [(config.seed + number, rate) for rate in planned.rates for number in range(arguments.seeds)]
    resolved = resolved_json(
        config,
        {
            "tokenizer": planned.tokenizer.fingerprint,
            "task_data": planned.data.fingerprint(),
            "start": None if source is None else source.fingerprint,
        },
    ) | {
        "task": task.name,
        "task_dir": arguments.task_dir,
        "custom": to_json(arguments.custom) if task.name == "custom" else None,
        "start": None if source is None else source.name,
        "options": to_json(arguments.options),
        OF_START: kept_start_length(saved_config(arguments.run), None if source is None else source.trained_length),
        "held_out_seed": arguments.held_out_seed,
        "seeds": arguments.seeds,
        "learning_rates": list(planned.rates),
    }
    moved = ("task_dir", "start", "custom.train", "custom.dev", "custom.test")  # the fingerprints cover their contents
    free = (*run_fields(config.optimizer), "members_per_group", *moved)
    changed = run.open(resolved, run_fields=free)
    with run, use_mesh(mesh):
        if (summary := first_process_decides(lambda: _summary(run))) is not None:
            _clean_up(run, summary)
            _refuse_failures(run, summary)
            if jax.process_index() == 0:
                print(f"{run.name} is complete: results.json has {len(trials)} runs; nothing to do")
            return
        run.save_tokenizer(planned.tokenizer)
        first_process_decides(lambda: write_json(run.path / "task.json", task.to_json(), signed=True))
        run.record_start(started_from=None if source is None else f"parameters of {source.name}", mesh=dict(mesh.shape))
        say = print if jax.process_index() == 0 else lambda *_: None
        for line in planned.data.report():
            say(f"{task.name} {line}")
        truncated = {name: split.truncated for name, split in encoded.items() if split.truncated}
        counts = ", ".join(f"{n} in {name}" for name, n in truncated.items())
        say(f"truncated to {planned.length} tokens: {counts or 'none'}")
        chosen = [said] if (said := config.mesh.describe(mesh)) is not None else []
        for sentence in (*planned.notes, *chosen, *dropout_notes(source, config.model), *config.execution.says()):
            say(sentence)
        for change in changed:
            say(f"changed since the last start: {change}")
        if (warning := config.optimizer.warmup_note(num_steps)) is not None and jax.process_index() == 0:
            log.warning("%s", warning)
        context = TrialContext(
            run, config, resolved, num_steps, batch_size, task, encoded, source, mesh, stop, arguments.keep
        )
        programs = make_programs(context)
        origin = f"{task.name} from scratch" if source is None else f"{task.name} from {source.name}"
        results = run_trials(context, programs, trials, origin)
        summary = summarize(task, results) | {"keep": arguments.keep}
        if "best" in summary:
            _keep_best(context, programs, summary)
            first_process_decides(lambda: _write_results(context, summary))
            _clean_up(run, summary)
            for line in _table(task, summary):
                say(line)
        _refuse_failures(run, summary)


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

    def selection_metric(run: dict[str, Any]) -> float:
        return run[task.selects][task.metric]

    means = {rate: float(np.mean([selection_metric(run) for run in runs])) for rate, runs in by_rate.items()}
    rate = max(by_rate, key=lambda rate: (rate not in failed, means[rate]))
    summary: dict[str, Any] = {"task": task.name, "metric": task.metric, "runs": results, "learning_rate": rate}
    if task.positive is not None:
        summary["positive"] = task.positive
    splits = [split for split, value in by_rate[rate][0].items() if isinstance(value, dict)]
    for split in splits:
        names = by_rate[rate][0][split]
        values = {name: [run[split][name] for run in by_rate[rate]] for name in names}
        summary[split] = {
            name: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0}
            for name, v in values.items()
        }
    best = max(by_rate[rate], key=selection_metric)
    summary["best"] = {"seed": best["seed"], "learning_rate": rate, "step": best["step"]}
    return summary


def _keep_best(context: TrialContext, programs: Any, summary: dict[str, Any]) -> None:
    """Save the best trial's parameters as the run's checkpoint."""
    best = summary["best"]
    kept = context.run.root / trial_directory(best["seed"], best["learning_rate"]) / "kept"
    source = Checkpoints(kept, read_only=True)
    restored = source.restore_partial({"params": programs.abstract.params})
    with Checkpoints(context.run.checkpoints, keep_newest=1) as checkpoints:
        if not checkpoints.steps():
            checkpoints.save(restored.step, restored.state, config=context.resolved, extra=best)
            checkpoints.wait()


def _write_results(context: TrialContext, summary: dict[str, Any]) -> None:
    """Write all predictions to one file, copy the best trial's files, and then write results.json.

    results.json completes the run. The threshold tuned for the best trial goes into task.json, for predict. All inputs
    of this function are kept until it returns, so after a stop at any moment it is repeated.
    """

    def directory_of(run: dict[str, Any]) -> Path:
        return context.run.path / trial_directory(run["seed"], run["learning_rate"])

    finished = [run for run in summary["runs"] if "failed" not in run]
    predictions = b"".join(read_predictions(context.run, run) for run in finished)
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


def _summary(run: RunDirectory) -> dict[str, Any] | None:
    """Return the content of results.json, or None before the run is complete. InputError if it is damaged."""
    file = run.path / "results.json"
    try:
        return read_signed(file) if file.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}; restore it from a copy, or remove it") from error


def _clean_up(run: RunDirectory, summary: dict[str, Any]) -> None:
    """Remove the trials of a complete run that keeps its best only; an earlier start may have stopped before this."""
    if summary.get("keep") == "best":
        run.remove(PurePath("members"))


def _refuse_failures(run: RunDirectory, summary: dict[str, Any]) -> None:
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


def _table(task: Task, summary: dict[str, Any]) -> list[str]:
    finished = [run for run in summary["runs"] if "failed" not in run]
    count = sum(run["learning_rate"] == summary["learning_rate"] for run in finished)
    lines = [
        f"{summary['task']}: {count} seed(s), learning rate {summary['learning_rate']:g}, selected by "
        f"{summary['metric']} on "
        f"{task.selects}" + (f"; f1 of the label {task.positive!r}" if task.positive is not None else "")
    ]
    splits = [split for split in finished[0] if split in summary and isinstance(summary[split], dict)]
    width = max(5, *(len(split) for split in splits))
    for split in splits:
        names = sorted(summary[split], key=lambda name: (name != summary["metric"], name == "loss"))
        metrics = (f"{name} {summary[split][name]['mean']:.4f} ± {summary[split][name]['std']:.4f}" for name in names)
        lines.append(f"  {split:<{width}}" + "  ".join(metrics))
    return lines


def main() -> None:
    """Run the command."""
    arguments, given = command_line(Arguments, FinetuneConfig, program="finetune", description=__doc__)
    start_processes(arguments.distributed)
    with watching():
        prepare_process()
        try:
            finetune(arguments, given)
        except Exception as error:
            raise explain_failure(error) from error


if __name__ == "__main__":
    run_command(main)
