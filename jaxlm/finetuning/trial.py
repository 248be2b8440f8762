"""One member of a fine-tuning run: one seed at one learning rate, trained, evaluated and written down.

A member has a directory `members/seed-S-rate-R` of its own while it is worked on: `checkpoints/` (the training state
and the best parameters so far, to resume from), and once it is trained `kept/` (the parameters that count),
`result.json` and `predictions.jsonl`. The first two lie below the run's root, the others, process 0's, below its path.

The best so far is part of the training state: it stays on the devices and is saved and restored with the rest, so it
always belongs to the history that goes on, whatever was evaluated between the checkpoint and a stop.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.atomic_write import write_file, write_json
from jaxlm.bounded_read import read_regular, read_signed
from jaxlm.distributed.agreement import first_process_decides
from jaxlm.distributed.mesh import host_rows, replicated, to_devices
from jaxlm.distributed.processes import StopSignal
from jaxlm.errors import InputError
from jaxlm.inference.prediction import label_split, make_label_step
from jaxlm.models.family import Model
from jaxlm.runs.checkpoints import Checkpoints, DamagedCheckpoint, Metadata
from jaxlm.runs.checksums import leaf_checksums
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.meter import even_work
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import Recorder
from jaxlm.tasks import Encoded, Predicted, Task, TrainBatches, train_batches
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.initialization import Source, fresh_pooler, with_parameters
from jaxlm.training.loop import Session, run_training
from jaxlm.training.program import Program, make_program
from jaxlm.training.state import TrainState, from_saved, saved_part
from jaxlm.training.step import Settings, settings_of
from jaxlm.training.task_model import TaskLearner, make_task_learner

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Work:
    """What all members of a run share. resolved: what config.json holds; num_steps, batch_size: from there."""

    run: RunDirectory
    config: FinetuneConfig
    resolved: dict[str, Any]
    num_steps: int
    batch_size: int
    task: Task
    encoded: dict[str, Encoded]
    source: Source | None
    mesh: Mesh
    stop: StopSignal
    keep: Literal["best", "all"] = "best"

    def merit(self, result: dict[str, Any]) -> float:
        """The figure of a member's result that selects."""
        return result[self.task.selects][self.task.metric]

    def counts(self, step: int, figures: dict[str, float], before: dict[str, float]) -> bool:
        """Return whether these parameters replace the ones before: of `select last`, the last step's alone.

        Of `best`, strictly better ones: the first of equals stays, as in the original (train.py:286).
        """
        if self.config.select == "last":
            return step == self.num_steps
        metric = self.task.metric
        return not before or figures[metric] > before[metric]

    def batches(self, seed: int) -> TrainBatches:
        """The training batches of a seed."""
        return train_batches(self.encoded["train"], batch_size=self.batch_size, seed=seed, num_steps=self.num_steps)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run, which all its members share: seed and learning rate are data.

    train: the step of `program`, compiled. copy: of parameters, since a step gives those of its state away.
    """

    program: Program
    learner: TaskLearner
    train: CompiledStep
    label: CompiledStep
    copy: Callable[[Any], Any]

    @property
    def abstract(self) -> TrainState:
        """The leaves of a member's state as jax.ShapeDtypeStruct."""
        return self.program.abstract


def member_directory(seed: int, rate: float) -> PurePath:
    """Where in a run a member works."""
    return PurePath("members", f"seed-{seed}-rate-{rate!r}")


@dataclasses.dataclass
class Best:
    """The parameters of a member that count so far, on the devices; their step and figures on dev. None: none yet."""

    params: Any = None
    step: int | None = None
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def member_result(run: RunDirectory, seed: int, rate: float) -> dict[str, Any] | None:
    """What a member's `result.json` holds, on every process; None before it is done."""

    def read() -> dict[str, Any] | None:
        file = run.path / member_directory(seed, rate) / "result.json"
        try:
            return read_signed(file) if file.exists() else None
        except (OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read: {error}; remove it, and it is made again") from error

    return first_process_decides(read)


def make_programs(work: Work) -> Programs:
    """Return the programs of a run."""
    learner = make_task_learner(work.config, work.task)
    program = make_program(learner, work.config, work.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract.params)
    lengths = len(work.batches(0).lengths)
    return Programs(
        program=program,
        learner=learner,
        train=CompiledStep("training", program.step, expected_shapes=lengths),
        label=CompiledStep("evaluation", jax.jit(make_label_step(learner)), expected_shapes=lengths + 1),
        copy=jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings),
    )


def member_settings(work: Work, rate: float) -> Settings:
    """Return the settings of a member at a learning rate."""
    optimizer = dataclasses.replace(work.config.optimizer, peak_lr=rate)
    return settings_of(optimizer, work.num_steps, norms_every=work.config.log_every)


def run_member(work: Work, programs: Programs, seed: int, rate: float, title: str) -> dict[str, Any]:
    """Train one member up to its result, or go on with it; return what `result.json` holds."""
    directory = member_directory(seed, rate)
    if (known := member_result(work.run, seed, rate)) is not None:
        work.run.remove(directory / "checkpoints")
        return known
    with Checkpoints(
        work.run.root / directory / "checkpoints",
        keep_newest=work.config.keep_newest,
        keep_every=work.config.keep_every,
    ) as checkpoints:
        best = _train(_Member(work, programs, seed, rate, checkpoints), title)
    result = finish_member(work, programs, best, seed, rate)
    work.run.remove(directory / "checkpoints")
    return result


@dataclasses.dataclass
class _Member:
    """One member while it is trained."""

    work: Work
    programs: Programs
    seed: int
    rate: float
    checkpoints: Checkpoints
    best: Best = dataclasses.field(default_factory=Best)

    @functools.cached_property
    def data(self) -> TrainBatches:
        """Its training batches."""
        return self.work.batches(self.seed)

    def batches(self, first_step: int) -> Iterator[Any]:
        """Yield the batches from a step on, on the devices."""
        rows = host_rows(self.work.batch_size, self.work.mesh)
        for number in itertools.count(first_step):
            batch = jax.tree.map(lambda x: x[rows], self.data[number])
            yield to_devices(batch, self.work.mesh, self.work.batch_size)

    def evaluate(self, recorder: Recorder, step: int, params: Any) -> None:
        """Evaluate on the split that selects, and keep the parameters where they are the best so far."""
        part = self.work.task.selects
        _, figures = label_part(self.work, self.programs, params, part, self.data.lengths)
        recorder.validation(
            step,
            {f"{part}_{name}": value for name, value in figures.items()},
            said=f"{part} " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()),
        )
        best = self.best
        if self.work.counts(step, figures, best.figures):
            best.params = None  # one copy at a time
            best.params, best.step, best.figures = self.programs.copy(params), step, figures

    def save(self, step: int, state: TrainState) -> None:
        """Start a checkpoint of the state and of the best so far."""
        best = self.best
        saved = saved_part(state) | ({} if best.params is None else {"best": best.params})
        extra = {"best": {"step": best.step, "figures": best.figures}}
        self.checkpoints.save(step, saved, config=self.work.resolved, extra=extra)


def _train(member: _Member, title: str) -> Best:
    """Train a member from its newest checkpoint or its start to its end; return the parameters that count."""
    work, programs, config = member.work, member.programs, member.work.config
    if resumed := bool(member.checkpoints.steps()):
        state, member.best, notes = _resumed(work, programs, member.checkpoints, member.seed, member.rate)
    else:
        state, notes = started_state(work, programs, member.seed)
    first_step = int(state.step)
    scope = {"seed": member.seed, "peak_lr": member.rate}
    recorder = Recorder(
        work.run,
        MetricsLog(work.run.path, first_step if resumed else None, scope=scope),
        start=first_step,
        total=work.num_steps,
        work=member_work(work, programs),
        log_every=config.log_every,
    )
    programs.train.on_compile = functools.partial(recorder.meter.pause, "compilation")
    for note in (title + (f", resumed at step {first_step}" if resumed else ""), *notes):
        recorder.note(note)
    session = Session(
        recorder,
        member.checkpoints,
        work.stop,
        num_steps=work.num_steps,
        evaluate_every=config.eval_every or member.data.steps_per_epoch,
        checkpoint_every=config.checkpoint_every,
        save=member.save,
        evaluate=functools.partial(member.evaluate, recorder),
        describe_batch=functools.partial(batch_rows, member.data),
        began=None if resumed else _began(work),
    )
    settings = replicated(member_settings(work, member.rate), work.mesh)
    run_training(
        state, lambda state, batch: programs.train(state, batch, settings), member.batches(first_step), session
    )
    return member.best


def _began(work: Work) -> str:
    """Return where a member that is not resumed takes its first state from, for people."""
    return "from scratch" if work.source is None else f"with the parameters of {work.source.name}"


def _resumed(
    work: Work, programs: Programs, checkpoints: Checkpoints, seed: int, rate: float
) -> tuple[TrainState, Best, list[str]]:
    """The state of the newest sound checkpoint and the best so far at that step; sentences for the log."""
    state = saved_part(programs.abstract)

    def wanted(metadata: Metadata) -> Any:
        return state | ({"best": programs.abstract.params} if "best" in metadata.tree else {})

    restored = checkpoints.restore(wanted)
    notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
    best = Best(restored.state.get("best"), **restored.extra.get("best", {}))
    if "best" not in restored.extra:  # a run of an earlier version, which kept the best beside its checkpoints
        kept = Checkpoints(work.run.root / member_directory(seed, rate) / "kept", read_only=True)
        if steps := [step for step in first_process_decides(kept.steps) if step <= restored.step]:
            found = kept.restore_partial({"params": programs.abstract.params}, step=steps[-1])
            best = Best(found.state["params"], found.step, found.extra["dev"])
    return from_saved(restored.state, programs.abstract, seed), best, notes


def finish_member(work: Work, programs: Programs, best: Best, seed: int, rate: float) -> dict[str, Any]:
    """Keep the parameters that count, label every part with them; returns what `result.json` holds."""
    place = member_directory(seed, rate) / "kept"
    assert best.step is not None
    if not _is_kept(work, best, place):
        first_process_decides(lambda: work.run.remove(place))
        with Checkpoints(work.run.root / place, keep_newest=1) as kept:
            extra = {"dev": best.figures, "step": best.step}
            kept.save(best.step, {"params": best.params}, config=work.resolved | {"seed": seed}, extra=extra)
    return write_result(work, programs, best.params, best.step, seed, rate)


def _is_kept(work: Work, best: Best, place: PurePath) -> bool:
    """Return whether these very parameters are kept already: an earlier start was stopped after that."""
    kept = Checkpoints(work.run.root / place, read_only=True)
    if first_process_decides(kept.steps) != [best.step]:
        return False
    try:
        return kept.metadata().checksums == leaf_checksums({"params": best.params})
    except DamagedCheckpoint:  # they are here still: they are kept once more
        return False


def batch_rows(data: TrainBatches, number: int) -> str:
    """The rows of a batch, for an error."""
    return f"train rows {data[number].index.tolist()} (0-based)"


def member_work(work: Work, programs: Programs) -> Callable[[int], tuple[float, float]]:
    """Tokens and FLOPs of a member up to a step, as the meter wants them."""
    encoded = work.encoded["train"]
    length = encoded.longest.mean()
    tokens = work.batch_size * length * encoded.num_sequences
    return even_work(tokens, programs.learner.flops_per_token(int(length)))


def started_state(work: Work, programs: Programs, seed: int) -> tuple[TrainState, list[str]]:
    """The state of a member that begins: fresh, or with the source's parameters; sentences about it.

    Rows of the table are fresh where the source's tokenizer lacks the id. One trained here has GPT-1's start, delimiter
    and extract from the beginning: their rows are those that pretraining has left, though it never met the ids, where
    the original draws them anew (section 3.2; train.py:410).
    """
    fresh, config = programs.program.fresh_state(seed), work.config
    if work.source is None:
        return fresh, []
    layers, fresh_names = config.transfer_layers, ["head/.*"]
    if config.reinit_layers:
        layers = config.model.num_layers - config.reinit_layers
        fresh_names.append("backbone/pooler/.*")
    return with_parameters(
        fresh,
        work.source,
        allow_fresh=[*fresh_names, *fresh_pooler(work.source, fresh)],
        grow=grown_leaves(programs.learner.model),
        transfer_layers=layers,
    )


def grown_leaves(model: Model) -> dict[str, int]:
    """Return the leaves, with their axis, that have rows for the special tokens that fine-tuning adds."""
    if model.family.input_format != "gpt1":
        return {}
    return {f"backbone/{name}": 0 for name in model.family.vocabulary_leaves}


def label_part(
    work: Work,
    programs: Programs,
    params: Any,
    part: str,
    lengths: tuple[int, ...],
    threshold: float | None = None,
) -> tuple[Predicted, dict[str, float]]:
    """Predictions for a part, and its figures (none where it has no labels)."""
    encoded = work.encoded[part]
    size = work.config.eval_batch_size or work.batch_size
    labelled = label_split(programs.label, params, encoded, work.mesh, batch_size=size, lengths=lengths)
    return labelled.predicted(work.task, encoded, threshold)


def write_result(work: Work, programs: Programs, params: Any, step: int, seed: int, rate: float) -> dict[str, Any]:
    """Label every part with the parameters that count and write what the member came to; what `result.json` holds.

    The part that selects comes first: what is tuned on it, the threshold of unanswerable questions, is then used.
    """
    selects, lengths = work.task.selects, work.batches(seed).lengths
    parts = [part for part in work.encoded if part != "train"]
    found: dict[str, tuple[Predicted, dict[str, float]]] = {}
    threshold = None
    for part in sorted(parts, key=lambda part: part != selects):
        found[part] = label_part(work, programs, params, part, lengths, threshold)
        threshold = found[selects][1].get("threshold")
    result: dict[str, Any] = {"seed": seed, "learning_rate": rate, "step": step}
    result |= {part: found[part][1] for part in parts if found[part][1]}
    lines: list[str] = []
    for part in parts:
        for index, (prediction, scores) in enumerate(found[part][0].lines):
            line = {"split": part, "index": index, "seed": seed, "learning_rate": rate}
            lines.append(json.dumps(line | {"prediction": prediction, "scores": scores}))
    text = "".join(line + "\n" for line in lines)
    result["predictions_sha256"] = hashlib.sha256(text.encode()).hexdigest()

    def write() -> None:
        directory = work.run.path / member_directory(seed, rate)
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / "predictions.jsonl", text)
        for part in parts:
            write_files(directory / "files", found[part][0])
        write_json(directory / "result.json", result, signed=True)
        work.run.upload()

    first_process_decides(write)
    return result


def read_predictions(run: RunDirectory, result: dict[str, Any]) -> bytes:
    """The predictions that a member wrote with its result. InputError where they are damaged."""
    directory = run.path / member_directory(result["seed"], result["learning_rate"])
    file, remedy = directory / "predictions.jsonl", f"remove {directory / 'result.json'}, and both are made again"
    try:
        content = read_regular(file, largest=1 << 40)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    if result.get("predictions_sha256", (found := hashlib.sha256(content).hexdigest())) != found:
        raise InputError(f"{file} was altered: its hash is not the one in result.json; {remedy}")
    return content


def write_failure(work: Work, seed: int, rate: float, reason: str) -> dict[str, Any]:
    """Write down that a member cannot be trained to its end; what `result.json` holds."""
    result = {"seed": seed, "learning_rate": rate, "failed": reason}

    def write() -> None:
        directory = work.run.path / member_directory(seed, rate)
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "result.json", result)
        work.run.upload()

    first_process_decides(write)
    log.warning("seed %d at learning rate %g failed: %s; the other runs go on", seed, rate, reason)
    return result


def drop_beaten(work: Work, results: Sequence[dict[str, Any]]) -> None:
    """Remove the parameters of members that another seed at their rate has beaten: they cannot be the best."""
    if work.keep == "all":
        return

    finished = [result for result in results if "failed" not in result]

    def drop() -> None:
        for rate in {result["learning_rate"] for result in finished}:
            at_rate = [result for result in finished if result["learning_rate"] == rate]
            best = max(at_rate, key=work.merit)
            for result in at_rate:
                if result is not best:
                    work.run.remove(member_directory(result["seed"], rate) / "kept")

    first_process_decides(drop)


def write_files(directory: Path, predicted: Predicted) -> None:
    """The files that others read (a submission server, SQuAD's script), below `directory`."""
    for name, content in predicted.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=4, ensure_ascii=False) + "\n"
        write_file(path, text)
