"""Lines, TSV rows and JSON objects from a file or a stream, each with its line number.

Encoding is UTF-8, and a byte order mark at the very start is dropped. Lines break at `\\n` only and lose one trailing
`\\r` (never `str.splitlines`, which also breaks at U+0085, U+2028 and form feeds inside sentences). Quoting is a
setting per file: `none` splits at the delimiter and nothing else; `csv` reads fields enclosed in `"` with `""` inside,
strictly.
Everything streams: one row is held at a time.
"""

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from jaxlm.bounded_read import open_regular, parse_json
from jaxlm.errors import InputError

Errors = Literal["strict", "replace"]

# The beginnings of files that are not text.
BINARY = {b"PK\x03\x04": "an Excel file or an archive", b"PAR1": "a Parquet file", b"\x1f\x8b": "a gzip file"}
MAX_QUOTED_LINES = 1000  # bound on the lines of a quoted field, so that an unclosed quote does not read a whole file


@contextmanager
def open_input(path: Path | str) -> Iterator[BinaryIO]:
    """Open a file, or standard input for `-`, as bytes. InputError when it cannot be opened."""
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open_regular(Path(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give the path of a readable file") from None
    with stream:
        yield stream


def numbered_lines(stream: BinaryIO, name: str, errors: Errors = "strict") -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its line end) for each line.

    Raises:
      InputError: bytes that are not UTF-8, with the line and the offset in the file; errors="replace" inserts U+FFFD.
    """
    offset = 0
    for number, raw in enumerate(stream, 1):
        start = offset
        offset += len(raw)
        if number == 1 and raw.startswith(codecs.BOM_UTF8):
            raw = raw[len(codecs.BOM_UTF8) :]
            start += len(codecs.BOM_UTF8)
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        try:
            text = raw.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            kind = next((kind for magic, kind in BINARY.items() if number == 1 and raw.startswith(magic)), None)
            if kind is not None:
                raise InputError(
                    f"{name} must be text, got {kind}; save it as CSV, or give it its own suffix"
                ) from None
            raise InputError(
                f"{name} line {number}: byte 0x{raw[error.start]:02x} at offset {start + error.start} is not UTF-8; "
                "convert the file to UTF-8"
            ) from None
        yield number, text


def table_rows(
    lines: Iterator[tuple[int, str]], name: str, *, quoting: str = "none", delimiter: str = "\t"
) -> Iterator[tuple[int, list[str] | None]]:
    """Yield (line number, fields) for each row; a line of only spaces gives None.

    With quoting "csv" a field that begins with `"` ends at the next single `"`, may hold delimiters and line breaks,
    and is followed by a delimiter or the end of the row; a `"` further inside an unquoted field is a plain character.

    Raises:
      InputError: a quoted field that is not closed, or text right after a closing quote, with the line number.
    """
    for number, line in lines:
        if not line.strip(" "):
            yield number, None
        elif quoting == "none" or '"' not in line:
            yield number, line.split(delimiter)
        else:
            yield number, _quoted_fields(number, line, lines, name, delimiter)


def _quoted_fields(number: int, line: str, lines: Iterator[tuple[int, str]], name: str, delimiter: str) -> list[str]:
    fields, position = [], 0
    while True:
        if line[position : position + 1] != '"':
            end = line.find(delimiter, position)
            fields.append(line[position : end if end >= 0 else len(line)])
            if end < 0:
                return fields
            position = end + 1
            continue
        start, search, further = position + 1, position + 1, 0
        while True:
            end = line.find('"', search)
            if end < 0:
                following = next(lines, None)
                further += 1
                if following is None or further > MAX_QUOTED_LINES:
                    raise InputError(
                        f'{name} line {number}: the field that opens with " is never closed; '
                        f"close it{_or_unquoted(delimiter)}"
                    )
                search = len(line)
                line += "\n" + following[1]
            elif line[end + 1 : end + 2] == '"':
                search = end + 2
            else:
                break
        fields.append(line[start:end].replace('""', '"'))
        position = end + 1
        if position == len(line):
            return fields
        if line[position] != delimiter:
            raise InputError(
                f"{name} line {number}: text follows a closing quote in field {len(fields)}; "
                f'write " inside a quoted field as ""{_or_unquoted(delimiter)}'
            )
        position += 1


def _or_unquoted(delimiter: str) -> str:
    """Return a further remedy for the quotes of a TSV. A CSV is always read with quoting."""
    return ", or read the TSV with quoting none" if delimiter == "\t" else ""


def json_rows(lines: Iterator[tuple[int, str]], name: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, object) for each line of JSON; a line of only white space gives None.

    Raises:
      InputError: a line that is not one JSON object, with its number.
    """
    for number, line in lines:
        if not line.strip():
            yield number, None
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise InputError(f"{name} line {number} is not JSON ({error}); write one object per line") from None
        if not isinstance(value, dict):
            raise InputError(f"{name} line {number} is JSON, but not an object; write one object per line")
        if "\\u" in line:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise InputError(
                    f"{name} line {number}: half of a surrogate pair (\\ud800 to \\udfff) is not text; fix the escape"
                ) from None
        yield number, value
