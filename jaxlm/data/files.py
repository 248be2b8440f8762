"""Readers of documents from text, line and JSONL files, compressed or not, in bounded memory.

Readers yield fragments `(text, last)`: a document is one or more fragments, the last one marked. Line and JSONL files
are read in slices: the documents of bytes [begin, end) are a pure function of the file and these two numbers. Adjacent
slices neither share nor drop a document.
"""

import codecs
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from jaxlm.bounded_read import open_regular, parse_json
from jaxlm.errors import InputError

Errors = Literal["strict", "replace"]
Fragments = Iterator[tuple[str, bool]]

# Ratio of text size to compressed file size, for estimates only.
COMPRESSED = {".gz": 2.8, ".xz": 3.6, ".zst": 3.0}

_FRAGMENT = 1 << 20
_BOM = "\ufeff"


def is_compressed(path: str) -> bool:
    """Return whether a path has the suffix of a supported compression."""
    return Path(path).suffix in COMPRESSED


def open_binary(path: str) -> IO[bytes]:
    """Open a file for reading bytes; .gz, .xz and .zst are decompressed."""
    open_regular(Path(path)).close()  # reading a device or a pipe may never end
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path), _FRAGMENT)
    return open(path, "rb")


def read_text(path: str, errors: Errors = "strict") -> Fragments:
    """Yield the whole file as one document, unchanged except for a byte order mark; a blank file yields nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    waiting: list[str] = []
    blank, offset = True, 0
    with _reading(path), open_binary(path) as file:
        while True:
            chunk = file.read(_FRAGMENT)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - len(kept), error) from error
            if offset == 0:
                text = text.removeprefix(_BOM)
            offset += len(chunk)
            blank = blank and (not text or text.isspace())
            if not chunk:
                break
            # One fragment is always held back, so that the last one can be marked.
            waiting.append(text)
            if not blank:
                while len(waiting) > 1:
                    yield waiting.pop(0), False
        waiting.append(text)
    if not blank:
        yield "".join(waiting), True


def read_lines(path: str, begin: int = 0, end: int | None = None, errors: Errors = "strict") -> Fragments:
    """Yield the blocks of lines separated by blank lines. Lines of a document are joined by \\n.

    The slice owns the documents after the first blank line that starts at or after `begin` (from the first line if
    begin is 0), up to the first blank line that starts at or after `end`.
    """
    lines: list[tuple[int, bytes]] = []
    size, continued = 0, False
    with _reading(path), open_binary(path) as file:
        skipping = begin > 0
        for start, line in _lines_from(file, begin):
            blank = not line or line.isspace()
            if blank:
                if lines:
                    yield _joined(path, lines, errors, continued), True
                elif continued:
                    yield "", True
                lines, size, continued, skipping = [], 0, False, False
                if end is not None and start >= end:
                    return
            elif not skipping:
                lines.append((start, line))
                size += len(line)
                if size > _FRAGMENT:
                    yield _joined(path, lines, errors, continued), False
                    lines, size, continued = [], 0, True
    if lines:
        yield _joined(path, lines, errors, continued), True
    elif continued:
        yield "", True


def read_jsonl(
    path: str, field: str, begin: int = 0, end: int | None = None, errors: Errors = "strict"
) -> Iterator[tuple[str, bool]]:
    """Yield field `field` of each line that starts in [begin, end); blank lines and empty texts are skipped."""
    with _reading(path), open_binary(path) as file:
        for number, (start, line) in enumerate(_lines_from(file, begin)):
            if end is not None and start >= end:
                return
            if not line or line.isspace():
                continue
            text = _decoded(path, start, line, errors)
            text = text.removeprefix(_BOM) if start == 0 else text
            try:
                record = parse_json(text)
            except ValueError as error:
                raise InputError(f"{_place(path, begin, number)} is not JSON ({error}); fix the line") from error
            if not isinstance(record, dict):
                raise InputError(
                    f"{_place(path, begin, number)} is not a JSON object with a field {field!r}; fix the line"
                )
            if field not in record:
                has = ", ".join(map(repr, list(record)[:8])) or "none"
                raise InputError(
                    f"{_place(path, begin, number)} has no field {field!r} (it has {has}); "
                    "name the field with jsonl:GLOB#FIELD"
                )
            if not isinstance(record[field], str):
                kind = type(record[field]).__name__
                raise InputError(
                    f"{_place(path, begin, number)}: field {field!r} must be a string, got {kind}; fix the line"
                )
            value = record[field]
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    if errors == "strict":
                        raise InputError(
                            f"{_place(path, begin, number)}: field {field!r} has half of a surrogate pair at "
                            f"character {error.start}; fix it or pass --errors replace"
                        ) from error
                    value = value.encode(errors="replace").decode()
            if value and not value.isspace():
                yield value, True


def _lines_from(file: IO[bytes], begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line without its line break) for the lines that start at or after `begin`."""
    offset = 0
    if begin > 0:
        file.seek(begin - 1)
        offset = begin - 1 + len(file.readline())
    for line in file:
        yield offset, line.removesuffix(b"\n").removesuffix(b"\r")
        offset += len(line)


def _joined(path: str, lines: list[tuple[int, bytes]], errors: Errors, continued: bool) -> str:
    try:
        text = b"\n".join(line for _, line in lines).decode()
    except UnicodeDecodeError:
        text = "\n".join(_decoded(path, start, line, errors) for start, line in lines)
    if continued:
        return "\n" + text
    return text.removeprefix(_BOM) if lines[0][0] == 0 else text


def _decoded(path: str, start: int, line: bytes, errors: Errors) -> str:
    try:
        return line.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, start, error) from error


def _not_utf8(path: str, offset: int, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"{path}: byte {offset + error.start} (0x{error.object[error.start]:02x}) is not UTF-8; "
        "convert the file, or pass --errors replace"
    )


def _place(path: str, begin: int, lines_after: int) -> str:
    """Return `FILE: line N` for the line that is `lines_after` after the first one that starts at or after `begin`."""
    before = 0
    if begin > 0:
        with open_binary(path) as file:
            file.seek(0)
            left = begin
            while left > 0 and (chunk := file.read(min(left, _FRAGMENT))):
                before += chunk.count(b"\n")
                left -= len(chunk)
            # A line that contains `begin` but starts before it belongs to the previous slice.
            file.seek(begin - 1)
            before += file.read(1) != b"\n"
    return f"{path}: line {before + lines_after + 1}"


class _reading:
    """Context that converts read errors of a file into an InputError that names it."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, (gzip.BadGzipFile, lzma.LZMAError, EOFError, _BadZstd)):
            raise InputError(
                f"{self._path}: the compressed file is damaged or truncated ({error}); replace it"
            ) from error
        if isinstance(error, OSError):
            raise InputError(f"{self._path} cannot be read: {error.strerror or error}") from error


class _BadZstd(Exception):
    """Error for a .zst file that cannot be decompressed."""


class _ZstdReader(io.RawIOBase):
    """Reader of all frames of a .zst file; unlike the library's own reader, it detects a truncated file."""

    def __init__(self, path: str):
        try:
            import zstandard
        except ImportError as error:
            raise InputError(f"{path}: reading .zst needs zstandard; pip install zstandard") from error
        self._library = zstandard
        self._file = open(path, "rb")
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

    def close(self) -> None:
        self._file.close()
        super().close()
