"""The output of the evaluations: lines, files, JSON and progress."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxlm.files import atomic_output
from jaxlm.progress import Progress
from jaxlm.wording import finite

log = logging.getLogger("jaxlm")
_is_call: ContextVar[bool] = ContextVar("is_call", default=False)


@contextlib.contextmanager
def as_call() -> Iterator[None]:
    """Let lines go to the logger `jaxlm`, and show no progress, while the block runs: a call in Python."""
    token = _is_call.set(True)
    try:
        yield
    finally:
        _is_call.reset(token)


def shows_progress() -> bool:
    """Return True on process 0 of a command."""
    return jax.process_index() == 0 and not _is_call.get()


class Counted(Progress):
    """Progress with a counter."""

    done = 0

    def count(self, value: Any) -> Any:
        """Count one item and return it."""
        self.done += 1
        self.update(self.done)
        return value


@contextlib.contextmanager
def progress_of(
    what: str, total: int | None = None, *, active: bool = True, compiles: bool = False
) -> Iterator[Counted]:
    """Show a progress line on process 0 while the block runs. compiles: see `Progress`."""
    progress = Counted(what, total, active=active and shows_progress(), compiles=compiles)
    yield progress
    if progress.done and active and not _is_call.get():
        progress.close()


@contextlib.contextmanager
def output_file(path: Path | None) -> Iterator[TextIO]:
    """Open `path` for an atomic write, or the null device without a path or on processes other than 0."""
    if path is None or jax.process_index() > 0:
        with open(os.devnull, "w", encoding="utf-8") as null:
            yield null
        return
    with atomic_output(path) as file:
        yield file


def values_json(values: dict[str, Any]) -> str:
    """Return metrics as one line of JSON, with NaN and infinities as strings."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on process 0, or log them in a call in Python. stream: default, standard output."""
    if jax.process_index() > 0:
        return
    if _is_call.get():
        for line in lines:
            log.info("%s", line)
    else:
        print(*lines, sep="\n", file=stream or sys.stdout, flush=True)
