"""JSON from files: one object per line, or one value in the whole file."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.reading.lines import Errors, Lines


def json_rows(
    lines: Iterable[tuple[int, str]], where: Callable[[int], str], errors: Errors = "strict", *, check: bool = True
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, object) for each line of JSON; a line of only white space gives None.

    where: returns the place of a line, for messages. check: whether all texts go through `well_formed`.

    Raises:
      InputError: a line that is not one JSON object, with its place.
    """
    for number, line in lines:
        if not line or line.isspace():
            yield number, None
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise InputError(f"{where(number)} is not JSON ({error}); write one object per line") from None
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise InputError(f"{where(number)} must be a JSON object, got {kind}; write one object per line")
        if check and "\\u" in line:
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False), where, number, errors))
        yield number, value


def well_formed(text: str, where: Callable[[int], str], number: int, errors: Errors) -> str:
    """Return a text of line `number`; half of a surrogate pair becomes `?`, or raises InputError if errors="strict"."""
    try:
        return text.encode(errors=errors).decode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where(number)}: half of a surrogate pair (\\ud800 to \\udfff) is not text; fix the escape"
        ) from None


def json_objects(path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) for each line of JSON that is not blank."""
    lines = Lines(path)
    for number, row in json_rows(lines, lines.where):
        if row is not None:
            yield lines.where(number), row


def json_document(path: Path | str, errors: Errors = "strict", *, remedy: str) -> Any:
    """Return the value of a file that holds one. InputError, which ends in `remedy`, for a file that is not JSON."""
    try:
        return parse_json(Lines(path, errors).text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); {remedy}") from None
