"""TensorFlow's checkpoint files, `NAME.index` and `NAME.data-00000-of-00001`, read without TensorFlow.

The index is an uncompressed table in LevelDB's format: blocks of sorted keys that share prefixes, each ending in its
restart points, and a footer that locates the block of blocks. A key is a tensor's name; its value is a protocol buffer
(`tensor_bundle.proto`: dtype 1, shape 2, shard 3, offset 4, size 5, crc32c 6) that locates it in a data file. Each
block, and each tensor as it is read, is checked against its masked CRC-32C.
"""

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np

from jaxlm.errors import InputError
from jaxlm.files import open_regular, read_regular
from jaxlm.interop.files import Info, files_fingerprint

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
# tensorflow/core/framework/types.proto.
_TYPES = {1: "F32", 2: "F64", 3: "I32", 9: "I64", 14: "BF16", 19: "F16"}
_DTYPES = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
}


class Bundle:
    """The tensors of a checkpoint by name; each is read on request.

    prefix: the path without `.index`. InputError, one line, if a file is missing or damaged.
    """

    def __init__(self, prefix: Path):
        self.index = prefix.with_name(prefix.name + ".index")
        try:
            table = read_regular(self.index)
        except OSError as error:
            raise InputError(f"{self.index}: {error.strerror}; a TensorFlow checkpoint should be there") from error
        try:
            entries = dict(_entries(table))
            self.shards = _field(_message(entries.pop(b"")), 1, 1)
            self._places: dict[str, tuple[int, int, int]] = {}  # offset, size, masked checksum
            self.infos: dict[str, Info] = {}
            for key, value in entries.items():
                message, name = _message(value), key.decode()
                shape = tuple(_field(_message(dim), 1, 0) for dim in _message(_field(message, 2, b"")).get(2, []))
                shard, offset, size = (_field(message, number, 0) for number in (3, 4, 5))
                (checksum,) = struct.unpack("<I", _field(message, 6, bytes(4)))
                dtype = _TYPES[_field(message, 1, 0)]
                if size != math.prod(shape) * _DTYPES[dtype].itemsize or 7 in message:
                    raise ValueError(f"tensor {name} is not stored whole")
                self._places[name] = (offset, size, checksum)
                self.infos[name] = Info(shape, dtype, self._data(prefix, shard))
        except (ValueError, KeyError, IndexError, struct.error, TypeError) as error:
            raise InputError(
                f"{self.index} is damaged or not a TensorFlow checkpoint ({error}); download it again"
            ) from error

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the file's own type."""
        info, (offset, size, checksum) = self.infos[name], self._places[name]
        try:
            with open_regular(info.file) as file:
                if offset + size > os.fstat(file.fileno()).st_size:
                    raise InputError(f"{info.file} ends within tensor {name}; download it again")
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise InputError(f"{info.file}: {error.strerror}; download it again") from error
        if _masked_crc32c(content) != checksum:
            raise InputError(f"{info.file}: tensor {name} does not match its checksum; download it again")
        return np.frombuffer(content, _DTYPES[info.dtype]).reshape(info.shape)

    def fingerprint(self) -> str:
        """Return the SHA-256 over the data files."""
        return files_fingerprint(sorted({info.file for info in self.infos.values()}))

    def _data(self, prefix: Path, shard: int) -> Path:
        return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{self.shards:05d}")


def _entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of a whole table, in order."""
    footer = table[-_FOOTER:]
    if len(footer) < _FOOTER or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("it does not end like a table")
    _, _, at = _handle(footer, 0)
    offset, size, _ = _handle(footer, at)
    for _, value in _block(table, offset, size):
        start, length, _ = _handle(value, 0)
        yield from _block(table, start, length)


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block = table[offset : offset + size]
    if len(block) != size or table[offset + size] != 0:
        raise ValueError("a block is truncated or compressed")
    (checksum,) = struct.unpack("<I", table[offset + size + 1 : offset + size + 5])
    if _masked_crc32c(table[offset : offset + size + 1]) != checksum:
        raise ValueError("a block does not match its checksum")
    (restarts,) = struct.unpack("<I", block[-4:])
    end, at, key = size - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + length]
        at += own + length


def _handle(content: bytes, at: int) -> tuple[int, int, int]:
    """Return (offset, size) of a block, and the position of the next number."""
    offset, at = _varint(content, at)
    size, at = _varint(content, at)
    return offset, size, at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _message(content: bytes) -> dict[int, list]:
    """Return the fields of a protocol buffer by number, each with all its values."""
    fields: dict[int, list] = {}
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        number, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(content, at)
        elif kind == 2:
            length, at = _varint(content, at)
            value, at = content[at : at + length], at + length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value, at = content[at : at + width], at + width
        else:
            raise ValueError(f"a wire type must be 0, 1, 2 or 5, got {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def _field(message: dict[int, list], number: int, default):
    """Return the last value of a field, or `default` if it is absent."""
    return message[number][-1] if number in message else default


def _masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of `content` as TensorFlow stores it (tensorflow/core/lib/hash/crc32c.h, `Mask`)."""
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
