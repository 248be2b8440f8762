"""Arrays of a token store: mapped, and checked chunk by chunk as they are read for the first time.

`checksums.bin`, written after the arrays, has a CRC-32 for each CHUNK bytes of each array. It is not part of the
store's description, so a text has one fingerprint with and without it. Its bytes, integers little-endian:
    magic, version (uint32), bytes per chunk (uint32), the store's fingerprint (32 bytes)
    for each array, by name: one uint32 per chunk
    the CRC-32 of all of these bytes (uint32)
A store without the file was made before there were chunk checksums: the SHA-256 of a whole array in its description
is compared instead, when the array is first used.
"""

import hashlib
import logging
import os
import struct
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.bin"
# A row that begins a chunk pays for the chunk: 30 us for the rows of 32,768 ids.
CHUNK = 1 << 16
# Arrays up to this size are read as a whole where there are no chunk checksums: some seconds.
MOST_AT_ONCE = 4 << 30

_HEADER = struct.Struct("<8sII32s")
_MAGIC, _VERSION = b"jaxlmcrc", 1
_SAID_FROM = 1 << 30  # bytes; a check of more is announced
REMEDY = "put it back from a copy, or delete the store and prepare it again"


class DamagedStore(InputError):
    """An array of a store is not what was written. The message names the file, the bytes and the remedy."""


class CheckedArray:
    """A one-dimensional array of a store, mapped. An index or a slice checks the chunks it reads, once.

    `numpy.asarray` of it checks all of them and gives the array itself. dtype, shape: of the array.
    Raises DamagedStore where a chunk is not what was written. Threads may share it.
    """

    def __init__(self, path: Path, dtype: np.dtype, length: int, checksums: np.ndarray | None = None):
        """checksums: (chunks,) uint32, or None for an array that was checked already."""
        self.dtype, self.shape = dtype, (length,)
        self._path, self._checksums = path, checksums
        try:
            # asarray: the same pages; a memmap's own slices are slow.
            self._array = np.asarray(np.memmap(path, dtype, "r", shape=(length,))) if length else np.zeros(0, dtype)
            self._descriptor = os.open(path, os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: it was cut off since the store was opened
            raise DamagedStore(f"{path} cannot be read: {error}; {REMEDY}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._left = 0 if checksums is None else len(checksums)  # chunks that were not checked
        self._checked = bytearray(self._left)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if self._left:
            if isinstance(key, slice):
                first, end, step = key.indices(len(self))
                if step != 1:
                    first, end = 0, len(self)
            elif isinstance(key, int | np.integer):
                first = int(key) + (len(self) if key < 0 else 0)
                end = first + 1
            else:  # a list of indices, a mask
                first, end = 0, len(self)
            self._check(first, end)
        return self._array[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._left:
            self._check(0, len(self))
        return np.array(self._array, dtype=dtype, copy=copy)

    def _check(self, first: int, end: int) -> None:
        """Check the chunks of items first … end - 1."""
        size = self.dtype.itemsize
        for chunk in range(max(0, first) * size // CHUNK, -(-min(end, len(self)) * size // CHUNK)):
            if not self._checked[chunk]:
                self._check_chunk(chunk)

    def _check_chunk(self, chunk: int) -> None:
        assert self._checksums is not None
        begin = chunk * CHUNK
        wanted = min(CHUNK, len(self) * self.dtype.itemsize - begin)
        try:  # read and not mapped: a disk's error is an OSError here, and the end of the process there
            content = os.pread(self._descriptor, wanted, begin)
        except OSError as error:
            raise DamagedStore(
                f"{self._path}: bytes {begin:,} to {begin + wanted - 1:,} cannot be read: {error.strerror}; {REMEDY}"
            ) from error
        if zlib.crc32(content) != self._checksums[chunk]:
            raise DamagedStore(
                f"{self._path} is damaged in bytes {begin:,} to {begin + wanted - 1:,}, by their checksum; {REMEDY}"
            )
        with self._lock:
            if not self._checked[chunk]:
                self._checked[chunk] = 1
                self._left -= 1


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunk_checksums(directory: Path, description: dict[str, Any]) -> bytes:
    """Return the content of `checksums.bin` for the arrays that lie in a directory as its description says."""
    content = _HEADER.pack(_MAGIC, _VERSION, CHUNK, bytes.fromhex(description["fingerprint"]))
    for _, array in sorted(description["arrays"].items()):
        with (directory / array["file"]).open("rb") as file:
            found = [zlib.crc32(file.read(CHUNK)) for _ in range(0, array["bytes"], CHUNK)]
        content += np.array(found, "<u4").tobytes()
    return content + struct.pack("<I", zlib.crc32(content))


def read_checksums(directory: Path, description: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Read the checksums of each array's chunks, (chunks,) uint32; None where the store has none. DamagedStore."""
    path = directory / CHECKSUMS
    if not path.exists():
        return None
    remedy = "delete this file alone, and the arrays are checked as wholes, or prepare the store again"
    counts = {name: -(-array["bytes"] // CHUNK) for name, array in sorted(description["arrays"].items())}
    expected = _HEADER.size + 4 * sum(counts.values()) + 4
    try:
        size = path.stat().st_size if path.is_file() else -1
        content = path.read_bytes() if size == expected else b""
    except OSError as error:
        raise DamagedStore(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    if not content or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):
        raise DamagedStore(f"{path} is damaged; {remedy}")
    magic, version, chunk, fingerprint = _HEADER.unpack_from(content)
    if (magic, version, chunk, fingerprint.hex()) != (_MAGIC, _VERSION, CHUNK, description["fingerprint"]):
        raise DamagedStore(f"{path} belongs to another store or to another version of jaxlm; {remedy}")
    checksums, at = {}, _HEADER.size
    for name, count in counts.items():
        checksums[name] = np.frombuffer(content, "<u4", count, at)
        at += 4 * count
    return checksums


def check_whole(path: Path, array: dict[str, Any]) -> None:
    """Compare the SHA-256 of an array's file with the one in its description. DamagedStore."""
    try:
        same = file_sha256(path) == array["sha256"]
    except OSError as error:
        raise DamagedStore(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    if not same:
        raise DamagedStore(f"{path} is damaged: its checksum is not the one in the description; {REMEDY}")


def check_old(path: Path, array: dict[str, Any]) -> None:
    """Check an array without chunk checksums as a whole, unless it is over MOST_AT_ONCE: then warn. DamagedStore."""
    size = array["bytes"]
    if size > MOST_AT_ONCE:
        log.warning(
            "%s (%.3g GiB) has no checksums of its chunks and was not checked: --verify-stores of jaxlm.pretrain "
            "does it once",
            path,
            size / 2**30,
        )
        return
    if size >= _SAID_FROM:
        log.info("%s: checking %.3g GiB, which have no checksums of their chunks", path, size / 2**30)
    check_whole(path, array)
