"""Metrics of a run: metrics.jsonl and the TensorBoard files.

tensorboardX and jax are imported only when a MetricsLog opens.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jaxlm.errors import InputError, RunError
from jaxlm.files import open_regular, parse_json, write_file
from jaxlm.wording import counted, finite


class MetricsLog:
    """Writer of metrics.jsonl and tensorboard/ of a run directory; does nothing on processes other than 0.

    Each line is one JSON object, `step` first, flushed when written. Floats are written in the shortest form that reads
    back to the same bits as a Python float (a float32 is widened first). NaN and infinities, which JSON lacks, are
    written as the strings "NaN", "Infinity" and "-Infinity", which `float` and `read_metrics` understand.

    resume_step: the step of the checkpoint that training resumes from; later lines and incomplete lines are dropped,
    and TensorBoard purges from resume_step + 1. None: training starts from scratch and all lines are dropped. scope:
    JSON values that identify one of several trainings in the same file ({"seed": 3}); every line contains them, only
    lines of the same scope are dropped, and TensorBoard shows each scope as a separate run. on_record: called on every
    process with each line as a dictionary, after it is written. `notes` says what was dropped.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int | None,
        *,
        scope: Mapping[str, Any] | None = None,
        on_record: Callable[[dict[str, Any]], None] | None = None,
        process: int | None = None,
    ):
        if process is None:
            import jax  # a program that logs metrics has imported jax already

            process = jax.process_index()
        self.path = Path(directory) / "metrics.jsonl"
        self.notes: list[str] = []
        self._scope, self._on_record = dict(scope or {}), on_record
        self._file: TextIO | None = None
        self._board: Any = None
        if process != 0:
            return
        with _disk_errors(self.path):
            self._trim(resume_step)
            self._file = self.path.open("a", encoding="utf-8")
            from tensorboardX import SummaryWriter  # takes half a second; readers of metrics do not need it

            # Also from scratch: an earlier start may have been killed before its first checkpoint.
            purge_step = 0 if resume_step is None else resume_step + 1
            board = Path(directory) / "tensorboard" / ",".join(f"{name}={value}" for name, value in self._scope.items())
            suffix = f".{time.time_ns()}"  # two starts in the same second would otherwise share a file
            self._board = SummaryWriter(str(board), purge_step=purge_step, flush_secs=30, filename_suffix=suffix)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line. Values are numbers, 0-d arrays, strings, booleans, None, and lists and dictionaries of them.

        TensorBoard gets the finite numbers. Raises RunError if the disk is full.
        """
        plain = {name: _plain(value) for name, value in values.items()}
        if self._file is not None:
            line = json.dumps({"step": step} | self._scope | finite(plain), allow_nan=False)
            with _disk_errors(self.path):
                self._file.write(line + "\n")
                self._file.flush()
                for name, value in plain.items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        self._board.add_scalar(name, value, step)
        if self._on_record is not None:
            self._on_record({"step": step} | self._scope | plain)

    def to_tensorboard(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to TensorBoard alone."""
        if self._file is not None:
            with _disk_errors(self.path):
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Sync every line to disk; call this before the checkpoint of a step counts."""
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
        write_file(self.path, b"".join(kept))
        start = "from the start" if resume_step is None else f"beyond step {resume_step}"
        dropped = [f"{counted(beyond, 'line')} {start}"] if beyond else []
        dropped += [counted(torn, "incomplete line")] if torn else []
        self.notes.append(f"{self.path.name}: dropped {' and '.join(dropped)}")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, floats to the bit, without incomplete lines (a run that is writing)."""
    try:
        with open_regular(Path(path)) as file:
            for line in file:
                if _step_of(line) is not None:
                    yield {name: _restored(value) for name, value in parse_json(line).items()}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; put it back from a copy, or remove it") from error


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}; free some space and run the same command again"
        ) from error


_LAST = 2**31 - 1  # a step is an int32


def _step_of(line: bytes) -> int | None:
    """Return the step of a complete line, or None for an incomplete or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) and 0 <= step <= _LAST else None


def _plain(value: Any) -> Any:
    """Convert arrays and NumPy numbers to Python values, recursively."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return float(value) if isinstance(value, float) else value
    return _plain(value.tolist())


def _restored(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
