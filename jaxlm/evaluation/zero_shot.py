"""`evaluate zero-shot`: tasks without fine-tuning, at one checkpoint or along a pretraining."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import make_mesh
from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import ZeroShot, ZeroShotOptions
from jaxlm.evaluation.opening import DEFAULT_BATCH_SIZE
from jaxlm.evaluation.output import output_file, say, shows_progress, values_json
from jaxlm.files import atomic_output, check_output
from jaxlm.inference.loaded_run import LoadedRun, load_model, split_run
from jaxlm.inference.rows import default_batch_size
from jaxlm.inference.text_scoring import check_masked_lm
from jaxlm.interop.sources import KINDS
from jaxlm.models.family import UNLIMITED
from jaxlm.reading.lines import Lines
from jaxlm.reading.rows import json_objects
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory, split_start
from jaxlm.text import Tokenizer
from jaxlm.training.loop import ScheduledEvaluation
from jaxlm.training.pretraining_run import TrainingContext
from jaxlm.training.step import TrainState
from jaxlm.wording import flag, lacks_field
from jaxlm.zero_shot import ZERO_SHOT_TASKS, parse_tasks
from jaxlm.zero_shot.model import ZeroShotModel
from jaxlm.zero_shot.task import PAPER, Measured, ZeroShotTask

log = logging.getLogger(__name__)

RESULTS = "zero_shot.jsonl"  # of a run's directory: values along its pretraining


def evaluate_zero_shot(arguments: ZeroShot) -> list[dict[str, Any]]:
    """Return a dictionary per value; for checkpoints those of the whole output.

    They are lines of JSON of the output or of standard output, with a table on standard error.
    """
    if not arguments.task:
        raise InputError("--task must be given, got none; write for example --task lambada:lambada_test.jsonl")
    tasks = parse_tasks(arguments.task)
    check_options([task for task, _ in tasks], arguments.options)
    for task in dict.fromkeys(task for task, _ in tasks):
        check_protocol(task, arguments.options.protocol, arguments.run)
    specs = checkpoint_specs(arguments.run, arguments.checkpoints)
    output = arguments.output
    if arguments.checkpoints and output is None:
        output = Path(split_start(arguments.run)[0]) / RESULTS
    results = Results(output, keep=bool(arguments.checkpoints))
    if arguments.items is not None:
        if arguments.checkpoints:
            raise InputError(f"--items must be given without --checkpoints, got {arguments.items}; give RUN@STEP")
        check_output(arguments.items, "--items")
    items: list[dict[str, Any]] = []
    mesh = make_mesh(arguments.mesh)
    model: ZeroShotModel | None = None
    for spec in specs:
        step = split_start(spec)[1]
        missing = [(task, path) for task, path in tasks if not results.hold(step, task, path, arguments.options)]
        if not missing:
            continue
        run = load_model(spec, mesh=mesh)
        run.require_one_text("evaluate zero-shot")
        model = model or zero_shot_model(run, arguments, mesh, [task for task, _ in tasks])
        model.params = run.params
        for task, path in missing:
            values = list(task.measure(model, Path(path), arguments.options))
            lines = measured_lines(model, (str(run.path), run.step), task, path, arguments.options, values)
            results.add(lines)
            if arguments.items is not None:
                items += item_lines(task, values)
    if arguments.items is not None:
        with output_file(arguments.items) as file:
            file.writelines(values_json(item) + "\n" for item in items)
    return results.lines


def item_lines(task: ZeroShotTask, values: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return a JSON object per row of a task, with its values by metric; none for a running text."""
    counted = [value for value in values if value.rows]
    lines = [{"task": task.name} | row.item() for row in counted[0].rows] if counted else []
    for value in counted:
        for line, of_row in zip(lines, np.asarray(value.of_rows).tolist(), strict=False):
            line[value.metric] = of_row
    return lines


def measured_lines(
    model: ZeroShotModel,
    source: tuple[str, int | None],
    task: ZeroShotTask,
    path: str,
    options: ZeroShotOptions,
    values: Iterable[Measured],
) -> list[dict[str, Any]]:
    """Return a JSON object per value of a task. source: the run and the step, None for published weights."""
    run, step = source
    of_value = {"run": run, "step": step, "task": task.name, "path": path, "protocol": PAPER}
    changed, lines = changed_options(options, task), []
    for measured in values:
        value = {key: found for key, found in measured._asdict().items() if key not in ("how", "rows", "of_rows")}
        length = {} if model.positions == UNLIMITED else {"context_length": model.positions}
        how = {"left_context": model.begins(), **length} | dict(measured.how)
        lines.append(of_value | value | how | ({"options": changed} if changed else {}))
    return lines


def during_pretraining(specs: Sequence[str], every: int) -> list[Callable[[TrainingContext], ScheduledEvaluation]]:
    """Return the evaluation of zero-shot tasks, each NAME:PATH, every `every` steps of pretraining; none without tasks.

    Values go to RUN/zero_shot.jsonl and to TensorBoard. Those of a step that is reached again are not computed again.
    """
    tasks, options = parse_tasks(specs, "--zero-shot"), ZeroShotOptions()
    if every and not tasks:
        raise InputError(f"--zero-shot-every must be given with --zero-shot NAME:PATH, got {every} alone; add one")

    def begin(context: TrainingContext) -> ScheduledEvaluation:
        results = Results(context.run.path / RESULTS, keep=True)
        model = ZeroShotModel(
            context.model,
            context.tokenizer,
            mesh=context.mesh,
            batch_size=context.batch_size,
            positions=context.length,
            stream_length=context.stream_length,
            show_progress=False,
        )

        def evaluate(step: int, state: TrainState) -> None:
            model.params = state.weights
            for task, path in tasks:
                if not results.hold(step, task, path, options):
                    values = task.measure(model, Path(path), options)
                    lines = measured_lines(model, (context.run.name, step), task, path, options, values)
                    results.add(lines)
                    context.log.to_tensorboard(step, _scalars(lines))

        return ScheduledEvaluation(evaluate, every, first=True)

    return [begin] if tasks else []


def _scalars(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the finite values of whole tasks by their names in TensorBoard."""
    return {
        f"zero_shot/{line['task']}_{line['protocol']}_{line['metric']}": line["value"]
        for line in lines
        if "field" not in line and math.isfinite(line["value"])
    }


class Results:
    """The lines of an output file, which is complete after each `add`.

    keep: begin with the lines that the file holds, so that an interrupted evaluation continues. Without a path, lines
    are printed to standard output.
    """

    def __init__(self, path: Path | None, *, keep: bool) -> None:
        self.path, self.lines = path, list[dict[str, Any]]()
        if path is not None:
            check_output(path)
            if keep and path.exists():
                self.lines = read_results(path)

    def hold(self, step: int | None, task: ZeroShotTask, path: str, options: ZeroShotOptions) -> bool:
        """Return True if the values of a task at a step are there."""
        wanted = {"step": step, "task": task.name, "path": path, "protocol": PAPER}
        found = (line for line in self.lines if all(line.get(key) == value for key, value in wanted.items()))
        changed = changed_options(options, task)
        return any(changed == _of_task(line.get("options", {}), task) for line in found)

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, and print their table. Each process must call this."""
        self.lines += map(dict, lines)
        if self.path is None:
            say(*(values_json(dict(line)) for line in lines))
        elif jax.process_index() == 0:
            with atomic_output(self.path) as file:
                file.writelines(values_json(line) + "\n" for line in self.lines)
        show(lines)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results. InputError for a line without the fields of one."""
    found = []
    for where, row in json_objects(path):
        if missing := {"step", "task", "path", "protocol", "metric", "value", "stderr"} - set(row):
            raise InputError(lacks_field(where, sorted(missing)[0], row, "remove the line"))
        found.append(row)
    return found


def check_protocol(task: ZeroShotTask, protocol: str, run: str) -> None:
    """Name the command that runs lm-evaluation-harness where it was asked for. InputError for a task that it lacks."""
    if protocol == "harness" and not task.harness:
        raise InputError(f"--protocol must be {PAPER} for {task.name}, got {protocol}; leave it out")
    if protocol != PAPER and task.harness:
        command = f"python -m jaxlm.evaluate harness --run {run} --tasks {task.harness}"
        log.info("note: %s is measured by the protocol paper; %s runs lm-evaluation-harness", task.name, command)


def changed_options(options: ZeroShotOptions, task: ZeroShotTask) -> dict[str, Any]:
    """Return the options that are not the default and that the values of a task depend on, as JSON has them."""
    return _of_task(_changed(options), task)


def _changed(options: ZeroShotOptions) -> dict[str, Any]:
    defaults = dataclasses.asdict(ZeroShotOptions())
    changed = {name: value for name, value in dataclasses.asdict(options).items() if value != defaults[name]}
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}


def _of_task(options: Mapping[str, Any], task: ZeroShotTask) -> dict[str, Any]:
    return {name: value for name, value in options.items() if task.depends_on(name)}


def check_options(tasks: Sequence[ZeroShotTask], options: ZeroShotOptions) -> None:
    """Raise InputError for an option that none of the tasks depends on."""
    for name, value in _changed(options).items():
        if name != "protocol" and not any(task.depends_on(name) for task in tasks):
            others = ", ".join(task.name for task in ZERO_SHOT_TASKS.values() if task.depends_on(name))
            raise InputError(
                f"{flag(name)} must be given with one of {others}, got {value} with "
                f"{', '.join(dict.fromkeys(task.name for task in tasks))}; leave it out"
            )


def checkpoint_specs(run: str, checkpoints: Sequence[str]) -> list[str]:
    """Return RUN@STEP for each checkpoint to evaluate, in order; the run itself if none are chosen."""
    if not checkpoints:
        return [run]
    if run.startswith(KINDS):
        raise InputError(
            f"--checkpoints must be left out for {run}, published weights, got {' '.join(checkpoints)}; leave it out"
        )
    path, given = split_run(run)
    if given is not None:
        raise InputError(f"--run must be a run without a step with --checkpoints, got {run}; give {path}")
    kept = Checkpoints(RunDirectory(path).checkpoints, read_only=True).steps()
    if tuple(checkpoints) == ("all",):
        if not kept:
            raise InputError(f"{path} has no finished checkpoint yet; run its python -m jaxlm.pretrain command again")
        return [f"{path}@{step}" for step in sorted(kept)]
    for step in checkpoints:
        if not step.isdecimal() or int(step) not in kept:
            listed = ", ".join(map(str, sorted(kept)))
            raise InputError(f"--checkpoints must be all or among {listed} for {path}, got {step}; give those")
    return [f"{path}@{step}" for step in checkpoints]


def zero_shot_model(run: LoadedRun, arguments: ZeroShot, mesh: Mesh, tasks: Sequence[ZeroShotTask]) -> ZeroShotModel:
    """Return the model of a run for tasks. InputError if it cannot do one of them."""
    options = arguments.options
    if run.model.is_causal:
        if options.pseudo_likelihood != "token":
            raise InputError("--pseudo-likelihood must be token for a causal model, got word; leave it out")
    else:
        check_masked_lm(run.model, run.params, run.tokenizer, run.name)
        if options.left_context:
            raise InputError("--left-context must be given with a causal model, got an encoder; leave it out")
        if causal := [task.name for task in tasks if task.needs == "causal"]:
            raise InputError(f"--task {causal[0]} must have a causal model, got an encoder; give another run or task")
    batch_size = arguments.batch_size or default_batch_size(DEFAULT_BATCH_SIZE, mesh)
    check_batch(batch_size, 1, mesh)
    return ZeroShotModel(
        run.model,
        run.tokenizer,
        mesh=mesh,
        batch_size=batch_size,
        positions=run.positions(beyond=arguments.beyond_length),
        stream_length=run.config.length if run.data.carries else None,
        begin_all=options.left_context,
        within_word=options.pseudo_likelihood == "word",
        not_greedy=stop_word_ids(run.tokenizer, options.stop_words) if options.stop_words else (),
        show_progress=shows_progress(),
    )


def stop_word_ids(tokenizer: Tokenizer, path: Path) -> list[int]:
    """Return the ids of tokens that are a stop word of a file, with one word per line; case is ignored."""
    words = {line.strip().lower() for _, line in Lines(path)} - {""}
    if not words:
        raise InputError(f"--stop-words {path} must have words, got none; write one per line")
    return [i for i in range(tokenizer.size) if tokenizer.decode([i]).strip().lower() in words]


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of values on standard error, without those of single paradigms."""
    if jax.process_index() > 0:
        return
    for line in lines:
        if "paradigm" not in line:
            name = " ".join(filter(None, (line["task"], line.get("field"))))
            error = "" if math.isnan(line["stderr"]) else f" ± {line['stderr']:.4f}"
            scored = f"{line['scored']:,} of {line['examples']:,} examples"
            if line.get("shortened"):
                scored += f", {line['shortened']:,} shortened to {line['context_length']:,} tokens"
            step = "" if line["step"] is None else f"step {line['step']}  "
            value = f"{line['protocol']:<8} {line['metric']:<18} {line['value']:.4f}{error}  {scored}"
            say(f"{step}{name:<24} {value}", stream=sys.stderr)
