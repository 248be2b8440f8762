"""Files opened for reading: regular files, standard input, and compressed files.

Whatever fails while a file is open becomes an InputError that names the file.
"""

import gzip
import io
import lzma
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from jaxlm.bounded_read import open_regular
from jaxlm.errors import InputError

# Ratio of text size to compressed file size, for estimates only.
COMPRESSED = {".gz": 2.8, ".xz": 3.6, ".zst": 3.0}

_BUFFER = 1 << 20


def is_compressed(path: str) -> bool:
    """Return True if a path has the suffix of a supported compression."""
    return Path(path).suffix in COMPRESSED


def input_name(path: Path | str) -> str:
    """Return the name of a file for messages; `-` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def open_input(path: Path | str, *, decompress: bool = False) -> Iterator[IO[bytes]]:
    """Open a regular file, or standard input for `-`, as bytes. decompress: whether .gz, .xz and .zst are decompressed.

    Raises:
      InputError: the file cannot be opened or read, or its compression is damaged.
    """
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        with open_regular(Path(path)) as file:
            yield _decompressed(file, str(path)) if decompress else file
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError, _BadZstd) as error:
        raise InputError(f"{path}: the compressed file is damaged or truncated ({error}); replace it") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}; give a readable file") from error


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(file, "rb"))
    return io.BufferedReader(_ZstdReader(file, path), _BUFFER) if suffix == ".zst" else file


class _BadZstd(Exception):
    """Error for a .zst file that cannot be decompressed."""


class _ZstdReader(io.RawIOBase):
    """Reader of all frames of a .zst file; unlike the library's own reader, it detects a truncated file."""

    def __init__(self, file: BinaryIO, path: str):
        try:
            import zstandard
        except ImportError as error:
            raise InputError(f"{path}: reading .zst needs zstandard; pip install zstandard") from error
        self._library, self._file = zstandard, file
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 15)
            if not self._input:
                if self._frame is not None:
                    raise _BadZstd("it ends inside a frame")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._library.ZstdError as error:
                raise _BadZstd(error) from error
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
