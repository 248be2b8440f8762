"""log.txt of a run: the lines that its commands print, after a header for each start.

A command copies what Python writes to standard output and standard error from its first line on (`copied_output`). The
lines are kept until the run records its start (`begin`), which is when log.txt is opened, and are appended to it from
then on. Only process 0 begins. Of a line that is redrawn on a terminal, log.txt has the last state, and one every 10 s.
"""

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxlm.errors import last_line, one_line
from jaxlm.progress import ERASE

FILE = "log.txt"
_KEPT = 1000  # lines from before the start
_SECONDS = 10.0  # interval between two states of a redrawn line

_active: "TextLog | None" = None  # of the command that runs; set by `copied_output`


class TextLog:
    """Lines of one or more streams, kept in memory until `open` names a file. Stops writing after the first OSError."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT)
        self._unfinished: dict[str, str] = {}  # by stream
        self._file: TextIO | None = None
        self._lock = threading.RLock()
        self._clock, self._taken = clock, clock()

    def add(self, stream: str, text: str) -> None:
        """Add text that was written to a stream."""
        with self._lock:
            *lines, rest = (self._unfinished.get(stream, "") + text).split("\n")
            for line in lines:
                self._put(self._state(line))
            self._unfinished[stream] = self._state(rest)

    def open(self, path: Path, header: str) -> None:
        """Append a header and the kept lines to a file, and then every line that follows."""
        with self._lock:
            self.close()
            with contextlib.suppress(OSError):
                self._file = path.open("a", encoding="utf-8")
            kept, self._lines = [header, *self._lines], collections.deque(maxlen=_KEPT)
            for line in kept:
                self._put(line)

    def close(self) -> None:
        """Close the file. Later lines are kept in memory again."""
        with self._lock, contextlib.suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _state(self, line: str) -> str:
        """Return the last state of a line that may have been redrawn, and add an earlier one if it is time to."""
        *erased, state = line.split(ERASE)
        if any(erased) and self._clock() - self._taken >= _SECONDS:
            self._taken = self._clock()
            self._put(next(text for text in reversed(erased) if text))
        return state

    def _put(self, line: str) -> None:
        if self._file is None:
            self._lines.append(line)
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError:  # a full disk; the metrics report it
            self.close()


class _Copied:
    """A text stream that adds what is written to a TextLog. Everything else is that of the stream."""

    def __init__(self, stream: TextIO, name: str, log: TextLog):
        self._stream, self._name, self._log = stream, name, log

    def write(self, text: str) -> int:
        self._log.add(self._name, text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def copied_output() -> Iterator[None]:
    """Copy standard output and standard error while the block runs, for the log.txt of the run that begins in it."""
    global _active
    streams, log = (sys.stdout, sys.stderr), TextLog()
    sys.stdout, sys.stderr = _Copied(sys.stdout, "output", log), _Copied(sys.stderr, "error", log)  # type: ignore[assignment]
    _active = log
    try:
        yield
    finally:
        _active = None
        sys.stdout, sys.stderr = streams
        log.close()


def begin(directory: Path, header: str) -> None:
    """Append a header, the lines so far and all that follow to the log.txt of a run, if the output is copied."""
    if _active is not None:
        _active.open(directory / FILE, header)


def end(error: BaseException | None) -> None:
    """Append the error that ends the run, which is printed later, and close log.txt."""
    if _active is None:
        return
    if error is not None:
        _active.add("error", f"{last_line(error) or f'failed: {type(error).__name__}: {one_line(error)}'}\n")
    _active.close()
