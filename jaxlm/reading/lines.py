"""Lines of a text file or of standard input, with their numbers, in bounded memory; and files opened for reading.

Encoding is UTF-8, and a byte order mark at the very start is dropped. Lines break at `\\n` only and lose one trailing
`\\r` (never `str.splitlines`, which also breaks at U+0085, U+2028 and form feeds inside sentences). Whatever
fails while a file is open becomes an InputError that names the file.
"""

import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast

from jaxlm.errors import InputError
from jaxlm.storage import open_place

Errors = Literal["strict", "replace"]

# Ratio of text size to compressed file size, for estimates only.
COMPRESSED = {".gz": 2.8, ".xz": 3.6, ".zst": 3.0}
BYTE_ORDER_MARK = "\ufeff"
# The beginnings of files that are not text.
BINARY = {b"PK\x03\x04": "an Excel file or an archive", b"PAR1\x15": "a Parquet file", b"\x1f\x8b": "a gzip file"}
CONVERT = "convert the file to UTF-8"
_CHUNK = 1 << 20


def is_compressed(path: str) -> bool:
    """Return True if a path has the suffix of a supported compression."""
    return Path(path).suffix in COMPRESSED


def input_name(path: Path | str) -> str:
    """Return the name of a file for messages; `-` is standard input."""
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def open_input(path: Path | str, *, decompress: bool = False) -> Iterator[IO[bytes]]:
    """Open a regular file, an object, or standard input for `-`, as bytes.

    decompress: True if .gz, .xz and .zst are decompressed.

    Raises:
      InputError: the file cannot be opened or read, or its compression is damaged.
    """
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        with open_place(str(path)) as file:
            yield _decompressed(file, str(path)) if decompress else file
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, _BadZstd) as error:
        raise InputError(f"{path}: the compressed file is damaged or truncated ({error}); replace it") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}; give a readable file") from error


class Lines:
    """Iterates over (number from 1, text without its line end) of the lines of a file, or of standard input for `-`.

    Args:
      errors: bytes that are not UTF-8 raise an error (strict), or become U+FFFD (replace).
      begin, end: only lines that start at bytes [begin, end) are read, and numbers count from the first of them.
      decompress: True if .gz, .xz and .zst are decompressed.
      remedy: the end of the error for bytes that are not UTF-8.

    Attributes: start, the offset of the current line in the file.

    Raises:
      InputError: a file that cannot be read or begins as a binary file, or bytes that are not UTF-8, with the line and
        the offset in the file.
    """

    def __init__(
        self,
        path: Path | str,
        errors: Errors = "strict",
        *,
        begin: int = 0,
        end: int | None = None,
        decompress: bool = False,
        encoding: str = "utf-8",
        remedy: str = CONVERT,
    ) -> None:
        self.path, self.errors, self.begin, self.end, self.decompress = path, errors, begin, end, decompress
        self.encoding, self.remedy = encoding, remedy
        self.start = begin

    def __iter__(self) -> Iterator[tuple[int, str]]:
        encoding, errors, end = self.encoding, self.errors, self.end
        with open_input(self.path, decompress=self.decompress) as stream:
            offset = 0
            if self.begin > 0:
                stream.seek(self.begin - 1)
                offset = self.begin - 1 + len(stream.readline())
            for number, line in enumerate(stream, 1):
                if end is not None and offset >= end:
                    return
                self.start = offset
                offset += len(line)
                if not self.start:
                    self._check_beginning(line)
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    text = line.decode(encoding, errors)
                except UnicodeDecodeError as error:
                    raise not_utf8(error, self.where(number), self.start, self.remedy) from None
                yield number, text if self.start else text.removeprefix(BYTE_ORDER_MARK)

    def text(self) -> str:
        """Return all lines, joined by line feeds."""
        return "\n".join(text for _, text in self)

    def where(self, number: int) -> str:
        """Return the place of a line, for messages. The lines before `begin` are counted here, where one is needed."""
        if self.begin > 0:
            with open_input(self.path, decompress=self.decompress) as stream:
                left, chunk = self.begin, b""
                while left > 0 and (chunk := stream.read(min(left, _CHUNK))):
                    number += chunk.count(b"\n")
                    left -= len(chunk)
            number += not chunk.endswith(b"\n")  # a line that begins before `begin` and ends after it
        return f"{input_name(self.path)} line {number}"

    def _check_beginning(self, line: bytes) -> None:
        for magic, kind in BINARY.items():
            if line.startswith(magic):
                raise InputError(
                    f"{input_name(self.path)} must be text, got {kind}; save it as CSV, or give it its own suffix"
                )


def not_utf8(error: UnicodeDecodeError, where: str, offset: int = 0, remedy: str = CONVERT) -> InputError:
    """Return the error for bytes that begin at `offset` of a file or a value and are not UTF-8."""
    byte = error.object[error.start]
    return InputError(f"{where}: byte 0x{byte:02x} at offset {offset + error.start} is not UTF-8; {remedy}")


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(file, "rb"))
    return io.BufferedReader(_ZstdReader(file, path), _CHUNK) if suffix == ".zst" else file


class _BadZstd(Exception):
    """Error for a .zst file that cannot be decompressed."""


class _ZstdReader(io.RawIOBase):
    """Reader of all frames of a .zst file; unlike the library's own reader, it detects a truncated file."""

    def __init__(self, file: BinaryIO, path: str):
        try:
            import zstandard
        except ImportError as error:
            raise InputError(
                f"{path}: .zst needs zstandard, which is not installed; run pip install zstandard"
            ) from error
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
