"""Progress display: one line that is redrawn on a terminal, plain lines elsewhere, log records in a library call."""

import logging
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

log = logging.getLogger("jaxlm")

ERASE = "\r\x1b[2K"  # returns to the beginning of the line and clears it
_REDRAW_SECONDS = 0.1  # minimum interval between redraws on a terminal
_PLAIN_SECONDS = 10.0  # interval between two plain lines of a Progress


class _Line:
    """A line that is redrawn on a terminal, and plain lines elsewhere. The default stream is standard error."""

    def __init__(self, stream: TextIO | None, active: bool):
        self._stream = stream if stream is not None else sys.stderr
        self._active = active
        self.on_terminal = active and self._stream.isatty()
        self._drawn = ""

    def show(self, text: str) -> None:
        """Redraw the live line, or print a plain one."""
        if not self.on_terminal:
            self.print(text)
            return
        self._drawn = text[: shutil.get_terminal_size().columns - 1]
        self._put(f"{ERASE}{self._drawn}")

    def print(self, text: str) -> None:
        """Print a separate line; the live line, if any, continues below it."""
        if not self._active:
            return
        self._put(f"{ERASE}{text}\n{self._drawn}" if self._drawn else f"{text}\n")

    def end(self) -> None:
        if self._drawn:
            self._put("\n")
            self._drawn = ""

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class LiveLine:
    """The live line of training: step, loss, learning rate, gradient norm, tokens/s, MFU, data waiting, time left.

    total: the last step of training. every: plain lines are printed at multiples of it and at the end.
    active: False on processes other than 0, which print nothing.
    """

    def __init__(self, total: int, *, every: int = 1, stream: TextIO | None = None, active: bool = True):
        self._total = total
        self._every = max(every, 1)
        self._line = _Line(stream, active)
        self._active = active
        self._last_drawn = -math.inf

    def update(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        tokens_per_second: float | None = None,
        mfu: float | None = None,
        waiting: float | None = None,
        eta: float | None = None,
    ) -> None:
        """Show the metrics of a step. mfu and waiting: fractions; eta: seconds; None is left out, or shown as -."""
        if not self._active:
            return
        is_last = step >= self._total
        if self._line.on_terminal:
            now = time.monotonic()
            if now - self._last_drawn < _REDRAW_SECONDS and not is_last:
                return
            self._last_drawn = now
        elif step % self._every and not is_last:
            return
        text = "  ".join(
            part
            for part in (
                f"step {step}/{self._total}",
                f"loss {loss:.4f}",
                f"lr {_number(learning_rate, '.3g')}",
                f"grad {_number(grad_norm, '.3g')}",
                f"{_rate(tokens_per_second)} tokens/s",
                "" if mfu is None else f"MFU {_percent(mfu)}",
                f"waiting {_percent(waiting)}",
                f"ETA {duration(eta)}",
            )
            if part
        )
        self._line.show(text)

    def note(self, text: str) -> None:
        """Print a separate line, for example for a saved checkpoint or a validation result."""
        self._line.print(text)

    def warn(self, text: str) -> None:
        """Print a warning on a separate line."""
        self._line.print(f"warning: {text}")

    def close(self) -> None:
        self._line.end()


class LoggedLine(LiveLine):
    """The same for a call from Python: notes and warnings are log records, and metrics are left to callbacks."""

    def __init__(self, total: int, *, every: int = 1, active: bool = True):
        super().__init__(total, every=every, active=False)
        self._logs = active

    def note(self, text: str) -> None:
        """Log a message."""
        if self._logs:
            log.info("%s", text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        if self._logs:
            log.warning("%s", text)


@dataclass(frozen=True)
class Output:
    """The destination of messages. A command writes them to its standard streams; a call from Python logs them.

    standard: True in a command: lines go to standard output, progress to standard error. False: lines go to the logger
    `jaxlm`, and progress is not shown.
    """

    standard: bool = False

    def say(self, text: str) -> None:
        """Print or log a line."""
        if self.standard:
            print(text, flush=True)
        else:
            log.info("%s", text)

    def live_line(self, total: int, *, every: int, active: bool) -> LiveLine:
        """Return the live line of a training with `total` steps."""
        return (LiveLine if self.standard else LoggedLine)(total, every=every, active=active)

    def progress(self, name: str, total: float | None = None, done: float = 0.0) -> "Progress":
        """Return the progress of work. done: what an earlier start did."""
        return Progress(name, total, done=done, active=self.standard)


LOGGED = Output()
STANDARD = Output(standard=True)


class Progress:
    """Progress of work with a known or unknown total: `tokens  1,200/9,000 (13%)  85.2k/s  ETA 1:30`.

    done: work that an earlier start did, which does not count for the speed. compiles: True if a program is compiled
    before the first update; the speed, and with it the time left, is then that of the work since.
    """

    def __init__(
        self,
        name: str,
        total: float | None = None,
        *,
        stream: TextIO | None = None,
        active: bool = True,
        done: float = 0.0,
        compiles: bool = False,
        seconds: float = _PLAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._name = name
        self._total = total
        self._line = _Line(stream, active)
        self._clock = clock
        self._seconds = _REDRAW_SECONDS if self._line.on_terminal else seconds
        self._began = self._shown = self._timed_from = clock()
        self._done = self._first = self._before = done
        self._compiles = compiles

    def update(self, done: float, note: str = "") -> None:
        """Report that `done` of `total` is done; shown at most every 0.1 s, or every 10 s if not on a terminal."""
        self._done = done
        now = self._clock()
        if self._compiles:
            self._compiles, self._timed_from, self._before = False, now, done
        if now - self._shown >= self._seconds:
            self._shown = now
            self._show(now, note)

    def note(self, text: str) -> None:
        self._line.print(text)

    def close(self) -> None:
        """Show the final state."""
        self._show(self._clock(), "", is_end=True)
        self._line.end()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, now: float, note: str, *, is_end: bool = False) -> None:
        began, before = (self._began, self._first) if is_end else (self._timed_from, self._before)
        seconds = now - began
        speed = (self._done - before) / seconds if seconds > 0 else None
        fraction = f"/{self._total:,.0f} ({self._done / self._total:.0%})" if self._total else ""
        left = (self._total - self._done) / speed if self._total and speed else None
        end = f"in {duration(seconds)}" if is_end else f"ETA {duration(left)}"
        text = "  ".join(
            part for part in (self._name, f"{self._done:,.0f}{fraction}", f"{_rate(speed)}/s", end, note) if part
        )
        self._line.show(text)


def duration(seconds: float | None) -> str:
    """Return seconds as 0:07, 12:05, 3:02:01 or 2d 03:00; - for None or a value that is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
