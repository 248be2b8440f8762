"""Errors of storage in one line; those of TensorStore fill pages."""

import os
import re
import shutil
from os import PathLike
from pathlib import Path

import jax

from jaxlm.errors import InputError, RunError
from jaxlm.wording import byte_size

NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")  # reasons of failed writes
_WORDS = {"DATA_LOSS": "corrupted", "OUT_OF_RANGE": "truncated", "NOT_FOUND": "missing"}  # TensorStore's codes
_NOT_DAMAGE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
    "Forbidden",
)
_CLIENTS = ("gcsfs", "google", "aiohttp", "requests")  # of gs://: their errors do not mean damaged files


def root_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def failure_reason(error: BaseException) -> str:
    """Return the informative part of an error's text, without TensorStore's specifications."""
    text = " ".join(str(root_cause(error)).split()) or type(error).__name__
    for known in NO_ROOM:
        if known in text:
            return known
    files = re.findall(r'local file "([^"]+)"', text)
    if files and (word := _WORDS.get(text.split(":", 1)[0])):
        return f"{files[-1]} is {word}"
    text = text.split(" [tensorstore_spec", 1)[0].split(" [source locations", 1)[0]
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]}"


def raise_unless_damage(place: PathLike, error: Exception) -> None:
    """Re-raise errors that do not mean damaged files at `place`: out of memory, permissions, an unreachable server."""
    if isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
        raise error
    cause = root_cause(error)
    away = isinstance(cause, PermissionError | ConnectionError | TimeoutError) or str(cause).startswith(_NOT_DAMAGE)
    if away or type(cause).__module__.partition(".")[0] in _CLIENTS:
        raise RunError(f"{place} could not be read: {failure_reason(cause)}; try again") from error


def not_a_file(directory: PathLike) -> str | None:
    """Return the first path below a local directory that is not a file or directory; reading a pipe would block."""
    if "://" in str(directory):
        return None
    for folder, _, names in os.walk(str(directory)):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                return path
    return None


def free_space(directory: PathLike) -> str:
    """Return the free space of the file system of `directory` in parentheses, or an empty string if unknown."""
    try:
        return f" ({byte_size(shutil.disk_usage(directory).free)} free)"
    except OSError:
        return ""


def check_room(directory: PathLike, size: int, kept: int) -> str | None:
    """Return a note if the file system of `directory` has no room for `kept` more checkpoints of `size` bytes.

    A directory that does not exist yet is on the file system of its parent. InputError if not even one fits.
    """
    if "://" in str(directory):
        return None
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise InputError(
            f"--run must be on a disk with room for a checkpoint, which takes {byte_size(size)}, got {directory} with "
            f"{byte_size(free)} free; make room, or name another --run"
        )
    if free < kept * size:
        return (
            f"{byte_size(free)} are free in {directory}, and {kept} more checkpoints of {byte_size(size)} take "
            f"{byte_size(kept * size)}; make room, or keep fewer (--keep-newest)"
        )
    return None
