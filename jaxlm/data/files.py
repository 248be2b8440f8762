"""Readers of documents from text, line and JSONL files, compressed or not, in bounded memory.

A document is one or more fragments `(text, last)`, the last one marked. Line and JSONL files are read in slices: the
documents of bytes [begin, end) are a pure function of the file and these two numbers. Adjacent slices neither share nor
drop a document.
"""

import codecs
from collections.abc import Iterator
from typing import Any

from jaxlm.errors import InputError
from jaxlm.reading.lines import BYTE_ORDER_MARK, Errors, Lines, not_utf8, open_input
from jaxlm.reading.rows import json_rows, well_formed
from jaxlm.wording import lacks_field

Fragments = Iterator[tuple[str, bool]]

REMEDY = "convert it to UTF-8, or pass --errors replace"
_FRAGMENT = 1 << 20
_LINES: Any = {"decompress": True, "remedy": REMEDY}


def read_text(path: str, errors: Errors = "strict") -> Fragments:
    """Yield the whole file as one document, unchanged except for a byte order mark; a blank file yields nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    waiting: list[str] = []
    blank, offset = True, 0
    with open_input(path, decompress=True) as file:
        while True:
            chunk = file.read(_FRAGMENT)
            kept = decoder.getstate()[0]
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise not_utf8(error, path, offset - len(kept), REMEDY) from None
            if offset == 0:
                text = text.removeprefix(BYTE_ORDER_MARK)
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
    found: list[str] = []
    size, skipping = 0, begin > 0
    lines = Lines(path, errors, begin=begin, **_LINES)
    for _, line in lines:
        if not line or line.isspace():
            if found:
                yield "\n".join(found), True
            found, size, skipping = [], 0, False
            if end is not None and lines.start >= end:
                return
        elif not skipping:
            found.append(line)
            size += len(line)
            if size > _FRAGMENT:
                yield "\n".join(found), False
                found, size = [""], 0  # the next line begins with a line feed
    if found:
        yield "\n".join(found), True


def read_jsonl(
    path: str, field: str, begin: int = 0, end: int | None = None, errors: Errors = "strict"
) -> Iterator[str]:
    """Yield field `field` of each line that starts in [begin, end); blank lines are skipped."""
    lines = Lines(path, errors, begin=begin, end=end, **_LINES)
    for number, row in json_rows(lines, lines.where, errors, check=False):
        if row is None:
            continue
        if field not in row:
            raise InputError(lacks_field(lines.where(number), field, row, "name the field with jsonl:GLOB#FIELD"))
        text = row[field]
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InputError(f"{lines.where(number)}: field {field!r} must be a string, got {kind}; fix the line")
        yield text if text.isascii() else well_formed(text, lines.where, number, errors)
