"""Files that are there whole or not at all."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.bounded_read import SIGNATURE, signature
from jaxlm.errors import InputError


@contextlib.contextmanager
def whole_file(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[Any]:
    """A file to write, text or bytes, which has its name once it is whole, also after a power cut; `path` was an
    --output."""
    check_output(path)
    partial = path.with_name(path.name + ".partial")
    try:
        file = partial.open(mode, encoding="utf-8" if mode == "w" else None)
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror}; name a file that can be written") from error
    with file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def check_output(path: Path) -> None:
    """InputError where `path`, an --output, cannot become a file: said before the work, not after it."""
    reason = None
    if path.is_dir():
        reason = os.strerror(errno.EISDIR)
    elif path.exists() and not path.is_file():
        reason = "it is a device or a pipe"
    elif not path.parent.is_dir():
        reason = os.strerror(errno.ENOENT)
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES)
    if reason is not None:
        raise InputError(f"--output {path}: {reason}; name a file that can be written")


def write_json(path: Path, value: Any, *, signed: bool = False) -> None:
    """Write a JSON file that is there whole or not at all, also after a power cut.

    signed: add the field SIGNATURE to an object, so that `jaxlm.bounded_read.read_signed` finds what alters it.
    """
    if signed:
        value = value | {SIGNATURE: signature(json.loads(json.dumps(value)))}
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file, UTF-8 where it is text, and bring it to the disk: a file that says it is there comes after it."""
    with path.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Bring a rename in `directory` to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
