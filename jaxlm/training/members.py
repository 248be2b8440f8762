"""One member of a fine-tuning run: one seed at one learning rate, trained, evaluated and written down.

A member has a directory `members/seed-S-rate-R` of its own while it is worked on: `checkpoints/` (the training state,
to resume from), `kept/` (the parameters that count), `result.json` and `predictions.jsonl` once it is done.
"""

import dataclasses
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.agreement import first_process_decides
from jaxlm.checkpoints import Checkpoints
from jaxlm.labelling import Labelled, label_split, make_head, make_label_step
from jaxlm.logs import MetricsLog
from jaxlm.models.gpt import GPT, model_flops_per_token
from jaxlm.objectives import sequence_task
from jaxlm.optim import decay_mask, make_optimizer
from jaxlm.output import write_json
from jaxlm.sharding import host_rows, to_devices
from jaxlm.tasks import Task, train_batches
from jaxlm.tasks.loading import EncodedSplit
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.loop import Intervals, train
from jaxlm.training.processes import StopSignal
from jaxlm.training.record import Recorder
from jaxlm.training.run import RunDirectory
from jaxlm.training.start import Source, resume, with_parameters
from jaxlm.training.state import TrainState, abstract_state, fresh_state, saved_part
from jaxlm.training.step import make_train_step

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
    encoded: dict[str, EncodedSplit]
    source: Source | None
    mesh: Mesh
    stop: StopSignal


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled steps of a run; the members of one learning rate share them, as the seed is not part of them."""

    train: CompiledStep
    label: CompiledStep
    init: Callable[[int], Any]
    abstract: TrainState


def member_directory(run: RunDirectory, seed: int, rate: float) -> Path:
    """Where a member works."""
    return run.path / "members" / f"seed-{seed}-rate-{rate!r}"


def make_programs(work: Work, rate: float) -> Programs:
    """The model, its head and its optimizer at one learning rate, as compiled steps."""
    config, mesh = work.config, work.mesh
    model = GPT(config.model, config.execution)
    head = make_head(work.task, config.head_dropout_rate, config.model.init_std)

    def init_params(key: jax.Array) -> Any:
        body_key, head_key = jax.random.split(key)
        example = jnp.zeros((1, 1), jnp.int32)
        states = jnp.zeros((1, 1, config.model.width))
        return {
            "backbone": model.init(body_key, example, example)["params"],
            "head": head.init(head_key, states, train=False)["params"],
        }

    optimizer_config = dataclasses.replace(config.optimizer, peak_lr=rate)
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    optimizer = make_optimizer(optimizer_config, work.num_steps, decay_mask(boxed))
    abstract = abstract_state(init_params, optimizer, mesh)
    objective = sequence_task(model, head, auxiliary_lm=config.auxiliary_lm, loss_chunks=config.execution.loss_chunks)
    step = make_train_step(objective, optimizer, micro_batches=config.micro_batches, norms_every=config.log_every)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    lengths = len(train_batches(work.encoded["train"], batch_size=work.batch_size, seed=0, num_steps=1).lengths)
    return Programs(
        train=CompiledStep(
            "training", jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), expected_shapes=lengths
        ),
        label=CompiledStep("evaluation", jax.jit(make_label_step(model, head)), expected_shapes=lengths + 1),
        init=lambda seed: fresh_state(init_params, optimizer, abstract, seed),
        abstract=abstract,
    )


def run_member(work: Work, programs: Programs, seed: int, rate: float, title: str) -> dict[str, Any]:
    """Train one member up to its result, or go on with it; returns what `result.json` holds."""
    config, task = work.config, work.task
    directory = member_directory(work.run, seed, rate)
    if (directory / "result.json").exists():
        return json.loads((directory / "result.json").read_text(encoding="utf-8"))
    data = train_batches(work.encoded["train"], batch_size=work.batch_size, seed=seed, num_steps=work.num_steps)
    kept = Checkpoints(directory / "kept", keep_newest=1)
    checkpoints = Checkpoints(directory / "checkpoints", keep_newest=config.keep_newest)
    with kept, checkpoints:
        state, notes, resumed = _start(work, programs, checkpoints, seed)
        first_step = int(state.step)
        scope = {"seed": seed, "peak_lr": rate}
        metrics = MetricsLog(work.run.path, first_step if resumed else None, scope=scope)
        recorder = Recorder(
            work.run,
            metrics,
            start=first_step,
            total=work.num_steps,
            tokens_per_step=work.batch_size * work.encoded["train"].longest.mean() * task.num_sequences,
            log_every=config.log_every,
            flops_per_token=model_flops_per_token(config.model, int(work.encoded["train"].longest.mean())),
        )
        programs.train.on_compile = lambda: recorder.meter.pause("compilation")
        for note in (title + (f", resumed at step {first_step}" if resumed else ""), *notes):
            recorder.note(note)
        best = _Best(task, kept, select=config.select, last_step=work.num_steps)

        def evaluate(number: int, params: Any) -> None:
            labelled, figures = _label(work, programs, params, "dev", data.lengths)
            del labelled
            recorder.validation(
                number,
                {f"dev_{name}": value for name, value in figures.items()},
                said="dev " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()),
            )
            if best.is_better(number, figures):
                best.keep(number, params, figures, work.resolved | {"seed": seed})

        def save(number: int, state: TrainState) -> None:
            kept.wait()  # a resume from here does not evaluate again: the best must be on the disk first
            checkpoints.save(number, saved_part(state), config=work.resolved)

        rows = host_rows(work.batch_size, work.mesh)
        batches = (
            to_devices(jax.tree.map(lambda x: x[rows], data[number]), work.mesh, work.batch_size)
            for number in itertools.count(first_step)
        )
        try:
            train(
                state,
                programs.train,
                batches,
                num_steps=work.num_steps,
                intervals=Intervals(config.eval_every or data.steps_per_epoch, config.checkpoint_every),
                recorder=recorder,
                save=save,
                finished_saves=checkpoints.finished,
                evaluate=evaluate,
                stop=work.stop,
                describe_batch=lambda number: f"train rows {data[number].index.tolist()} (0-based)",
            )
        finally:
            recorder.saved(checkpoints.wait())
            recorder.close()
            metrics.close()
        kept.wait()
        result = _write_result(work, programs, kept, directory, seed, rate, data.lengths)
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    return result


def _start(work: Work, programs: Programs, checkpoints: Checkpoints, seed: int) -> tuple[TrainState, list[str], bool]:
    if checkpoints.steps():
        state, notes = resume(checkpoints, programs.abstract, seed)
        return state, notes, True
    fresh = programs.init(seed)
    if work.source is None:
        return fresh, [], False
    state, notes = with_parameters(
        fresh,
        work.source,
        allow_fresh=("head/.*",),
        grow={"backbone/embeddings/tokens": 0},
        transfer_layers=work.config.transfer_layers,
    )
    return state, notes, False


class _Best:
    """Which parameters count: those of the best evaluation on dev, or of the last step."""

    def __init__(self, task: Task, kept: Checkpoints, *, select: str, last_step: int) -> None:
        self.metric, self.kept, self.select, self.last_step = task.metric, kept, select, last_step
        steps = kept.steps()
        self.value = kept.metadata().extra["dev"][self.metric] if steps else None

    def is_better(self, step: int, figures: dict[str, float]) -> bool:
        """Strictly better than all before; the first of equals stays, as in the original (train.py:286)."""
        if self.select == "last":
            return step == self.last_step
        return self.value is None or figures[self.metric] > self.value

    def keep(self, step: int, params: Any, figures: dict[str, float], config: dict[str, Any]) -> None:
        """Save these parameters in place of the former."""
        self.value = figures[self.metric]
        if step not in self.kept.steps():  # after a resume the same evaluation comes again
            self.kept.save(step, {"params": params}, config=config, extra={"dev": figures, "step": step})


def _label(
    work: Work, programs: Programs, params: Any, part: str, lengths: tuple[int, ...]
) -> tuple[Labelled, dict[str, float]]:
    encoded = work.encoded[part]
    size = work.config.eval_batch_size or work.batch_size
    labelled = label_split(programs.label, params, encoded, work.mesh, batch_size=size, lengths=lengths)
    return labelled, labelled.metrics(work.task, encoded) if encoded.labelled else {}


def _write_result(
    work: Work, programs: Programs, kept: Checkpoints, directory: Path, seed: int, rate: float, lengths: tuple[int, ...]
) -> dict[str, Any]:
    restored = kept.restore_partial({"params": programs.abstract.params})
    result: dict[str, Any] = {"seed": seed, "learning_rate": rate, "step": restored.step}
    lines: list[str] = []
    for part in work.encoded:
        if part == "train":
            continue
        labelled, figures = _label(work, programs, restored.state["params"], part, lengths)
        if figures:
            result[part] = figures
        for index, outputs in enumerate(labelled.outputs):
            prediction, scores = work.task.prediction(outputs)
            line = {"split": part, "index": index, "seed": seed, "learning_rate": rate}
            lines.append(json.dumps(line | {"prediction": prediction, "scores": scores}))

    def write() -> None:
        text = "".join(line + "\n" for line in lines)
        (directory / "predictions.jsonl").write_text(text, encoding="utf-8")
        write_json(directory / "result.json", result)

    first_process_decides(write)
    return result
