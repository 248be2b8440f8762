"""The training loop: take a batch, take a step, look at the step before, save and evaluate when it is time."""

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.data.arrays import DamagedStore
from jaxlm.distributed.processes import StopSignal
from jaxlm.errors import RunError, Stopped
from jaxlm.runs.recorder import Diverged, NotFinite, Recorder
from jaxlm.training.state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intervals:
    """Steps between evaluations (0: at the end only) and between checkpoints."""

    evaluate: int
    checkpoint: int


def train(
    state: TrainState,
    step: Callable[[TrainState, Any], tuple[TrainState, dict]],
    batches: Iterator[Any],
    *,
    num_steps: int,
    intervals: Intervals,
    recorder: Recorder,
    save: Callable[[int, TrainState], None],
    finished_saves: Callable[[], list[int]],
    evaluate: Callable[[int, Any], None] | None = None,
    stop: StopSignal,
    describe_batch: Callable[[int], str] = lambda step: f"batch {step}",
    profile: "Profile | None" = None,
    began: str | None = None,
) -> TrainState:
    """Train from the step that `state` has reached up to `num_steps`, and return the last state, saved.

    batches: global batches on the devices, beginning with the one of the state's step. save(step, state) starts a
    checkpoint, finished_saves() names those that count since it was last asked. Metrics are fetched one step late, so
    that the devices never wait for the host. began: for people, `from scratch` or `with the state of RUN@STEP`; None
    where a checkpoint of this run holds the first state.
    Raises Stopped after SIGTERM or SIGINT, Diverged after a loss that is not finite, and RunError where a store turns
    out to be damaged, with the state saved.
    """
    first = done = saved = int(state.step)
    late: tuple[int, dict] | None = None
    damage: DamagedStore | None = None
    try:
        while done < num_steps:
            if stop.requested():
                break
            if profile is not None:
                profile.before(done)
            try:
                with recorder.meter.waiting():
                    batch = next(batches)
            except DamagedStore as error:
                damage = error
                break
            state, metrics = step(state, batch)
            done += 1
            if late is not None:
                recorder.training(*late)
            late = (done, metrics)
            recorder.saved(finished_saves())
            due = evaluate if intervals.evaluate > 0 and done % intervals.evaluate == 0 else None
            if due is not None or done % intervals.checkpoint == 0 or done == num_steps:
                recorder.training(*late)
                late = None
            if due is not None and done < num_steps:
                with recorder.meter.pause("evaluation"):
                    due(done, state.params)
            if done % intervals.checkpoint == 0 or done == num_steps:
                if evaluate is not None and done == num_steps:
                    with recorder.meter.pause("evaluation"):
                        evaluate(done, state.params)
                with recorder.meter.pause("checkpoint"):
                    recorder.sync()
                    save(done, state)
                saved = done
        if late is not None:
            recorder.training(*late)
    except NotFinite as error:
        sound = int(state.step)
        if sound > saved:
            recorder.sync()
            save(sound, state)
        remedy = (
            f"the state before it, of step {sound}, is saved: start from it as a new run with another rate, or look at "
            "these rows"
        )
        if sound == first and began is not None:
            remedy = (
                f"it is the first of this run, which began {began}, and nothing is saved: begin a new run with another "
                "start or a smaller --model.init-std, or look at these rows"
            )
        said = f"loss or gradient are not finite in step {error.step} ({describe_batch(error.step - 1)})"
        raise Diverged(said, remedy) from error
    except DamagedStore as error:  # of the validation text
        damage = error
    finally:
        if profile is not None:
            profile.stop()
    if damage is not None or done < num_steps:
        alone = damage is None or jax.process_count() == 1  # other processes did not meet the damage
        if saved < done < num_steps and alone:
            recorder.sync()
            save(done, state)
            saved = done
        if damage is not None:
            raise RunError(f"{damage}; then the same command continues from step {saved}") from damage
        raise Stopped(f"stopped at step {done} of {num_steps}, saved; the same command continues")
    return state


@dataclass
class Profile:
    """A trace of the steps from `start` up to `end`, written for TensorBoard's profiler under `directory`."""

    start: int
    end: int
    directory: Path
    running: bool = False

    def before(self, step: int) -> None:
        """Begin or end the trace when its time has come."""
        if step >= self.end:
            self.stop()
        elif step >= self.start and not self.running:
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def stop(self) -> None:
        """End the trace, if one is running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            self.start = self.end
            log.info("profile written to %s", self.directory)


def explain_failure(error: Exception) -> Exception:
    """A RunError of one line for what a user can mend: memory of the device, a full disk; else the error itself."""
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return RunError(
            "out of device memory: raise --micro-batches, set --execution.remat dots or full, raise "
            f"--execution.loss-chunks, or spread the model with --mesh.fsdp ({text.splitlines()[0][:200]})"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"disk full: {error.filename or error}; make room, then the same command continues")
    return error
