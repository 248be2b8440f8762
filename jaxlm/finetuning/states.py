"""The states of trials on the devices: `Alone` has that of one, `Stacked` those of several; both have the same methods.

A fine-tuning step of one trial leaves an accelerator idle for most of the time; a step of twenty takes little longer.
It maps over their states, which are stacked and sharded over the devices. Each device holds whole trials and does not
communicate with the others. On a CPU, which one trial keeps busy, the trials of a device run in sequence within the
program. The best parameters so far stay on the devices, stacked too. Seeds, learning rates and batches are data, and
the keys are threefry's, whose bits are the same under `vmap`: every trial computes the same numbers as in a program of
its own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.distributed.devices import memory_limit, platform
from jaxlm.distributed.mesh import replicated, use_rules, whole_to_devices
from jaxlm.errors import InputError
from jaxlm.finetuning.trial import Patience, Programs, Progress, Trial, TrialContext, started_state, trial_settings
from jaxlm.training.program import MEMORY_FRACTION, CompiledStep
from jaxlm.training.step import Settings, TrainState, from_saved, state_of
from jaxlm.training.weights import halved

TRIALS = PartitionSpec(("data", "fsdp"))


class Alone:
    """One trial in a program of its own; `Stacked` describes the methods.

    best: the best parameters so far, None before the first evaluation. At most one copy exists. checkpoints: the
    directory of the checkpoints within the run. directory: the one to remove when the results are written.
    """

    def __init__(self, context: TrialContext, programs: Programs, trial: Trial) -> None:
        self.context, self.programs, self.trials = context, programs, [trial]
        self.checkpoints = self.directory = trial.directory / "checkpoints"
        self.data = [context.batches(trial.seed)]
        self.abstract, self.step = programs.program.abstract, programs.train
        self.settings = replicated(trial_settings(context, trial.rate), context.mesh)
        self.best: Any = None
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract.halving)
        self._halved = jax.jit(halved, out_shardings=shardings)

    def started(self) -> tuple[TrainState, list[str]]:
        return started_state(self.context, self.programs, self.trials[0].seed)

    def restored(self, saved: dict[str, Any], progress: Sequence[Progress]) -> TrainState:
        self.best = saved.get("best")
        return from_saved(saved, self.abstract, self.trials[0].seed)

    def batch(self, number: int) -> Any:
        return whole_to_devices(self.data[0][number], self.context.mesh)

    def take(self, params: Any, number: int) -> Any:
        return params

    def keep(self, better: Sequence[bool], weights: Any) -> None:
        if better[0]:
            self.best = None  # so that at most one copy exists
            self.best = self.programs.copy(weights)

    def halted(self, state: TrainState, numbers: Sequence[int]) -> TrainState:
        """Return the state: training ends with its only trial."""
        return state

    def evaluated(self, state: TrainState, losses: Sequence[float]) -> TrainState:
        return replace(state, halving=self._halved(state.halving, np.float32(losses[0])))

    def by_trial(self, x: jax.Array) -> np.ndarray:
        return np.asarray(x)[None]

    def to_json(self, progress: Sequence[Progress]) -> dict[str, Any]:
        """Return the progress of the trial as JSON values, for a checkpoint. A trial that failed is not saved."""
        (one,) = progress
        saved: dict[str, Any] = {"best": {"step": one.step, "figures": one.metrics}}
        return saved | ({} if self.context.config.patience is None else {"patience": dataclasses.asdict(one.patience)})

    def from_json(self, saved: dict[str, Any]) -> list[Progress]:
        best, patience = saved["best"], Patience(**saved.get("patience", {}))
        return [Progress(best["step"], best["figures"], patience)]


class Stacked:
    """A group of trials in one program. Unused copies of the last one pad it to a multiple of the devices.

    first: the number of its first trial within the run. best: the best parameters of each trial so far, stacked; None
    if the last ones are selected.
    """

    def __init__(self, context: TrialContext, programs: Programs, trials: Sequence[Trial], first: int) -> None:
        self.context, self.programs, self.trials = context, programs, list(trials)
        self.directory = PurePath("members", f"group-{first}-{len(trials)}")
        self.checkpoints = self.directory / "checkpoints"
        self.all = self.trials + [self.trials[-1]] * (-len(self.trials) % context.mesh.size)
        self.sharding = NamedSharding(context.mesh, TRIALS)

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((len(self.all), *leaf.shape), leaf.dtype, sharding=self.sharding)

        self.abstract: TrainState = jax.tree.map(stacked, programs.program.abstract)
        self.data = [context.batches(trial.seed) for trial in self.all]
        settings = [trial_settings(context, trial.rate) for trial in self.all]
        self.settings = self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *settings))
        self.jitted = jax.jit(self._step, donate_argnums=0, out_shardings=(self._shardings(self.abstract), None))
        shapes, options = len(self.data[0].sizes), context.config.execution.compiler_options()
        self.step = CompiledStep("group's training", self.jitted, expected_shapes=shapes, options=options, rows_axis=1)
        self.best: Any = None
        alone = jax.tree.map(lambda leaf: leaf.sharding, programs.program.abstract.params)
        self._take = jax.jit(lambda stack, k: jax.tree.map(lambda x: x[k], stack), out_shardings=alone)
        params = self._shardings(self.abstract.params)
        self._keep = jax.jit(_where, donate_argnums=2, out_shardings=params)
        self._either = jax.jit(jnp.logical_or, out_shardings=self.sharding)
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=params)
        self._halved = jax.jit(halved, out_shardings=self._shardings(self.abstract.halving))

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
        for number, trial in enumerate(self.all):
            state, notes = started_state(self.context, self.programs, trial.seed)
            stack, first_notes = put(stack, number, state), first_notes or notes
        self.best = self._copy(stack.weights) if self.context.keeps_best else None
        return stack, first_notes

    def restored(self, saved: dict[str, Any], progress: Sequence[Progress]) -> TrainState:
        """Return the states from the leaves of a checkpoint, and keep the best parameters among them."""
        self.best = saved.get("best")
        seeds = self.spread(np.array([trial.seed for trial in self.all], np.uint32))
        return state_of(saved, seed=seeds, halted=self._flags([k for k, one in enumerate(progress) if one.ended]))

    def batch(self, number: int) -> Any:
        """Return the stacked batches of a step on the devices, for `step`."""
        batches = [data[number] for data in self.data]
        return self.spread(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))

    def take(self, params: Any, number: int) -> Any:
        """Return the parameters of one trial, with the shardings of a trial of its own program."""
        return self._take(params, jnp.int32(number))

    def keep(self, better: Sequence[bool], weights: Any) -> None:
        """Copy the weights to `best` for each trial whose weights are better."""
        if self.best is not None:
            padded = np.zeros(len(self.all), np.bool_)
            padded[: len(better)] = better
            self.best = self._keep(self.spread(padded), weights, self.best)

    def halted(self, state: TrainState, numbers: Sequence[int]) -> TrainState:
        """Return the states with these trials halted, so that later steps leave their states as they are."""
        return replace(state, halted=self._either(state.halted, self._flags(numbers)))

    def evaluated(self, state: TrainState, losses: Sequence[float]) -> TrainState:
        """Return the states, whose learning rates follow the losses of an evaluation. NaN: a trial has ended."""
        padded = np.full(len(self.all), losses[-1], np.float32)
        padded[: len(losses)] = losses
        return replace(state, halving=self._halved(state.halving, self.spread(padded)))

    def by_trial(self, x: jax.Array) -> np.ndarray:
        """Return a metric of a step on the host, with a leading axis of trials."""
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))[: len(self.trials)]

    def to_json(self, progress: Sequence[Progress]) -> dict[str, Any]:
        """Return the progress of the trials as JSON values, for a checkpoint."""
        saved: dict[str, Any] = {
            "best": {"steps": [one.step for one in progress], "figures": [one.metrics for one in progress]},
            "failed": {str(k): one.failed_in for k, one in enumerate(progress) if one.failed_in is not None},
        }
        if self.context.config.patience is not None:
            saved["patience"] = [dataclasses.asdict(one.patience) for one in progress]
        return saved

    def from_json(self, saved: dict[str, Any]) -> list[Progress]:
        """Return the progress of the trials from the result of `to_json`."""
        best, patience = saved["best"], saved.get("patience", [{} for _ in self.trials])
        return [
            Progress(best["steps"][k], best["figures"][k], Patience(**patience[k]), saved["failed"].get(str(k)))
            for k in range(len(self.trials))
        ]

    def spread(self, stacked: Any) -> Any:
        """Put NumPy arrays (trials, …) onto the devices; each process gives the rows of its own devices."""
        return whole_to_devices(stacked, self.context.mesh)

    def _flags(self, numbers: Sequence[int]) -> jax.Array:
        """Return True for these trials, on the devices; the padding repeats the last trial."""
        last = len(self.trials) - 1
        return self.spread(np.array([min(number, last) in numbers for number in range(len(self.all))], np.bool_))

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


def one_at_a_time() -> bool:
    """Return True if the trials of a device run in sequence: a CPU gains nothing from vectorizing them."""
    return platform() == "cpu"


def _where(better: jax.Array, new: Any, old: Any) -> Any:
    """Return, trial by trial, `new` if it is better, else `old`."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(better.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def _trials_per_device(context: TrialContext, programs: Programs) -> int:
    """Return the number of trials that fit a device, from the memory analysis of the program for one."""
    limit = memory_limit()
    if limit is None:
        return 1
    group = Stacked(context, programs, [Trial(0, 0.0)] * context.mesh.size, first=0)
    longest = max(range(min(group.data[0].steps_per_epoch, 256)), key=group.data[0].size_at)
    memory = group.jitted.lower(group.abstract, group.batch(longest), group.settings).compile().memory_analysis()

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    assert memory is not None
    params = size(programs.program.abstract.params)
    one = memory.argument_size_in_bytes + memory.temp_size_in_bytes + params  # and the best so far
    # One trial's parameters are copied while it is evaluated.
    return int((MEMORY_FRACTION * limit - 2 * params) // one)
