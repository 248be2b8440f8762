"""Memory-mapped arrays of a token store, checked chunk by chunk on first read.

`checksums.bin`, written after the arrays, has a CRC-32 for each CHUNK bytes of each array. It is not part of the
store's description, so the fingerprint of a text is the same with and without it. Layout, little-endian:
    magic, version (uint32), bytes per chunk (uint32), the store's fingerprint (32 bytes)
    for each array, by name: one uint32 per chunk
    the CRC-32 of all of these bytes (uint32)
A store without this file predates chunk checksums: the SHA-256 of each whole array, from the description, is compared
instead when the array is first used.
"""

import hashlib
import logging
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.bin"
# The first row read in a chunk pays for checking it: 30 us per 32,768 ids.
CHUNK = 1 << 16
# Without chunk checksums, arrays up to this size are read as a whole, in some seconds.
MOST_AT_ONCE = 4 << 30

_HEADER = struct.Struct("<8sII32s")
_MAGIC, _VERSION = b"jaxlmcrc", 1
_LOGGED_FROM = 1 << 30  # bytes; larger checks are logged
REMEDY = "restore it from a copy, or delete the store and prepare it again"


class DamagedStore(InputError):
    """Error for a store array that differs from what was written; names the file, the bytes and the remedy."""


class CheckedArray:
    """One-dimensional memory-mapped array of a store. An index or a slice checks each chunk on its first read.

    `numpy.asarray` checks all chunks and returns the array itself. dtype, shape: of the array. Thread-safe.
    Raises DamagedStore if a chunk differs from what was written, or has a value below 0 or above `most`.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        length: int,
        checksums: np.ndarray | None = None,
        most: int | None = None,
        remedy: str = REMEDY,
    ):
        """Map the file.

        checksums: (chunks,) uint32, or None for an array that is already checked. remedy: what helps if it is damaged.
        """
        self.dtype, self.shape = dtype, (length,)
        self._path, self._checksums, self._most, self._remedy = path, checksums, most, remedy
        try:
            # asarray: same pages, but slices of a memmap are slow.
            self._array = np.asarray(np.memmap(path, dtype, "r", shape=(length,))) if length else np.zeros(0, dtype)
            self._descriptor = os.open(path, os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: it was truncated after the store was opened
            raise DamagedStore(f"{path} cannot be read: {error}; {remedy}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._left = 0 if checksums is None else len(checksums)  # number of unchecked chunks
        self._checked = bytearray(self._left)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if self._left:
            first, end = 0, len(self)  # of a list of indices, a mask, or a slice with another step than 1
            if isinstance(key, int | np.integer):
                first = int(key) + (len(self) if key < 0 else 0)
                end = first + 1
            elif isinstance(key, slice) and key.step in (None, 1):
                first, end, _ = key.indices(len(self))
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
        where = f"{begin:,} to {begin + wanted - 1:,}"
        try:  # read, not mapped: a disk error raises OSError here, but kills the process there
            content = os.pread(self._descriptor, wanted, begin)
        except OSError as error:
            raise DamagedStore(
                f"{self._path}: bytes {where} cannot be read: {error.strerror}; {self._remedy}"
            ) from error
        if zlib.crc32(content) != self._checksums[chunk]:
            raise DamagedStore(f"{self._path} is damaged in bytes {where} (wrong checksum); {self._remedy}")
        check_values(self._path, np.frombuffer(content, self.dtype), self._most)
        with self._lock:
            if not self._checked[chunk]:
                self._checked[chunk] = 1
                self._left -= 1


def check_values(path: Path, values: np.ndarray, most: int | None) -> None:
    """Raise DamagedStore if a value of an array is below 0 or above `most`, which None does not check."""
    if most is None or not len(values):
        return
    unsigned = values.view(f"<u{values.dtype.itemsize}")  # the negative ones are the largest
    if int(largest := unsigned.max()) > most:
        found = int(values[unsigned == largest][0])
        raise DamagedStore(f"{path} must have values from 0 to {most:,}, got {found:,}; {REMEDY}")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunk_checksums(directory: Path, description: dict[str, Any]) -> bytes:
    """Return the content of `checksums.bin` for the described arrays in a directory."""
    found = {}
    for name, array in description["arrays"].items():
        with (directory / array["file"]).open("rb") as file:
            found[name] = [zlib.crc32(file.read(CHUNK)) for _ in range(0, array["bytes"], CHUNK)]
    return checksums_content(description, found)


def checksums_content(description: dict[str, Any], checksums: Mapping[str, Sequence[int]]) -> bytes:
    """Return the content of `checksums.bin`. checksums: of the chunks of each array."""
    content = _HEADER.pack(_MAGIC, _VERSION, CHUNK, bytes.fromhex(description["fingerprint"]))
    for name in sorted(description["arrays"]):
        content += np.array(checksums[name], "<u4").tobytes()
    return content + struct.pack("<I", zlib.crc32(content))


def digested(blocks: Iterable[bytes]) -> tuple[str, list[int]]:
    """Return the SHA-256 and the chunk checksums of an array's content. blocks: all but the last of whole chunks."""
    sha256, checksums = hashlib.sha256(), list[int]()
    for block in blocks:
        sha256.update(block)
        view = memoryview(block)
        checksums += [zlib.crc32(view[begin : begin + CHUNK]) for begin in range(0, len(block), CHUNK)]
    return sha256.hexdigest(), checksums


def read_checksums(directory: Path, description: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Return the chunk checksums of each array, (chunks,) uint32, or None if the store has none.

    Raises DamagedStore if the file cannot be read or does not match the store.
    """
    path = directory / CHECKSUMS
    if not path.exists():
        return None
    remedy = "delete this file alone to have whole arrays checked instead, or prepare the store again"
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
    """Raise DamagedStore unless the SHA-256 of an array's file is the one in its description."""
    try:
        same = file_sha256(path) == array["sha256"]
    except OSError as error:
        raise DamagedStore(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    if not same:
        raise DamagedStore(f"{path} is damaged (its checksum differs from the description); {REMEDY}")


def check_old(path: Path, array: dict[str, Any]) -> None:
    """Check a whole array that has no chunk checksums; above MOST_AT_ONCE bytes, only log a warning.

    Raises DamagedStore if the checksum differs.
    """
    size = array["bytes"]
    if size > MOST_AT_ONCE:
        log.warning(
            "%s (%.3g GiB) has no chunk checksums and was not checked; check it once with --verify-stores of "
            "jaxlm.pretrain",
            path,
            size / 2**30,
        )
        return
    if size >= _LOGGED_FROM:
        log.info("checking %s (%.3g GiB), which has no chunk checksums", path, size / 2**30)
    check_whole(path, array)
