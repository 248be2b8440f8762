"""What storage says when a read or a write fails, in one line; TensorStore fills pages."""

import logging
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

import jax

from jaxlm.errors import RunError

_WORDS = {"DATA_LOSS": "altered", "OUT_OF_RANGE": "cut short", "NOT_FOUND": "missing"}  # TensorStore's codes
_NOT_DAMAGE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
    "Forbidden",
)
_CLIENTS = ("gcsfs", "google", "aiohttp", "requests")  # of gs://: their errors say nothing of what lies there


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def failure_reason(error: BaseException) -> str:
    """The telling part of an error's text, which TensorStore fills with its specifications."""
    text = " ".join(str(root_cause(error)).split()) or type(error).__name__
    for known in ("No space left on device", "Disk quota exceeded", "File too large"):
        if known in text:
            return known
    files = re.findall(r'local file "([^"]+)"', text)
    if files and (word := _WORDS.get(text.split(":", 1)[0])):
        return f"{files[-1]} is {word}"
    text = text.split(" [tensorstore_spec", 1)[0].split(" [source locations", 1)[0]
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]}"


def raise_unless_damage(place: PathLike, error: Exception) -> None:
    """Pass on errors that do not say that the files at `place` are damaged: memory, rights, a server that is away."""
    if isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
        raise error
    cause = root_cause(error)
    away = isinstance(cause, PermissionError | ConnectionError | TimeoutError) or str(cause).startswith(_NOT_DAMAGE)
    if away or type(cause).__module__.partition(".")[0] in _CLIENTS:
        raise RunError(f"{place} could not be read: {failure_reason(cause)}; try again") from error


def free_space(directory: PathLike) -> str:
    """Room on the file system of `directory`, in brackets after a blank; nothing when that is unknown."""
    try:
        return f" ({shutil.disk_usage(directory).free / 2**30:.3g} GiB free)"
    except OSError:
        return ""


@contextmanager
def quiet_failures() -> Iterator[None]:
    """Keep what asyncio and TensorStore say about the reads beside a failed one off the terminal."""
    previous, asyncio_log = sys.unraisablehook, logging.getLogger("asyncio")
    silenced = asyncio_log.disabled

    def hook(unraisable):
        if "Event loop is closed" not in str(unraisable.exc_value) and "coroutine" not in repr(unraisable.object):
            previous(unraisable)

    sys.unraisablehook, asyncio_log.disabled = hook, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited")
            yield
    finally:
        sys.unraisablehook, asyncio_log.disabled = previous, silenced
