"""A trial of a fine-tuning run, one seed at one learning rate: its first state, its evaluation and its results.

A trial has a directory `members/seed-S-rate-R` of its own. After training, `kept/` holds the selected parameters, next
to `result.json` and `predictions.jsonl`. The parameters are below the run's root; the two files, which process 0
writes, are below its path.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError
from jaxlm.files import read_regular, read_signed, write_file, write_json
from jaxlm.finetuning.patience import Patience
from jaxlm.inference.prediction import make_predict_step, predict_split
from jaxlm.models.model import Model
from jaxlm.runs.checkpoints import Checkpoints, DamagedCheckpoint
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.recorder import Observer, even_work
from jaxlm.runs.trees import leaf_checksums
from jaxlm.tasks import FORMATS, Encoded, Predicted, Task, TrainBatches
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.initialization import fresh_pooler, with_parameters
from jaxlm.training.program import CompiledStep, Program, make_program, run_settings
from jaxlm.training.start import Source
from jaxlm.training.step import Settings, TrainState
from jaxlm.training.task_model import TaskLearner, make_task_learner

log = logging.getLogger(__name__)


class Trial(NamedTuple):
    """A trial of a run: its seed and its learning rate."""

    seed: int
    rate: float

    @property
    def directory(self) -> PurePath:
        """The directory of the trial within its run."""
        return PurePath("members", f"seed-{self.seed}-rate-{self.rate!r}")

    def __str__(self) -> str:
        return f"seed {self.seed} at learning rate {self.rate:g}"


def trial_of(result: Mapping[str, Any]) -> Trial:
    """Return the trial of a result."""
    return Trial(result["seed"], result["learning_rate"])


@dataclasses.dataclass(frozen=True)
class TrialContext:
    """The context that all trials of a run share. resolved: the values of config.json, among them the next two."""

    run: RunDirectory
    config: FinetuneConfig
    resolved: dict[str, Any]
    num_steps: int
    batch_size: int
    task: Task
    encoded: dict[str, Encoded]
    source: Source | None
    mesh: Mesh
    observer: Observer
    keep: Literal["best", "all"] = "best"

    def ranked(self, result: dict[str, Any]) -> float:
        """Return a number that is higher for a better result of a trial, by the selection metric."""
        return self.task.rank(result[self.task.selects][self.task.metric])

    def replaces(self, step: int, metrics: dict[str, float], before: dict[str, float]) -> bool:
        """Return True if new parameters replace the ones before: with `select last`, those of the last step only.

        With `select best`, strictly better ones: the first of equals stays, as in the original (train.py:286).
        """
        if self.config.select == "last":
            return step == self.num_steps
        metric = self.task.metric
        return not before or self.task.is_better(metrics[metric], before[metric])

    @property
    def keeps_best(self) -> bool:
        """True if parameters are kept while training continues, of one trial or of others in its program."""
        return self.config.select == "best" or self.config.patience is not None

    def batches(self, seed: int) -> TrainBatches:
        """Return the training batches of a seed."""
        return TrainBatches(self.encoded["train"], batch_size=self.batch_size, seed=seed, num_steps=self.num_steps)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that all trials of a run share: seed and learning rate are data.

    train: the compiled step of `program`. copy: copies parameters, as a step donates those of its state.
    """

    program: Program
    learner: TaskLearner
    train: CompiledStep
    predict: CompiledStep
    copy: Callable[[Any], Any]

    @property
    def abstract(self) -> TrainState:
        """The leaves of a trial's state as jax.ShapeDtypeStruct."""
        return self.program.abstract


@dataclasses.dataclass
class Progress:
    """The progress of a trial, which its checkpoints hold.

    step, metrics: the step of the best parameters so far and their metrics on the selection split; None and empty
    before the first evaluation. patience: the evaluations since the best one. failed_in: the step whose loss or
    gradient was not finite, None if there was none.
    """

    step: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    patience: Patience = dataclasses.field(default_factory=Patience)
    failed_in: int | None = None

    @property
    def ended(self) -> bool:
        """True if the trial trains no further: it failed, or its patience ended."""
        return self.failed_in is not None or self.patience.stopped_at is not None

    def evaluated(self, context: TrialContext, step: int, metrics: dict[str, float]) -> bool:
        """Count an evaluation, which may end the trial; return True if its parameters are the ones to keep."""
        if context.config.patience is not None:
            self.patience.evaluated(context.task, context.config.patience, step, metrics)
        is_last = self.patience.stopped_at is not None and context.config.select == "last"
        if not (context.replaces(step, metrics, self.metrics) or is_last):
            return False
        self.step, self.metrics = step, metrics
        return True


def trial_result(run: RunDirectory, trial: Trial) -> dict[str, Any] | None:
    """Return the contents of a trial's `result.json`, on every process, or None before the trial is done."""

    def read() -> dict[str, Any] | None:
        file = run.path / trial.directory / "result.json"
        try:
            return read_signed(file) if file.exists() else None
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read: {error}; remove it, and it is written again") from error

    return first_process_decides(read)


def make_programs(context: TrialContext) -> Programs:
    """Return the programs of a run."""
    learner = make_task_learner(context.config, context.task)
    program = make_program(learner, context.config, context.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract.params)
    lengths = len(context.batches(0).lengths)
    return Programs(
        program=program,
        learner=learner,
        train=CompiledStep("training", program.step, expected_shapes=lengths),
        predict=CompiledStep("evaluation", jax.jit(make_predict_step(learner)), expected_shapes=lengths + 1),
        copy=jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings),
    )


def trial_settings(context: TrialContext, rate: float) -> Settings:
    """Return the settings of a trial at a learning rate."""
    optimizer = dataclasses.replace(context.config.optimizer, peak_lr=rate)
    epoch = context.batches(0).steps_per_epoch
    return run_settings(dataclasses.replace(context.config, optimizer=optimizer), context.num_steps, epoch)


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


def batch_rows(data: TrainBatches, number: int) -> str:
    """Return a description of the rows of a batch, for an error."""
    return f"train rows {data[number].index.tolist()} (0-based)"


def trial_work(context: TrialContext, programs: Programs) -> Callable[[int], tuple[float, float]]:
    """Return a function from a step to the tokens and FLOPs of a trial up to it, for the meter."""
    encoded = context.encoded["train"]
    length = encoded.longest.mean()
    tokens = context.batch_size * length * encoded.num_sequences
    return even_work(tokens, programs.learner.flops_per_token(int(length)))


def started_state(context: TrialContext, programs: Programs, seed: int) -> tuple[TrainState, list[str]]:
    """Return the first state of a trial, fresh or with the source's parameters, and notes on it.

    Rows of the token table are fresh if the source's tokenizer lacks the id. A tokenizer trained here has GPT-1's
    start, delimiter and extract tokens from the beginning: their rows keep the values of pretraining, although it never
    saw the ids, where the original initializes them afresh (section 3.2; train.py:410).
    """
    fresh, config = programs.program.fresh_state(seed), context.config
    if context.source is None:
        return fresh, []
    layers, fresh_names = config.transfer_layers, ["head/.*", "batch_stats/.*"]
    if config.reinit_layers:
        layers = config.model.num_layers - config.reinit_layers
        fresh_names.append("backbone/pooler/.*")
    return with_parameters(
        fresh,
        context.source,
        allow_fresh=[*fresh_names, *fresh_pooler(context.source, fresh)],
        grow=grown_leaves(programs.learner.model),
        transfer_layers=layers,
    )


def grown_leaves(model: Model) -> dict[str, int]:
    """Return the leaves, and their axis, with rows for the special tokens that fine-tuning adds."""
    if not FORMATS[model.family.input_format].roles:
        return {}
    return {f"backbone/{name}": 0 for name in model.family.vocabulary_leaves}


def evaluate_split(
    context: TrialContext,
    programs: Programs,
    params: Any,
    split: str,
    lengths: tuple[int, ...],
    threshold: float | None = None,
) -> tuple[Predicted, dict[str, float]]:
    """Return the predictions for a split and its metrics (empty if it has no labels)."""
    encoded = context.encoded[split]
    size = context.config.eval_batch_size or context.batch_size
    predictions = predict_split(programs.predict, params, encoded, context.mesh, batch_size=size, lengths=lengths)
    return predictions.predicted(context.task, encoded, threshold)


def raw_metric(context: TrialContext, programs: Programs, params: Any, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the selection metric of the parameters besides their average, for the log; nothing for None."""
    if params is None:
        return {}
    split, metric = context.task.selects, context.task.metric
    _, metrics = evaluate_split(context, programs, params, split, lengths)
    return {f"raw_{split}_{metric}": metrics[metric]}


def write_result(
    context: TrialContext, programs: Programs, trial: Trial, progress: Progress, params: Any
) -> dict[str, Any]:
    """Predict every split with the selected parameters and write the results; return the contents of `result.json`.

    The selection split comes first: the threshold for unanswerable questions is tuned on it and then used for the
    others.
    """
    selection_split, lengths = context.task.selects, context.batches(trial.seed).lengths
    splits = [split for split in context.encoded if split != "train"]
    found: dict[str, tuple[Predicted, dict[str, float]]] = {}
    threshold = None
    for split in sorted(splits, key=lambda split: split != selection_split):
        found[split] = evaluate_split(context, programs, params, split, lengths, threshold)
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

    finished = [result for result in results if "failed" not in result]

    def drop() -> None:
        for rate in {result["learning_rate"] for result in finished}:
            at_rate = [result for result in finished if result["learning_rate"] == rate]
            best = max(at_rate, key=context.ranked)
            for result in at_rate:
                if result is not best:
                    context.run.remove(trial_of(result).directory / "kept")

    first_process_decides(drop)


def write_files(directory: Path, predicted: Predicted) -> None:
    """Write the files for other programs (a submission server, SQuAD's script) below `directory`."""
    for name, content in predicted.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=4, ensure_ascii=False) + "\n"
        write_file(path, text)
