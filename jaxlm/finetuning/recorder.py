"""Output of the trials that train in one program: a metrics log for each, and one live line."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.finetuning.alone import Alone
from jaxlm.finetuning.stacked import Stacked
from jaxlm.finetuning.trial import Progress, TrialContext, batch_rows, trial_work
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import EVENTS, NotFinite, Recorder
from jaxlm.tasks import Task


class TrialsRecorder(Recorder):
    """A recorder with a log for each trial; the live line shows the means of the trials that continue.

    progress: the progress of each trial. A trial with a loss that is not finite fails. resume_step: the step of the
    checkpoint that training resumes from, None for new trials.
    """

    def __init__(
        self, context: TrialContext, held: Alone | Stacked, progress: Sequence[Progress], resume_step: int | None
    ) -> None:
        self.held, self.progress = held, progress
        self.logs = _open_logs(context, held, resume_step)
        alone = trial_work(context, held.programs)
        super().__init__(
            context.run,
            self.logs[0],
            start=resume_step or 0,
            total=context.num_steps,
            work=lambda step: (len(self.logs) * alone(step)[0], len(self.logs) * alone(step)[1]),
            log_every=context.config.log_every,
            output=context.observer.output,
        )

    @property
    def alive(self) -> list[int]:
        """The trials that continue."""
        return [k for k, progress in enumerate(self.progress) if not progress.ended]

    def name(self, number: int, before: str = "", after: str = "") -> str:
        """Return the name of a trial between two texts, or nothing if it is the only one."""
        return "" if len(self.logs) == 1 else f"{before}{self.held.trials[number]}{after}"

    def training(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of a step, device arrays that this waits for. Raises NotFinite if no trial continues."""
        self.meter.advance(step)
        halted = self.held.by_trial(metrics["halted"])
        for number in (number for number in self.alive if halted[number]):
            self.progress[number].failed_in = step
            if of := self.name(number, " of "):
                self.warn(f"step {step}: loss or gradient{of} is not finite; this run ends here")
        if not self.alive:
            raise NotFinite(step)
        if not self.due(step):
            return
        values = jax.tree.map(
            self.held.by_trial, {name: value for name, value in metrics.items() if name not in EVENTS}
        )
        reading, lines = self.meter.read(), []
        for number in self.alive:
            own = jax.tree.map(lambda value, k=number: value[k], values)
            lines.append(self.line(step, own, reading, trials=len(self.logs)))
            self.logs[number].write(step, lines[-1])
        shown = ("loss", "learning_rate", "gradient_norm")
        self.show(step, {name: float(np.mean([line[name] for line in lines])) for name in shown}, reading)

    def spike(self, step: int, metrics: dict[str, Any], rows: Callable[[int], str]) -> None:
        """Record the spikes of this step, by trial; `rows` is not used, as each trial has its own."""
        found, norms = jax.tree.map(self.held.by_trial, (metrics["spike"], metrics["gradient_norm"]))
        for number in (number for number in self.alive if found["found"][number]):
            values = {name: found[name][number] for name in ("median", "skipped")}
            described = batch_rows(self.held.data[number], step - 1)
            of = self.name(number, " of ")
            self.write_spike(self.logs[number], step, norms[number], values, described, of=of)

    def evaluated(self, step: int, number: int, task: Task, metrics: dict[str, float], raw: dict[str, float]) -> None:
        """Write the metrics of a trial's evaluation; print them if it is the only one. raw: of the raw parameters."""
        line = {f"{task.selects}_{name}": value for name, value in metrics.items()}
        self.logs[number].write(step, line | raw)
        if len(self.logs) == 1:
            listed = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.note(f"step {step}: {task.selects} {listed}")

    def evaluations_done(self, step: int, task: Task, stopped: Sequence[int]) -> None:
        """Print the best value of each of several trials, and the end of those that stopped in this evaluation."""
        values = [progress.metrics[task.metric] for progress in self.progress if progress.metrics]
        if len(self.logs) > 1 and values:
            listed = ", ".join(f"{value:.4f}" for value in values)
            self.note(f"step {step}: {task.selects} {task.metric} so far {listed}")
        for number in stopped:
            self.note(self.name(number, after=": ") + self.progress[number].patience.note(task))

    def sync(self) -> None:
        """Write all lines to the run's storage. It is called before a checkpoint counts."""
        for log in self.logs:
            log.sync()
        self.run.upload()

    def close(self) -> None:
        """Close the logs of all trials."""
        super().close()
        for log in self.logs:
            log.close()


def _open_logs(context: TrialContext, held: Alone | Stacked, resume_step: int | None) -> list[MetricsLog]:
    """Open a log for each trial.

    A log that drops lines rewrites the file, so those after the first drop their lines before any log stays open.
    """

    def opened(seed: int, rate: float) -> MetricsLog:
        scope = {"seed": seed, "peak_lr": rate}
        return MetricsLog(context.run.path, resume_step, scope=scope, on_record=context.observer.record)

    for trial in held.trials[1:]:
        opened(*trial).close()
    return [opened(*trial) for trial in held.trials]
