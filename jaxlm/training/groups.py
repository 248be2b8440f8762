"""Several members of a fine-tuning run in one program: their states are stacked and a step maps over them.

A fine-tuning step of one member leaves an accelerator idle for most of the time; a step of twenty takes little longer.
The stack lies over the devices, each of which has whole members to itself and talks to no other. On a CPU, which one
member keeps busy, the members of a device go one after the other within the program. The best parameters so far stay on
the devices, stacked too. Seeds, rates and batches are data, and keys are threefry's, whose bits are the same under
`vmap`: so every member comes to the numbers that it has alone.

A group has one directory `members/group-FIRST-COUNT` with checkpoints of all its states together; what a member came to
is written where `members.py` writes it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.checkpoints import Checkpoints
from jaxlm.devices import peak_tflops, platform
from jaxlm.errors import InputError, RunError
from jaxlm.logs import MetricsLog
from jaxlm.nn.partition import use_rules
from jaxlm.sharding import host_rows, to_devices
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.loop import Intervals, train
from jaxlm.training.members import (
    Programs,
    Work,
    drop_beaten,
    label_part,
    member_directory,
    member_result,
    member_work,
    run_member,
    started_state,
    write_result,
)
from jaxlm.training.record import NotFinite, Recorder
from jaxlm.training.state import TrainState

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
            results.append(run_member(work, programs, seed, rate, title))
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
            best = _train(group, checkpoints, title)
        for number, (seed, rate) in enumerate(members):
            if results[number] is not None:
                continue
            params, step = group.take(best.params, number), best.steps[number]
            extra = {"dev": best.figures[number], "step": step}
            with Checkpoints(work.run.root / member_directory(seed, rate) / "kept", keep_newest=1) as kept:
                if not kept.steps():
                    kept.save(step, {"params": params}, config=work.resolved | {"seed": seed}, extra=extra)
            results[number] = write_result(work, programs, params, step, seed, rate)
    work.run.remove(directory)
    return [result for result in results if result is not None]


def one_at_a_time() -> bool:
    """Whether members of a device run one after the other: a CPU gains nothing from a batch of them."""
    return platform() == "cpu"


@struct.dataclass
class GroupState:
    """The states of all members, each leaf (members, …)."""

    members: TrainState

    @property
    def step(self) -> jax.Array:
        """Updates that every member has made."""
        return jnp.min(self.members.step)

    @property
    def params(self) -> Any:
        """The parameters of all members."""
        return self.members.params


@dataclass
class _Best:
    """Which parameters of each member count, on the devices; since when, and how they did. -1: none yet."""

    params: Any
    steps: list[int]
    figures: list[dict[str, float]] = field(default_factory=list)


class _Group:
    """The programs of a group. Filler members make their number a multiple of the devices; nobody looks at them."""

    def __init__(self, work: Work, programs: Programs, members: Sequence[Member]) -> None:
        self.work, self.programs, self.members = work, programs, list(members)
        self.all = self.members + [self.members[-1]] * (-len(self.members) % work.mesh.size)
        self.sharding = NamedSharding(work.mesh, MEMBERS)
        lead = lambda leaf: jax.ShapeDtypeStruct((len(self.all), *leaf.shape), leaf.dtype, sharding=self.sharding)  # noqa: E731
        self.abstract = GroupState(jax.tree.map(lead, programs.abstract))
        self.data = [work.batches(seed) for seed, _ in self.all]
        self.rates = self.spread(np.array([rate for _, rate in self.all], np.float32))
        self.jitted = jax.jit(self._step, donate_argnums=0, out_shardings=(self._shardings(self.abstract), None))
        self.step = CompiledStep("group's training", self.jitted, expected_shapes=len(self.data[0].lengths))
        alone = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract.params)
        self._take = jax.jit(lambda stack, k: jax.tree.map(lambda x: x[k], stack), out_shardings=alone)
        params = self._shardings(self.abstract.params)
        self.keep = jax.jit(_where, donate_argnums=2, out_shardings=params)
        self.copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=params)

    def started(self) -> tuple[GroupState, list[str]]:
        """The states of members that begin, each made as it would be alone; sentences about the first."""
        shardings = self._shardings(self.abstract)
        zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract)  # noqa: E731
        put_one = lambda stack, k, one: jax.tree.map(lambda s, x: s.at[k].set(x), stack, GroupState(one))  # noqa: E731
        put = jax.jit(put_one, donate_argnums=0, out_shardings=shardings)
        stack: GroupState = jax.jit(zeros, out_shardings=shardings)()
        said: list[str] = []
        for number, (seed, _) in enumerate(self.all):
            state, notes = started_state(self.work, self.programs, seed)
            stack, said = put(stack, number, state), said or notes
        return stack, said

    def resumed(self, checkpoints: Checkpoints) -> tuple[GroupState, _Best, list[str]]:
        """The states and the best so far of the newest sound checkpoint."""
        restored = checkpoints.restore(self.saved(self.abstract, self.abstract.params))
        notes = list(restored.notes) + checkpoints.move_aside_after(restored.step)
        seeds = self.spread(np.array([seed for seed, _ in self.all], np.uint32))
        saved = restored.state
        halted = self.spread(np.zeros(len(self.all), np.bool_))
        state = GroupState(TrainState(saved["step"], saved["params"], saved["opt_state"], seed=seeds, halted=halted))
        best = restored.extra["best"]
        return state, _Best(saved.get("best"), best["steps"], best["figures"]), notes

    def saved(self, state: GroupState, best: Any) -> dict[str, Any]:
        """What a checkpoint holds."""
        one = state.members
        found = {"step": one.step, "params": one.params, "opt_state": one.opt_state}
        return found | ({"best": best} if self.work.config.select == "best" else {})

    def take(self, stack: Any, number: int) -> Any:
        """The parameters of one member, laid out as those of a member alone."""
        return self._take(stack, jnp.int32(number))

    def spread(self, stacked: Any) -> Any:
        """NumPy arrays (members, …) onto the devices, each process giving those of its own."""
        rows = host_rows(len(self.all), self.work.mesh)
        return to_devices(jax.tree.map(lambda x: x[rows], stacked), self.work.mesh, len(self.all))

    def batch(self, number: int) -> Any:
        """The batches of a step and the rates, for `step`."""
        batches = [data[number] for data in self.data]
        return self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *batches)), self.rates

    def _step(self, state: GroupState, inputs: Any) -> tuple[GroupState, dict]:
        """A step of each member. The norms of updates are left out: under a map they would be made in every step."""

        def one(inputs: tuple) -> tuple[TrainState, dict]:
            member, batch, rate = inputs
            new, metrics = self.programs.step(member, (batch, rate))
            return new, {name: value for name, value in metrics.items() if name != "update_norm"}

        def of_a_device(*inputs: Any) -> tuple[TrainState, dict]:
            with use_rules(None):  # a member is whole on its device
                return jax.lax.map(one, inputs) if one_at_a_time() else jax.vmap(one)(inputs)

        mesh, (batch, rates) = self.work.mesh, inputs
        spread = jax.shard_map(of_a_device, mesh=mesh, in_specs=MEMBERS, out_specs=MEMBERS, check_vma=False)
        new, metrics = spread(state.members, batch, rates)
        return GroupState(new), metrics

    def _shardings(self, tree: Any) -> Any:
        return jax.tree.map(lambda _: self.sharding, tree)


def _train(group: _Group, checkpoints: Checkpoints, title: str) -> _Best:
    work, members = group.work, group.members
    config, task = work.config, work.task
    keeps_best = config.select == "best"
    if resumed := bool(checkpoints.steps()):
        state, best, notes = group.resumed(checkpoints)
    else:
        state, notes = group.started()
        empty: list[dict[str, float]] = [{} for _ in members]
        best = _Best(group.copy(state.params) if keeps_best else None, [-1] * len(members), empty)
    first_step = int(state.step)
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
    )
    group.step.on_compile = lambda: recorder.meter.pause("compilation")
    for note in (title + (f", resumed at step {first_step}" if resumed else ""), *notes):
        recorder.note(note)

    def evaluate(number: int, params: Any) -> None:
        better = np.zeros(len(group.all), np.bool_)
        for k in range(len(members)):
            _, figures = label_part(work, group.programs, group.take(params, k), task.selects, group.data[k].lengths)
            recorder.validation_of(k, number, {f"{task.selects}_{name}": value for name, value in figures.items()})
            before = best.figures[k].get(task.metric)
            better[k] = number == work.num_steps if not keeps_best else before is None or figures[task.metric] > before
            if better[k]:
                best.steps[k], best.figures[k] = number, figures
        values = [figures[task.metric] for figures in best.figures if figures]
        if values:
            recorder.note(
                f"step {number}: {task.selects} {task.metric} so far " + ", ".join(f"{v:.4f}" for v in values)
            )
        best.params = group.keep(group.spread(better), params, best.params) if keeps_best else params

    def save(number: int, state: GroupState) -> None:
        steps = np.asarray(jax.device_get(jnp.max(state.members.step)))
        if number != int(steps):
            raise RunError(
                f"loss or gradient are not finite in step {number + 1} of {recorder.halted}; the checkpoint before it "
                "stands: leave that rate or seed out in a new run, or look at its rows"
            )
        extra = {"best": {"steps": best.steps, "figures": best.figures}}
        checkpoints.save(number, group.saved(state, best.params), config=work.resolved, extra=extra)

    try:
        train(
            state,  # type: ignore[arg-type]
            group.step,
            (group.batch(number) for number in itertools.count(first_step)),
            num_steps=work.num_steps,
            intervals=Intervals(config.eval_every or group.data[0].steps_per_epoch, config.checkpoint_every),
            recorder=recorder,
            save=save,  # type: ignore[arg-type]
            finished_saves=checkpoints.finished,
            evaluate=evaluate,
            stop=work.stop,
            describe_batch=lambda number: f"that of {recorder.halted}",
        )
    finally:
        recorder.saved(checkpoints.wait())
        recorder.close()
        for metrics in logs:
            metrics.close()
    return best


class GroupRecorder(Recorder):
    """A recorder with a log for each member; the live line has the means. halted: who met a loss that is not finite."""

    def __init__(self, run: Any, logs: Sequence[MetricsLog], members: Sequence[Member], **settings: Any) -> None:
        super().__init__(run, logs[0], **settings)
        self.logs, self.members, self.halted = list(logs), list(members), ""

    def training(self, step: int, metrics: dict[str, Any]) -> None:
        """Take in the metrics of a step, arrays of one number a member. Raises NotFinite."""
        self.meter.advance(step)
        values = jax.tree.map(_every_member, metrics)
        halted = values.pop("halted")[: len(self.logs)]
        if halted.any():
            seed, rate = self.members[int(np.argmax(halted))]
            self.halted = f"seed {seed} at rate {rate:g}"
            raise NotFinite(step)
        if step % self.log_every and step != self.total:
            return
        reading = self.meter.read()
        peak = peak_tflops()
        mfu = None if peak is None else reading.flops_per_second / (peak * 1e12 * jax.device_count())
        speed = {"tokens_per_second": reading.tokens_per_second, "wait_share": reading.waiting, "mfu": mfu}
        for number, log in enumerate(self.logs):
            log.write(step, {name: float(value[number]) for name, value in values.items()} | speed)
        mean = {name: float(np.mean(value[: len(self.logs)])) for name, value in values.items()}
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
    memory = group.jitted.lower(group.abstract, group.batch(longest)).compile().memory_analysis()
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert memory is not None
    params = size(programs.abstract.params)
    one = memory.argument_size_in_bytes + memory.temp_size_in_bytes + params  # and the best so far
    return int((MEMORY_SHARE * stats["bytes_limit"] - 2 * params) // one)  # one member's aside, while it is evaluated
