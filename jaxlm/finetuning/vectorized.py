"""Several trials of a fine-tuning run vectorized in one program: their states are stacked and a step maps over them.

A fine-tuning step of one trial leaves an accelerator idle for most of the time; a step of twenty takes little longer.
The stack is sharded over the devices. Each device holds whole trials and does not communicate with the others. On a
CPU, which one trial keeps busy, the trials of a device run in sequence within the program. The best parameters so far
stay on the devices, stacked too. Seeds, learning rates and batches are data, and the keys are threefry's, whose bits
are the same under `vmap`: every trial computes the same numbers as in a program of its own.

A trial whose loss is not finite keeps the state before that step, and the others continue.

A group of trials has one directory `members/group-FIRST-COUNT` with checkpoints of all its states together. The result
of each trial is written to the directory that `trial.py` describes.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.distributed.devices import memory_in_use, peak_tflops, platform
from jaxlm.distributed.mesh import host_rows, to_devices
from jaxlm.distributed.partition import use_rules
from jaxlm.errors import InputError
from jaxlm.finetuning.patience import Patience
from jaxlm.finetuning.trial import (
    Best,
    Programs,
    TrialContext,
    batch_rows,
    drop_beaten,
    evaluate_split,
    finish_trial,
    raw_metric,
    run_trial,
    started_state,
    trial_directory,
    trial_result,
    trial_settings,
    trial_work,
    write_failure,
)
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import Diverged, NotFinite, Recorder
from jaxlm.tasks import TrainBatches
from jaxlm.training.loop import Outcome, ScheduledEvaluation, Session, run_training
from jaxlm.training.program import CompiledStep
from jaxlm.training.step import Settings, TrainState, saved_part, state_of

log = logging.getLogger(__name__)

Trial = tuple[int, float]  # seed and learning rate
TRIALS = PartitionSpec(("data", "fsdp"))
MEMORY_FRACTION = 0.9  # of a device's memory that a group may use


def run_trials(context: TrialContext, programs: Programs, trials: Sequence[Trial], origin: str) -> list[dict[str, Any]]:
    """Train all trials, vectorized or one by one; return the contents of their `result.json`. origin: for the log."""
    size = trials_per_program(context, programs, len(trials))
    results: list[dict[str, Any]] = []
    for first in range(0, len(trials), size):
        some = trials[first : first + size]
        if size == 1:
            ((seed, rate),) = some
            title = f"run {first + 1} of {len(trials)}: {origin}, seed {seed}, rate {rate:g}"
            try:
                results.append(run_trial(context, programs, seed, rate, title))
            except Diverged as error:
                if len(trials) == 1:
                    raise
                results.append(write_failure(context, seed, rate, error.reason))
                context.run.remove(trial_directory(seed, rate) / "checkpoints")
        else:
            listed = ", ".join(f"{seed} at {rate:g}" for seed, rate in some)
            title = f"runs {first + 1} to {first + len(some)} of {len(trials)} together: {origin}, seeds {listed}"
            results += run_vectorized(context, programs, some, first, title)
        drop_beaten(context, results)
    return results


def trials_per_program(context: TrialContext, programs: Programs, count: int) -> int:
    """Return the number of trials per program: `members_per_group`, or for 0 as many as fit.

    For 0 it is 1 on a CPU and with a sharded model.
    """
    asked, mesh = context.config.members_per_group, context.mesh
    sharded = mesh.shape["fsdp"] * mesh.shape["tensor"] > 1
    if asked > 1 and sharded:
        raise InputError(
            f"members_per_group must be 1 with a model sharded over devices, got {asked}; "
            "give --mesh.fsdp 1 --mesh.tensor 1"
        )
    if asked or count == 1 or sharded or one_at_a_time():
        return min(asked or 1, count)
    most = min(count, mesh.size * max(1, _trials_per_device(context, programs)))
    return -(-count // -(-count // most))  # groups of about the same size


def run_vectorized(
    context: TrialContext, programs: Programs, trials: Sequence[Trial], first: int, title: str
) -> list[dict[str, Any]]:
    """Train or resume these trials together; return the contents of their `result.json`."""
    results = [trial_result(context.run, *trial) for trial in trials]
    directory = PurePath("members", f"group-{first}-{len(trials)}")
    if None in results:
        group = _VectorizedTrials(context, programs, trials)
        states = Checkpoints(
            context.run.root / directory / "checkpoints",
            keep_newest=context.config.keep_newest,
            keep_every=context.config.keep_every,
        )
        with states as checkpoints:
            best, failed = _train(group, checkpoints, title)
        for number, (seed, rate) in enumerate(trials):
            if results[number] is not None:
                continue
            if number in failed:
                results[number] = write_failure(context, seed, rate, group.failure(number, failed[number]))
            else:
                params = group.take(best.params, number)
                alone = Best(params, best.steps[number], best.metrics[number], best.patience[number])
                results[number] = finish_trial(context, programs, alone, seed, rate)
    context.run.remove(directory)
    return [result for result in results if result is not None]


def one_at_a_time() -> bool:
    """Return True if the trials of a device run in sequence: a CPU gains nothing from vectorizing them."""
    return platform() == "cpu"


@dataclass
class _Best:
    """The best parameters of each trial so far, on the devices, with their steps and metrics on dev. None: none yet.

    patience: for each trial the evaluations since its best one.
    """

    params: Any
    steps: list[int | None]
    metrics: list[dict[str, float]]
    patience: list[Patience]

    @property
    def stopped(self) -> list[int]:
        """The trials that ended early."""
        return [number for number, patience in enumerate(self.patience) if patience.stopped_at is not None]


class _VectorizedTrials:
    """The programs of a group of trials. Unused copies of the last one pad it to a multiple of the devices."""

    def __init__(self, context: TrialContext, programs: Programs, trials: Sequence[Trial]) -> None:
        self.context, self.programs, self.trials = context, programs, list(trials)
        self.all = self.trials + [self.trials[-1]] * (-len(self.trials) % context.mesh.size)
        self.sharding = NamedSharding(context.mesh, TRIALS)

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(self.all), *leaf.shape), leaf.dtype, sharding=self.sharding)

        self.abstract: TrainState = jax.tree.map(stacked, programs.abstract)
        self.data = [context.batches(seed) for seed, _ in self.all]
        settings = [trial_settings(context, rate) for _, rate in self.all]
        self.settings = self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *settings))
        self.jitted = jax.jit(self._step, donate_argnums=0, out_shardings=(self._shardings(self.abstract), None))
        self.step = CompiledStep("group's training", self.jitted, expected_shapes=len(self.data[0].lengths))
        alone = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract.params)
        self._take = jax.jit(lambda stack, k: jax.tree.map(lambda x: x[k], stack), out_shardings=alone)
        params = self._shardings(self.abstract.params)
        self.keep = jax.jit(_where, donate_argnums=2, out_shardings=params)
        self.either = jax.jit(jnp.logical_or, out_shardings=self.sharding)
        self.copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=params)

    def started(self) -> tuple[TrainState, list[str]]:
        """Return the first states, each as in a program of its own, and notes on the first of them."""
        shardings = self._shardings(self.abstract)

        def zeros() -> TrainState:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract)

        def put_one(stack: TrainState, k: int, one: TrainState) -> TrainState:
            return jax.tree.map(lambda s, x: s.at[k].set(x), stack, one)

        put = jax.jit(put_one, donate_argnums=0, out_shardings=shardings)
        stack: TrainState = jax.jit(zeros, out_shardings=shardings)()
        first_notes: list[str] = []
        for number, (seed, _) in enumerate(self.all):
            state, notes = started_state(self.context, self.programs, seed)
            stack, first_notes = put(stack, number, state), first_notes or notes
        return stack, first_notes

    def resumed(self, checkpoints: Checkpoints) -> tuple[TrainState, _Best, dict[int, int], list[str]]:
        """Return the states, best parameters and failed trials of the newest valid checkpoint, and notes on it."""
        restored = checkpoints.restore(self.saved(self.abstract, self.abstract.params))
        notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
        seeds = self.spread(np.array([seed for seed, _ in self.all], np.uint32))
        saved = restored.state
        failed = {int(number): step for number, step in restored.extra.get("failed", {}).items()}
        extra = restored.extra["best"]
        patience = [Patience(**values) for values in restored.extra.get("patience", [{} for _ in self.trials])]
        best = _Best(saved.get("best"), extra["steps"], extra["figures"], patience)
        state = state_of(saved, seed=seeds, halted=self.flags([*failed, *best.stopped]))
        return state, best, failed, notes

    def flags(self, numbers: Sequence[int]) -> jax.Array:
        """Return True for these trials, on the devices; the padding repeats the last trial."""
        last = len(self.trials) - 1
        return self.spread(np.array([min(number, last) in numbers for number in range(len(self.all))], np.bool_))

    def failure(self, number: int, step: int) -> str:
        """Return the reason for the failure of a trial in `step`, worded as for a trial of its own program."""
        return f"loss or gradient are not finite in step {step} ({batch_rows(self.data[number], step - 1)})"

    def saved(self, state: TrainState, best: Any) -> dict[str, Any]:
        """Return the leaves of a checkpoint."""
        return saved_part(state) | ({"best": best} if self.context.keeps_best else {})

    def take(self, stack: Any, number: int) -> Any:
        """Return the parameters of one trial, with the shardings of a trial of its own program."""
        return self._take(stack, jnp.int32(number))

    def spread(self, stacked: Any) -> Any:
        """Put NumPy arrays (trials, …) onto the devices; each process gives the rows of its own devices."""
        rows = host_rows(len(self.all), self.context.mesh)
        return to_devices(jax.tree.map(lambda x: x[rows], stacked), self.context.mesh, len(self.all))

    def batch(self, number: int) -> Any:
        """Return the stacked batches of a step, for `step`."""
        batches = [data[number] for data in self.data]
        return self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))

    def _step(self, state: TrainState, batch: Any, settings: Settings) -> tuple[TrainState, dict]:
        """Take a step of each trial, without the norms of updates: under `vmap` every step would compute them."""

        def one(inputs: tuple) -> tuple[TrainState, dict]:
            new, metrics = self.programs.program.pure_step(*inputs)
            return new, {name: value for name, value in metrics.items() if name != "update_norm"}

        def of_a_device(*inputs: Any) -> tuple[TrainState, dict]:
            with use_rules(None):  # a trial is whole on its device
                return jax.lax.map(one, inputs) if one_at_a_time() else jax.vmap(one)(inputs)

        mesh = self.context.mesh
        spread = jax.shard_map(of_a_device, mesh=mesh, in_specs=TRIALS, out_specs=TRIALS, check_vma=False)
        found: tuple[TrainState, dict] = spread(state, batch, settings)
        return found

    def _shardings(self, tree: Any) -> Any:
        return jax.tree.map(lambda _: self.sharding, tree)


def _train(group: _VectorizedTrials, checkpoints: Checkpoints, title: str) -> tuple[_Best, dict[int, int]]:
    """Return the best parameters, and for each trial with a loss that was not finite the step in which it was."""
    context, trials = group.context, group.trials
    config, task = context.config, context.task
    keeps_best = context.keeps_best
    if resumed := bool(checkpoints.agreed_steps()):
        state, best, failed, notes = group.resumed(checkpoints)
    else:
        state, notes = group.started()
        failed = {}
        empty: list[dict[str, float]] = [{} for _ in trials]
        patience = [Patience() for _ in trials]
        best = _Best(group.copy(state.weights) if keeps_best else None, [None] * len(trials), empty, patience)
    first_step = int(jnp.max(state.step))
    logs = _open_logs(context, trials, first_step if resumed else None)
    alone = trial_work(context, group.programs)
    recorder = VectorizedRecorder(
        context.run,
        logs,
        trials,
        start=first_step,
        total=context.num_steps,
        work=lambda step: (len(trials) * alone(step)[0], len(trials) * alone(step)[1]),
        log_every=config.log_every,
        failed=failed,
        stopped=best.stopped,
        data=group.data,
        output=context.observer.output,
    )
    halted = list(best.stopped)  # as `state.halted` has them
    group.step.on_compile = lambda: recorder.meter.pause("compilation")
    for note in (title + (f", resumed at step {first_step}" if resumed else ""), *notes):
        recorder.note(note)

    def evaluate(number: int, state: TrainState) -> Outcome:
        better = np.zeros(len(group.all), np.bool_)
        for k in recorder.alive:
            lengths = group.data[k].lengths
            _, metrics = evaluate_split(context, group.programs, group.take(state.weights, k), task.selects, lengths)
            raw = None if state.average is None else group.take(state.params, k)
            line = {f"{task.selects}_{name}": value for name, value in metrics.items()}
            recorder.validation_of(k, number, line | raw_metric(context, group.programs, raw, lengths))
            if config.patience is not None:
                best.patience[k].evaluated(task, config.patience, number, metrics)
            ends = best.patience[k].stopped_at is not None
            better[k] = context.replaces(number, metrics, best.metrics[k]) or (ends and config.select == "last")
            if better[k]:
                best.steps[k], best.metrics[k] = number, metrics
        values = [metrics[task.metric] for metrics in best.metrics if metrics]
        if values:
            recorder.note(
                f"step {number}: {task.selects} {task.metric} so far " + ", ".join(f"{v:.4f}" for v in values)
            )
        if keeps_best:
            best.params = group.keep(group.spread(better), state.weights, best.params)
        for k in set(best.stopped) - set(recorder.stopped):
            seed, rate = trials[k]
            recorder.note(f"seed {seed} at learning rate {rate:g}: {best.patience[k].note(task)}")
        recorder.stopped = best.stopped
        return Outcome(ends=not recorder.alive)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        if recorder.stopped != halted:  # a trial that has ended keeps its state
            halted[:] = recorder.stopped
            state = replace(state, halted=group.either(state.halted, group.flags(halted)))
        return group.step(state, batch, group.settings)

    def save(number: int, state: TrainState) -> None:
        unfinished = {str(number): step for number, step in failed.items()}
        extra: dict[str, Any] = {"best": {"steps": best.steps, "figures": best.metrics}, "failed": unfinished}
        if config.patience is not None:
            extra["patience"] = [patience.to_json() for patience in best.patience]
        checkpoints.save(number, group.saved(state, best.params), config=context.resolved, extra=extra)

    session = Session(
        recorder,
        checkpoints,
        context.observer,
        num_steps=context.num_steps if recorder.alive else first_step,
        checkpoint_every=config.checkpoint_every,
        save=save,
        evaluations=(ScheduledEvaluation(evaluate, config.eval_every or group.data[0].steps_per_epoch),),
        describe_batch=lambda number: "that of the last trial",
    )
    batches = (group.batch(number) for number in itertools.count(first_step))
    try:
        state = run_training(state, step, batches, session)
        best.params = best.params if keeps_best else state.weights
    except Diverged:
        log.warning("none of the %d runs trained together continues", len(trials))
    return best, failed


class VectorizedRecorder(Recorder):
    """A recorder with a log for each trial; the live line shows the means of the trials that continue.

    failed: for each trial with a loss that was not finite, the step in which it was; new failures are added. stopped:
    the trials that ended early. data: the training batches of each trial.
    """

    def __init__(
        self,
        run: Any,
        logs: Sequence[MetricsLog],
        trials: Sequence[Trial],
        failed: dict[int, int],
        stopped: list[int],
        data: Sequence[TrainBatches],
        **settings: Any,
    ) -> None:
        super().__init__(run, logs[0], **settings)
        self.logs, self.trials, self.failed, self.stopped = list(logs), list(trials), failed, stopped
        self.data = data

    @property
    def alive(self) -> list[int]:
        """The trials that continue."""
        return [k for k in range(len(self.logs)) if k not in self.failed and k not in self.stopped]

    def training(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of a step, arrays with one number per trial. Raise NotFinite when no trial continues."""
        self.meter.advance(step)
        values = jax.tree.map(_gathered, {name: value for name, value in metrics.items() if name != "spike"})
        for number in np.flatnonzero(values.pop("halted")[: len(self.logs)]).tolist():
            if number in self.alive:
                self.failed[number] = step
                seed, rate = self.trials[number]
                self.warn(
                    f"step {step}: loss or gradient of seed {seed} at learning rate {rate:g} is not finite; "
                    "this run ends here"
                )
        alive = self.alive
        if not alive:
            raise NotFinite(step)
        if step % self.log_every and step != self.total:
            return
        reading = self.meter.read()
        peak = peak_tflops()
        mfu = None if peak is None else reading.flops_per_second / (peak * 1e12 * jax.device_count())
        speed = {"trained_tokens": round(reading.tokens / len(self.trials)), "mfu": mfu}
        speed |= {"tokens_per_second": reading.tokens_per_second, "wait_share": reading.waiting} | memory_in_use()
        for number in alive:
            self.logs[number].write(step, {name: float(value[number]) for name, value in values.items()} | speed)
        mean = {name: float(np.mean(value[alive])) for name, value in values.items()}
        self.live.update(
            step,
            loss=mean["loss"],
            learning_rate=mean["learning_rate"],
            grad_norm=mean["gradient_norm"],
            tokens_per_second=reading.tokens_per_second,
            mfu=mfu,
            waiting=reading.waiting,
            eta=reading.eta,
        )

    def spike(self, step: int, metrics: dict[str, Any], rows: Callable[[int], str]) -> None:
        """Record the spikes of this step, by trial; `rows` is not used, as each trial has its own."""
        found, norms = jax.tree.map(_gathered, (metrics["spike"], metrics["gradient_norm"]))
        spikes = np.flatnonzero(found.pop("found")[: len(self.logs)]).tolist()
        for number in (number for number in spikes if number in self.alive):
            seed, rate = self.trials[number]
            values = {name: value[number] for name, value in found.items()}
            described = batch_rows(self.data[number], step - 1)
            of = f" of seed {seed} at learning rate {rate:g}"
            self.write_spike(self.logs[number], step, norms[number], values, described, of=of)

    def validation_of(self, number: int, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a trial's evaluation."""
        self.logs[number].write(step, metrics)

    def close(self) -> None:
        """Close the logs of all trials."""
        super().close()
        for log in self.logs:
            log.close()

    def sync(self) -> None:
        """Write all lines to the run's storage. It is called before a checkpoint counts."""
        for log in self.logs:
            log.sync()
        self.run.upload()


def _open_logs(context: TrialContext, trials: Sequence[Trial], resume_step: int | None) -> list[MetricsLog]:
    """Open a log for each trial.

    A log that drops lines rewrites the file, so each is opened and closed once before the first stays open.
    """

    def opened(seed: int, rate: float) -> MetricsLog:
        scope = {"seed": seed, "peak_lr": rate}
        return MetricsLog(context.run.path, resume_step, scope=scope, on_record=context.observer.record)

    for trial in trials:
        opened(*trial).close()
    return [opened(*trial) for trial in trials]


def _where(better: jax.Array, new: Any, old: Any) -> Any:
    """Return, trial by trial, `new` if it is better, else `old`."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(better.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def _gathered(x: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _trials_per_device(context: TrialContext, programs: Programs) -> int:
    """Return the number of trials that fit a device, from the memory analysis of the program for one."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return 1
    group = _VectorizedTrials(context, programs, [(0, 0.0)] * context.mesh.size)
    longest = max(range(min(group.data[0].steps_per_epoch, 256)), key=group.data[0].length_at)
    memory = group.jitted.lower(group.abstract, group.batch(longest), group.settings).compile().memory_analysis()

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    assert memory is not None
    params = size(programs.abstract.params)
    one = memory.argument_size_in_bytes + memory.temp_size_in_bytes + params  # and the best so far
    # One trial's parameters are copied while it is evaluated.
    return int((MEMORY_FRACTION * stats["bytes_limit"] - 2 * params) // one)
