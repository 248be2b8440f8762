"""The caller of a training: it receives the records and the messages of a run, and may ask it to stop."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.distributed.agreement import first_process_decides
from jaxlm.distributed.processes import StopSignal
from jaxlm.progress import LOGGED, Output

Callback = Callable[[dict[str, Any]], bool | None]
"""A function of a record of metrics.jsonl, a dictionary. True stops the run after the current step, with its state
saved; any other value lets it continue."""


class Observer:
    """The caller of a training. Every process needs one; callbacks and messages are those of process 0.

    signals: the signals that stop the run; None: no signal does. output: destination of the messages. listeners: called
    with each record on process 0, like callbacks, but their return values are ignored.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        *,
        signals: StopSignal | None = None,
        output: Output = LOGGED,
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
    ) -> None:
        self.listeners = tuple(listeners)
        self.callbacks, self.signals, self.output = tuple(callbacks), signals, output
        self.stopped = False
        """True after a callback asked the run to stop."""

    def say(self, text: str) -> None:
        """Print or log a line on process 0."""
        if jax.process_index() == 0:
            self.output.say(text)

    def record(self, record: dict[str, Any]) -> None:
        """Call every listener and callback with a copy of a record. Each process must call this with the same ones."""
        if jax.process_index() == 0:
            for listener in self.listeners:
                listener(dict(record))
        if self.callbacks:
            self.stopped = first_process_decides(lambda: self._asked(record)) or self.stopped

    def requested(self) -> bool:
        """Return True to stop before the next step, equal on every process. Each process calls it once per step."""
        signalled = self.signals is not None and self.signals.requested()
        return signalled or self.stopped

    def _asked(self, record: dict[str, Any]) -> bool:
        answers = [callback(dict(record)) for callback in self.callbacks]
        return any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers)
