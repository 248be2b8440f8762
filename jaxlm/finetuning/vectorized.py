"""Several members of a fine-tuning run in one program: their states are stacked and a step maps over them.

A fine-tuning step of one member leaves an accelerator idle for most of the time; a step of twenty takes little longer.
The stack lies over the devices, each of which has whole members to itself and talks to no other. On a CPU, which one
member keeps busy, the members of a device go one after the other within the program. The best parameters so far stay on
the devices, stacked too. Seeds, rates and batches are data, and keys are threefry's, whose bits are the same under
`vmap`: so every member comes to the numbers that it has alone.

A member whose loss is not finite stays as it was before that step, and the others go on.

A group has one directory `members/group-FIRST-COUNT` with checkpoints of all its states together; what a member came to
is written where `members.py` writes it.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.distributed.devices import peak_tflops, platform
from jaxlm.distributed.mesh import host_rows, to_devices
from jaxlm.distributed.partition import use_rules
from jaxlm.errors import InputError
from jaxlm.finetuning.trial import (
    Best,
    Programs,
    Work,
    batch_rows,
    drop_beaten,
    finish_member,
    label_part,
    member_directory,
    member_result,
    member_settings,
    member_work,
    run_member,
    started_state,
    write_failure,
)
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import Diverged, NotFinite, Recorder
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.loop import Session, run_training
from jaxlm.training.state import TrainState, saved_part
from jaxlm.training.step import Settings

log = logging.getLogger(__name__)

Member = tuple[int, float]  # seed and rate
MEMBERS = PartitionSpec(("data", "fsdp"))
MEMORY_SHARE = 0.9  # of a device that a group may fill


def run_members(work: Work, programs: Programs, members: Sequence[Member], origin: str) -> list[dict[str, Any]]:
    """Train all members, in groups or one by one, up to what their `result.json` hold. origin: for the log."""
    size = group_size(work, programs, len(members))
    results: list[dict[str, Any]] = []
    for first in range(0, len(members), size):
        some = members[first : first + size]
        if size == 1:
            ((seed, rate),) = some
            title = f"run {first + 1} of {len(members)}: {origin}, seed {seed}, rate {rate:g}"
            try:
                results.append(run_member(work, programs, seed, rate, title))
            except Diverged as error:
                if len(members) == 1:
                    raise
                results.append(write_failure(work, seed, rate, error.reason))
                work.run.remove(member_directory(seed, rate) / "checkpoints")
        else:
            listed = ", ".join(f"{seed} at {rate:g}" for seed, rate in some)
            title = f"runs {first + 1} to {first + len(some)} of {len(members)} together: {origin}, seeds {listed}"
            results += run_group(work, programs, some, first, title)
        drop_beaten(work, results)
    return results


def group_size(work: Work, programs: Programs, count: int) -> int:
    """Members that train together: those asked for, else as many as fit; one on a CPU and under a cut model."""
    asked, mesh = work.config.members_per_group, work.mesh
    cut = mesh.shape["fsdp"] * mesh.shape["tensor"] > 1
    if asked > 1 and cut:
        raise InputError(
            f"members_per_group {asked}: members stay whole on a device; give --mesh.fsdp 1 --mesh.tensor 1"
        )
    if asked or count == 1 or cut or one_at_a_time():
        return min(asked or 1, count)
    most = min(count, mesh.size * max(1, _members_per_device(work, programs)))
    return -(-count // -(-count // most))  # groups of about the same size


def run_group(
    work: Work, programs: Programs, members: Sequence[Member], first: int, title: str
) -> list[dict[str, Any]]:
    """Train these members side by side, or go on with them; what their `result.json` hold."""
    results = [member_result(work.run, *member) for member in members]
    directory = PurePath("members", f"group-{first}-{len(members)}")
    if None in results:
        group = _Group(work, programs, members)
        states = Checkpoints(
            work.run.root / directory / "checkpoints",
            keep_newest=work.config.keep_newest,
            keep_every=work.config.keep_every,
        )
        with states as checkpoints:
            best, failed = _train(group, checkpoints, title)
        for number, (seed, rate) in enumerate(members):
            if results[number] is not None:
                continue
            if number in failed:
                results[number] = write_failure(work, seed, rate, group.failure(number, failed[number]))
            else:
                alone = Best(group.take(best.params, number), best.steps[number], best.figures[number])
                results[number] = finish_member(work, programs, alone, seed, rate)
    work.run.remove(directory)
    return [result for result in results if result is not None]


def one_at_a_time() -> bool:
    """Whether members of a device run one after the other: a CPU gains nothing from a batch of them."""
    return platform() == "cpu"


@dataclass
class _Best:
    """The parameters of each member that count, on the devices; their steps and figures on dev. None: none yet."""

    params: Any
    steps: list[int | None]
    figures: list[dict[str, float]]


class _Group:
    """The programs of a group. Filler members make their number a multiple of the devices; nobody looks at them."""

    def __init__(self, work: Work, programs: Programs, members: Sequence[Member]) -> None:
        self.work, self.programs, self.members = work, programs, list(members)
        self.all = self.members + [self.members[-1]] * (-len(self.members) % work.mesh.size)
        self.sharding = NamedSharding(work.mesh, MEMBERS)
        lead = lambda leaf: jax.ShapeDtypeStruct((len(self.all), *leaf.shape), leaf.dtype, sharding=self.sharding)  # noqa: E731
        self.abstract: TrainState = jax.tree.map(lead, programs.abstract)
        self.data = [work.batches(seed) for seed, _ in self.all]
        settings = [member_settings(work, rate) for _, rate in self.all]
        self.settings = self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *settings))
        self.jitted = jax.jit(self._step, donate_argnums=0, out_shardings=(self._shardings(self.abstract), None))
        self.step = CompiledStep("group's training", self.jitted, expected_shapes=len(self.data[0].lengths))
        alone = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract.params)
        self._take = jax.jit(lambda stack, k: jax.tree.map(lambda x: x[k], stack), out_shardings=alone)
        params = self._shardings(self.abstract.params)
        self.keep = jax.jit(_where, donate_argnums=2, out_shardings=params)
        self.copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=params)

    def started(self) -> tuple[TrainState, list[str]]:
        """The states of members that begin, each made as it would be alone; sentences about the first."""
        shardings = self._shardings(self.abstract)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract)  # noqa: E731
        put_one = lambda stack, k, one: jax.tree.map(lambda s, x: s.at[k].set(x), stack, one)  # noqa: E731
        put = jax.jit(put_one, donate_argnums=0, out_shardings=shardings)
        stack: TrainState = jax.jit(zeros, out_shardings=shardings)()
        said: list[str] = []
        for number, (seed, _) in enumerate(self.all):
            state, notes = started_state(self.work, self.programs, seed)
            stack, said = put(stack, number, state), said or notes
        return stack, said

    def resumed(self, checkpoints: Checkpoints) -> tuple[TrainState, _Best, dict[int, int], list[str]]:
        """The states, the best so far and the failed members of the newest sound checkpoint; sentences for the log."""
        restored = checkpoints.restore(self.saved(self.abstract, self.abstract.params))
        notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
        seeds = self.spread(np.array([seed for seed, _ in self.all], np.uint32))
        saved = restored.state
        failed = {int(number): step for number, step in restored.extra.get("failed", {}).items()}
        last = len(self.members) - 1  # fillers are the last member once more
        halted = self.spread(np.array([min(number, last) in failed for number in range(len(self.all))], np.bool_))
        state = TrainState(saved["step"], saved["params"], saved["opt_state"], seed=seeds, halted=halted)
        best = restored.extra["best"]
        return state, _Best(saved.get("best"), best["steps"], best["figures"]), failed, notes

    def failure(self, number: int, step: int) -> str:
        """The reason of a member that failed in `step`, as it would be alone."""
        return f"loss or gradient are not finite in step {step} ({batch_rows(self.data[number], step - 1)})"

    def saved(self, state: TrainState, best: Any) -> dict[str, Any]:
        """What a checkpoint holds."""
        return saved_part(state) | ({"best": best} if self.work.config.select == "best" else {})

    def take(self, stack: Any, number: int) -> Any:
        """The parameters of one member, laid out as those of a member alone."""
        return self._take(stack, jnp.int32(number))

    def spread(self, stacked: Any) -> Any:
        """NumPy arrays (members, …) onto the devices, each process giving those of its own."""
        rows = host_rows(len(self.all), self.work.mesh)
        return to_devices(jax.tree.map(lambda x: x[rows], stacked), self.work.mesh, len(self.all))

    def batch(self, number: int) -> Any:
        """The batches of a step, for `step`."""
        batches = [data[number] for data in self.data]
        return self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))

    def _step(self, state: TrainState, batch: Any, settings: Settings) -> tuple[TrainState, dict]:
        """A step of each member. The norms of updates are left out: under a map they would be made in every step."""

        def one(inputs: tuple) -> tuple[TrainState, dict]:
            new, metrics = self.programs.program.pure_step(*inputs)
            return new, {name: value for name, value in metrics.items() if name != "update_norm"}

        def of_a_device(*inputs: Any) -> tuple[TrainState, dict]:
            with use_rules(None):  # a member is whole on its device
                return jax.lax.map(one, inputs) if one_at_a_time() else jax.vmap(one)(inputs)

        mesh = self.work.mesh
        spread = jax.shard_map(of_a_device, mesh=mesh, in_specs=MEMBERS, out_specs=MEMBERS, check_vma=False)
        found: tuple[TrainState, dict] = spread(state, batch, settings)
        return found

    def _shardings(self, tree: Any) -> Any:
        return jax.tree.map(lambda _: self.sharding, tree)


def _train(group: _Group, checkpoints: Checkpoints, title: str) -> tuple[_Best, dict[int, int]]:
    """The parameters that count, and of the members whose loss was not finite the step in which it was not."""
    work, members = group.work, group.members
    config, task = work.config, work.task
    keeps_best = config.select == "best"
    if resumed := bool(checkpoints.steps()):
        state, best, failed, notes = group.resumed(checkpoints)
    else:
        state, notes = group.started()
        failed = {}
        empty: list[dict[str, float]] = [{} for _ in members]
        best = _Best(group.copy(state.params) if keeps_best else None, [None] * len(members), empty)
    first_step = int(jnp.max(state.step))
    logs = _open_logs(work, members, first_step if resumed else None)
    alone = member_work(work, group.programs)
    recorder = GroupRecorder(
        work.run,
        logs,
        members,
        start=first_step,
        total=work.num_steps,
        work=lambda step: (len(members) * alone(step)[0], len(members) * alone(step)[1]),
        log_every=config.log_every,
        failed=failed,
    )
    group.step.on_compile = lambda: recorder.meter.pause("compilation")
    for note in (title + (f", resumed at step {first_step}" if resumed else ""), *notes):
        recorder.note(note)

    def evaluate(number: int, params: Any) -> None:
        better = np.zeros(len(group.all), np.bool_)
        for k in (k for k in range(len(members)) if k not in failed):
            _, figures = label_part(work, group.programs, group.take(params, k), task.selects, group.data[k].lengths)
            recorder.validation_of(k, number, {f"{task.selects}_{name}": value for name, value in figures.items()})
            better[k] = work.counts(number, figures, best.figures[k])
            if better[k]:
                best.steps[k], best.figures[k] = number, figures
        values = [figures[task.metric] for figures in best.figures if figures]
        if values:
            recorder.note(
                f"step {number}: {task.selects} {task.metric} so far " + ", ".join(f"{v:.4f}" for v in values)
            )
        if keeps_best:
            best.params = group.keep(group.spread(better), params, best.params)

    def save(number: int, state: TrainState) -> None:
        halted = {str(number): step for number, step in failed.items()}
        extra = {"best": {"steps": best.steps, "figures": best.figures}, "failed": halted}
        checkpoints.save(number, group.saved(state, best.params), config=work.resolved, extra=extra)

    session = Session(
        recorder,
        checkpoints,
        work.stop,
        num_steps=work.num_steps,
        evaluate_every=config.eval_every or group.data[0].steps_per_epoch,
        checkpoint_every=config.checkpoint_every,
        save=save,
        evaluate=evaluate,
        describe_batch=lambda number: "that of the last member",
    )
    batches = (group.batch(number) for number in itertools.count(first_step))
    try:
        state = run_training(state, lambda state, batch: group.step(state, batch, group.settings), batches, session)
        best.params = best.params if keeps_best else state.params
    except Diverged:
        log.warning("no run of %d together goes on", len(members))
    return best, failed


class GroupRecorder(Recorder):
    """A recorder with a log for each member; the live line has the means of those that go on.

    failed: of each member whose loss was not finite the step in which it was not; it is added to.
    """

    def __init__(
        self, run: Any, logs: Sequence[MetricsLog], members: Sequence[Member], failed: dict[int, int], **settings: Any
    ) -> None:
        super().__init__(run, logs[0], **settings)
        self.logs, self.members, self.failed = list(logs), list(members), failed

    def training(self, step: int, metrics: dict[str, Any]) -> None:
        """Take in the metrics of a step, arrays of one number a member. Raises NotFinite when no member goes on."""
        self.meter.advance(step)
        values = jax.tree.map(_every_member, metrics)
        for number in np.flatnonzero(values.pop("halted")[: len(self.logs)]).tolist():
            if number not in self.failed:
                self.failed[number] = step
                seed, rate = self.members[number]
                self.warn(f"step {step}: loss or gradient of seed {seed} at rate {rate:g} are not finite; it ends here")
        alive = [number for number in range(len(self.logs)) if number not in self.failed]
        if not alive:
            raise NotFinite(step)
        if step % self.log_every and step != self.total:
            return
        reading = self.meter.read()
        peak = peak_tflops()
        mfu = None if peak is None else reading.flops_per_second / (peak * 1e12 * jax.device_count())
        speed = {"tokens_per_second": reading.tokens_per_second, "wait_share": reading.waiting, "mfu": mfu}
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

    def validation_of(self, number: int, step: int, figures: dict[str, float]) -> None:
        """Write the figures of a member's evaluation."""
        self.logs[number].write(step, figures)

    def close(self) -> None:
        """Close the logs of all members too."""
        super().close()
        for log in self.logs:
            log.close()

    def sync(self) -> None:
        """Bring all lines to where the run lies; before a checkpoint counts."""
        for log in self.logs:
            log.sync()
        self.run.upload()


def _open_logs(work: Work, members: Sequence[Member], resume_step: int | None) -> list[MetricsLog]:
    """A log for each member. One that drops lines writes the file anew, so all do that before the first stays open."""
    opened: Callable[[int, float], MetricsLog] = lambda seed, rate: MetricsLog(  # noqa: E731
        work.run.path, resume_step, scope={"seed": seed, "peak_lr": rate}
    )
    for member in members:
        opened(*member).close()
    return [opened(*member) for member in members]


def _where(better: jax.Array, new: Any, old: Any) -> Any:
    """Member by member `new` where it is better, else `old`."""
    choose = lambda x, y: jnp.where(better.reshape(-1, *[1] * (x.ndim - 1)), x, y)  # noqa: E731
    return jax.tree.map(choose, new, old)


def _every_member(x: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _members_per_device(work: Work, programs: Programs) -> int:
    """How many members fit a device, by what the compiled program of one says it needs."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return 1
    group = _Group(work, programs, [(0, 0.0)] * work.mesh.size)
    longest = max(range(min(group.data[0].steps_per_epoch, 256)), key=group.data[0].length_at)
    memory = group.jitted.lower(group.abstract, group.batch(longest), group.settings).compile().memory_analysis()
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert memory is not None
    params = size(programs.abstract.params)
    one = memory.argument_size_in_bytes + memory.temp_size_in_bytes + params  # and the best so far
    return int((MEMORY_SHARE * stats["bytes_limit"] - 2 * params) // one)  # one member's aside, while it is evaluated
