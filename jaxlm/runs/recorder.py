"""What a run says while it trains: metrics lines, the live line, notes, warnings."""

import logging
import math
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.devices import peak_tflops
from jaxlm.errors import LOGGERS, RunError
from jaxlm.progress import LiveLine
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.meter import Meter, Work
from jaxlm.runs.metrics_log import MetricsLog

GATE_SHARE = 0.25  # of the run, after which the loss should have left the unigram entropy
GATE_STEPS = 2000  # and after which it should have at the latest
GATE_WINDOW = 0.1  # of the steps up to there, the last, whose losses are averaged
SHORTEST_RUN = 1000  # steps; a shorter run is a trial, from which nothing is expected
GATE_MARGIN = 0.05  # nats that count as having left it


class NotFinite(Exception):
    """The loss or its gradient was not finite in `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Diverged(RunError):
    """Training ended with a loss or gradient that is not finite; the same steps come to it again. reason: which."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class Recorder:
    """Writes the metrics of steps and evaluations, and looks at them.

    start, total: the steps at which training begins and ends. work: step -> (tokens, FLOPs) of a whole run up to it.
    unigram_entropy: nats a token of the store; a language model's loss, the metric `gate_metric`, that is still there
    after a quarter of the run is warned about, in runs of SHORTEST_RUN steps or more.
    """

    def __init__(
        self,
        run: RunDirectory,
        metrics: MetricsLog,
        *,
        start: int,
        total: int,
        work: Work,
        log_every: int,
        unigram_entropy: float | None = None,
        gate_metric: str = "loss",
    ) -> None:
        self.run = run
        self.metrics = metrics
        self.total = total
        self.log_every = log_every
        self.unigram_entropy, self.gate_metric = unigram_entropy, gate_metric
        self.gate: float = min(GATE_STEPS, int(GATE_SHARE * total)) if total >= SHORTEST_RUN else math.inf
        self.recent: list[float] = []
        self.meter = Meter(start=start, total=total, work=work)
        self.live = LiveLine(total, every=log_every, active=jax.process_index() == 0)
        self.handler = _LiveHandler(self.live)
        self.before = {name: logging.getLogger(name).handlers for name in LOGGERS}
        for name in LOGGERS:
            logging.getLogger(name).handlers = [self.handler]
        for note in metrics.notes:
            self.note(note)

    def training(self, step: int, metrics: dict[str, Any]) -> None:
        """Take in the metrics of a step (device arrays; this waits for them). Raises NotFinite."""
        self.meter.advance(step)
        if bool(metrics["halted"]):
            raise NotFinite(step)
        if step % self.log_every and step != self.total:
            return
        values = jax.tree.map(np.asarray, {name: value for name, value in metrics.items() if name != "halted"})
        norms = values.pop("update_norm")
        reading = self.meter.read()
        peak = peak_tflops()
        mfu = None if peak is None else reading.flops_per_second / (peak * 1e12 * jax.device_count())
        line: dict[str, Any] = {name: float(value) for name, value in values.items()}
        line |= {"tokens_per_second": reading.tokens_per_second, "wait_share": reading.waiting, "mfu": mfu}
        if step % self.log_every == 0:  # the steps that make them, of which the last need not be one
            line |= {f"update_norm/{name}": norm.tolist() for name, norm in norms.items()}
        self.metrics.write(step, line)
        self.live.update(
            step,
            loss=line["loss"],
            learning_rate=line["learning_rate"],
            grad_norm=line["gradient_norm"],
            tokens_per_second=reading.tokens_per_second,
            mfu=mfu,
            waiting=reading.waiting,
            eta=reading.eta,
        )
        if self.unigram_entropy is not None:
            self._look_at_gate(step, line[self.gate_metric], self.unigram_entropy)

    def validation(self, step: int, figures: dict[str, float], said: str) -> None:
        """Write the figures of an evaluation and say them."""
        self.metrics.write(step, figures)
        self.note(f"step {step}: {said}")

    def saved(self, steps: list[int]) -> None:
        """Say which checkpoints count now."""
        for step in steps:
            self.note(f"checkpoint of step {step} is saved")

    def sync(self) -> None:
        """Bring all lines to where the run lies; before a checkpoint counts."""
        self.metrics.sync()
        self.run.upload()

    def note(self, text: str) -> None:
        """A line for people."""
        self.live.note(text)

    def warn(self, text: str) -> None:
        """A warning for people."""
        self.live.warn(text)

    def close(self) -> None:
        """Close the metrics, end the live line, and give logging back."""
        for name, handlers in self.before.items():
            logging.getLogger(name).handlers = handlers
        self.live.close()
        self.metrics.close()

    def _look_at_gate(self, step: int, loss: float, unigram_entropy: float) -> None:
        if step > (1 - GATE_WINDOW) * self.gate:
            self.recent.append(loss)
        if step < self.gate:
            return
        self.gate = math.inf  # it is looked at once
        average = sum(self.recent) / len(self.recent)
        if average > unigram_entropy - GATE_MARGIN:
            loss_name = "loss" if self.gate_metric in ("loss", "nll") else self.gate_metric
            self.warn(
                f"step {step}: the {loss_name} ({average:.3f}) has not left the unigram entropy of the store "
                f"({unigram_entropy:.3f}): nothing but word frequencies is learnt so far; narrow models need a "
                "larger --model.init-std (0.02 x sqrt(768 / width)), or try another --optimizer.peak-lr"
            )


class _LiveHandler(logging.Handler):
    """The program's log as lines above the live line."""

    def __init__(self, live: LiveLine) -> None:
        super().__init__(logging.INFO)
        self.live = live

    def emit(self, record: logging.LogRecord) -> None:
        say = self.live.warn if record.levelno >= logging.WARNING else self.live.note
        say(record.getMessage().strip())
