"""Bounded reading of untrusted files: JSON of limited nesting, regular files of a limited size.

Rejected files raise ValueError or OSError, which readers catch for damaged and missing files anyway.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

# The largest file that is read whole; the largest vocabulary, with a million tokens, has some tens of MB.
LARGEST = 1 << 28
SIGNATURE = "sha256"  # the field of a JSON object that holds the hash of the others


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError if it is damaged, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a regular file. ValueError or OSError for anything else."""
    value = parse_json(read_regular(path))
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_signed(path: Path) -> dict[str, Any]:
    """Return the JSON object that `jaxlm.atomic_write.write_json` signed, or one written before signatures existed.

    ValueError or OSError for anything else, including an altered file.
    """
    values = read_object(path)
    if (sha256 := values.pop(SIGNATURE, None)) is not None and sha256 != signature(values):
        raise ValueError(f"it was altered: its {SIGNATURE} does not match (after an intended change remove that field)")
    return values


def signature(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, independent of their order and white space."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. OSError for anything else: reading a device or a pipe may block or never end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file. OSError for anything else, and for more than `largest` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"larger than {largest:,} bytes", str(path))
        return file.read()
