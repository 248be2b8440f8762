"""What a run tells: metrics.jsonl and TensorBoard files for machines, one live line for people.

A leaf: the standard library, and tensorboardX and the number of this process only when a MetricsLog opens.
On a terminal the live line is redrawn in place; elsewhere (a file, a pipe) there is a plain line every so often.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from jaxlm.errors import InputError, RunError
from jaxlm.output import sync_directory
from jaxlm.reading import open_regular, parse_json

_REDRAW_SECONDS = 0.1  # the fastest a terminal line is redrawn
_PLAIN_SECONDS = 10.0  # the time between two plain lines of a Progress


class MetricsLog:
    """metrics.jsonl and tensorboard/ of a run directory; on processes other than 0 everything here does nothing.

    One JSON object a line, `step` first, flushed when written. Floats are written in the shortest form that reads
    back to the same bits (as a Python float; a float32 is widened first). JSON has no nan and no infinity: they are
    written as the strings "NaN", "Infinity" and "-Infinity", which `float` and `read_metrics` understand.

    resume_step: the step of the checkpoint that training goes on from; lines beyond it and a torn last line are
    dropped (written anew, synced, renamed), and TensorBoard is told to purge from resume_step + 1. None: from
    scratch, nothing is kept. scope: values that stand in every line ({"seed": 1}); lines of another scope are kept as
    they are, and TensorBoard shows each scope as a run of its own. `notes` holds a sentence when lines were dropped.

    scope: JSON values that name one of several trainings in the same file ({"seed": 3}): each line carries them, only
    lines of the same scope are dropped, and TensorBoard shows each scope as a run of its own.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int | None,
        *,
        scope: Mapping[str, Any] | None = None,
        process: int | None = None,
    ):
        if process is None:
            import jax  # only a run logs metrics, and it has imported jax by now

            process = jax.process_index()
        self.path = Path(directory) / "metrics.jsonl"
        self.notes: list[str] = []
        self._scope = dict(scope or {})
        self._file: TextIO | None = None
        self._board: Any = None
        if process != 0:
            return
        with _disk_errors(self.path):
            self._trim(resume_step)
            self._file = self.path.open("a", encoding="utf-8")
            from tensorboardX import SummaryWriter  # half a second; other programs use this file's progress lines

            # From scratch it purges too: an earlier start may have been killed before its first checkpoint.
            purge_step = 0 if resume_step is None else resume_step + 1
            board = Path(directory) / "tensorboard" / ",".join(f"{name}={value}" for name, value in self._scope.items())
            suffix = f".{time.time_ns()}"  # two starts within a second would write over each other's file
            self._board = SummaryWriter(str(board), purge_step=purge_step, flush_secs=30, filename_suffix=suffix)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line. Values: numbers (0-d arrays too), strings, booleans, None, lists and dictionaries of them.

        TensorBoard gets the finite numbers. RunError when the disk is full.
        """
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        finite = {name: _finite(value) for name, value in plain.items()}
        line = json.dumps({"step": step} | self._scope | finite, allow_nan=False)
        with _disk_errors(self.path):
            self._file.write(line + "\n")
            self._file.flush()
            for name, value in plain.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Bring every line to the disk itself; to be called before the save of a step counts."""
        if self._file is not None:
            with _disk_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._board.flush()

    def close(self) -> None:
        if self._file is None:
            return
        self.sync()
        self._file.close()
        self._board.close()
        self._file = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _trim(self, resume_step: int | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept, beyond, torn = [], 0, 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            step = _step_of(line)
            if step is None:
                torn += 1
            elif not self._scope.items() <= parse_json(line).items():
                kept.append(line)
            elif resume_step is None or step > resume_step:
                beyond += 1
            else:
                kept.append(line)
        if not beyond and not torn:
            return
        fresh = self.path.with_name(self.path.name + ".tmp")
        with fresh.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        sync_directory(self.path.parent)
        start = "from the start" if resume_step is None else f"beyond step {resume_step}"
        self.notes.append(f"{self.path.name}: dropped {beyond} lines {start} and {torn} torn ones")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl, floats to the bit; a torn last line (a run that is writing) is left out."""
    try:
        with open_regular(Path(path)) as file:
            for line in file:
                if _step_of(line) is not None:
                    yield {name: _restored(value) for name, value in parse_json(line).items()}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; put it back from a copy, or remove it") from error


@dataclass(frozen=True)
class Reading:
    """Speed over a stretch of training: what was done a second, the share of time waiting for data, seconds left."""

    tokens_per_second: float
    flops_per_second: float
    steps_per_second: float
    waiting: float
    eta: float


Work = Callable[[int], tuple[float, float]]


def even_work(tokens: float, flops_per_token: float) -> Work:
    """The work of a run whose steps all have `tokens` tokens."""
    return lambda step: (step * tokens, step * tokens * flops_per_token)


class Meter:
    """Times training, leaving out what is not: `with meter.pause("evaluation")` and `pause("compilation")`.

    `with meter.waiting()` marks the time that the step waits for data, which counts as training.
    total: the step at which training ends. work: step -> (tokens, FLOPs) of a whole run up to it; steps may differ, and
    the time left goes by tokens. clock: seconds, for tests.
    """

    def __init__(self, *, start: int, total: int, work: Work, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._total = total
        self._work = work
        self._begin = self._mark = clock()
        self._start = self._mark_step = self._step = start
        self._paused = 0.0  # since the mark
        self._waited = 0.0  # since the mark
        self._compiled = 0.0  # since the beginning: it does not come again, so the time left leaves it out
        self._is_paused = False

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Leave a section out of the speed; the time left counts evaluations and checkpoints, not "compilation"."""
        assert not self._is_paused, "a pause within a pause would be left out twice"
        self._is_paused = True
        began = self._clock()
        try:
            yield
        finally:
            self._is_paused = False
            seconds = self._clock() - began
            self._paused += seconds
            if what == "compilation":
                self._compiled += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time that the step waits for its batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self._step = step

    def read(self) -> Reading:
        """The speed since the last reading, and the time left at the pace since the beginning."""
        now = self._clock()
        active = max(now - self._mark - self._paused, 1e-9)
        (tokens, flops), (old_tokens, old_flops) = self._work(self._step), self._work(self._mark_step)
        done = tokens - self._work(self._start)[0]
        pace = (now - self._begin - self._compiled) / done if done else math.nan
        reading = Reading(
            tokens_per_second=(tokens - old_tokens) / active,
            flops_per_second=(flops - old_flops) / active,
            steps_per_second=(self._step - self._mark_step) / active,
            waiting=min(self._waited / active, 1.0),
            eta=max(self._work(self._total)[0] - tokens, 0) * pace,
        )
        self._mark, self._mark_step, self._paused, self._waited = now, self._step, 0.0, 0.0
        return reading


class _Line:
    """One line that is redrawn on a terminal, and plain lines elsewhere. Standard error unless told."""

    def __init__(self, stream: TextIO | None, active: bool):
        self._stream = stream if stream is not None else sys.stderr
        self._active = active
        self.on_terminal = active and self._stream.isatty()
        self._drawn = ""

    def redraw(self, text: str) -> None:
        if self.on_terminal:
            columns = shutil.get_terminal_size().columns
            self._drawn = text[: columns - 1]
            self._put(f"\r\x1b[2K{self._drawn}")

    def print(self, text: str) -> None:
        """A line of its own; the live line, if any, goes on below it."""
        if not self._active:
            return
        self._put(f"\r\x1b[2K{text}\n{self._drawn}" if self._drawn else f"{text}\n")

    def end(self) -> None:
        if self._drawn:
            self._put("\n")
            self._drawn = ""

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class LiveLine:
    """Training's line: step, loss, learning rate, gradient norm, tokens/s, MFU, waiting for data, time left.

    total: the step at which training ends. every: plain lines come at multiples of it and at the end.
    active: False on processes other than 0, where nothing is written.
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
        """Show the metrics of a step. mfu and waiting: fractions; eta: seconds; what is None shows as -."""
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
            (
                f"step {step}/{self._total}",
                f"loss {loss:.4f}",
                f"lr {_number(learning_rate, '.3g')}",
                f"grad {_number(grad_norm, '.3g')}",
                f"{_rate(tokens_per_second)} tokens/s",
                f"MFU {_percent(mfu)}",
                f"waiting {_percent(waiting)}",
                f"ETA {duration(eta)}",
            )
        )
        if self._line.on_terminal:
            self._line.redraw(text)
        else:
            self._line.print(text)

    def note(self, text: str) -> None:
        """A line of its own: a checkpoint was saved, a validation result."""
        self._line.print(text)

    def warn(self, text: str) -> None:
        """A warning on a line of its own."""
        self._line.print(f"warning: {text}")

    def close(self) -> None:
        self._line.end()


class Progress:
    """Progress of work with a known or unknown end: `tokens  1,200/9,000 (13%)  85.2k/s  ETA 1:30`."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        stream: TextIO | None = None,
        active: bool = True,
        seconds: float = _PLAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._what = what
        self._total = total
        self._line = _Line(stream, active)
        self._clock = clock
        self._seconds = _REDRAW_SECONDS if self._line.on_terminal else seconds
        self._began = self._shown = clock()
        self._done = 0.0
        self._first: float | None = None  # work done before this start is not this start's speed

    def update(self, done: float, note: str = "") -> None:
        """`done` of `total` is done; shown at most every tenth of a second, or ten seconds off a terminal."""
        self._done = done
        if self._first is None:
            self._first = done
        now = self._clock()
        if now - self._shown >= self._seconds:
            self._shown = now
            self._show(now, note)

    def note(self, text: str) -> None:
        self._line.print(text)

    def close(self) -> None:
        """Show where it ended."""
        self._show(self._clock(), "", is_end=True)
        self._line.end()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, now: float, note: str, *, is_end: bool = False) -> None:
        seconds = now - self._began
        speed = (self._done - (self._first or 0.0)) / seconds if seconds > 0 else 0.0
        share = f"/{self._total:,.0f} ({self._done / self._total:.0%})" if self._total else ""
        left = (self._total - self._done) / speed if self._total and speed > 0 else None
        end = f"in {duration(seconds)}" if is_end else f"ETA {duration(left)}"
        text = "  ".join(
            part for part in (self._what, f"{self._done:,.0f}{share}", f"{_rate(speed)}/s", end, note) if part
        )
        if self._line.on_terminal:
            self._line.redraw(text)
        else:
            self._line.print(text)


def duration(seconds: float | None) -> str:
    """Seconds as 0:07, 12:05, 3:02:01 or 2d 03:00; - for None or what is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}; make room and run it again") from error


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None for a torn or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _plain(value: Any) -> Any:
    """Arrays and NumPy numbers as Python's; containers throughout."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return float(value) if isinstance(value, float) else value
    return _plain(value.tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value


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
