"""The state of one trial on the devices, as the step of the run's program takes it.

`jaxlm.finetuning.stacked` holds the states of several trials; both have the same attributes and methods.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.mesh import replicated, whole_to_devices
from jaxlm.finetuning.patience import Patience
from jaxlm.finetuning.trial import Programs, Progress, Trial, TrialContext, started_state, trial_settings
from jaxlm.training.step import TrainState, from_saved


class Alone:
    """One trial in a program of its own.

    best: the best parameters so far, None before the first evaluation. At most one copy exists. checkpoints: the
    directory of the checkpoints within the run. directory: the one to remove when the results are written.
    """

    def __init__(self, context: TrialContext, programs: Programs, trial: Trial) -> None:
        self.context, self.programs, self.trials = context, programs, [trial]
        self.checkpoints = self.directory = trial.directory / "checkpoints"
        self.data = [context.batches(trial.seed)]
        self.abstract, self.step = programs.abstract, programs.train
        self.settings = replicated(trial_settings(context, trial.rate), context.mesh)
        self.best: Any = None

    def started(self) -> tuple[TrainState, list[str]]:
        """Return the first state, and notes on it."""
        return started_state(self.context, self.programs, self.trials[0].seed)

    def restored(self, saved: dict[str, Any], progress: Sequence[Progress]) -> TrainState:
        """Return the state from the leaves of a checkpoint, and keep the best parameters among them."""
        self.best = saved.get("best")
        return from_saved(saved, self.abstract, self.trials[0].seed)

    def batch(self, number: int) -> Any:
        """Return the batch of a step on the devices, for `step`."""
        return whole_to_devices(self.data[0][number], self.context.mesh)

    def take(self, params: Any, number: int) -> Any:
        """Return the parameters of a trial."""
        return params

    def keep(self, better: Sequence[bool], weights: Any) -> None:
        """Copy the weights to `best` if they are better."""
        if better[0]:
            self.best = None  # so that at most one copy exists
            self.best = self.programs.copy(weights)

    def halted(self, state: TrainState, numbers: Sequence[int]) -> TrainState:
        """Return the state: training ends with its only trial."""
        return state

    def by_trial(self, x: jax.Array) -> np.ndarray:
        """Return a metric of a step on the host, with a leading axis of trials."""
        return np.asarray(x)[None]

    def to_json(self, progress: Sequence[Progress]) -> dict[str, Any]:
        """Return the progress of the trial as JSON values, for a checkpoint. A trial that failed is not saved."""
        (one,) = progress
        saved: dict[str, Any] = {"best": {"step": one.step, "figures": one.metrics}}
        return saved | ({} if self.context.config.patience is None else {"patience": one.patience.to_json()})

    def from_json(self, saved: dict[str, Any]) -> list[Progress]:
        """Return the progress of the trial from the result of `to_json`."""
        best, patience = saved["best"], Patience(**saved.get("patience", {}))
        return [Progress(best["step"], best["figures"], patience)]
