"""Rows of files in each format: TSV and CSV, JSON lines, Parquet, and folders of texts; each row with its number.

The format is named by the suffix, or given. Quoting of tables is a setting per file: `none` splits at the delimiter and
nothing else; `csv` reads fields enclosed in `"` with `""` inside, strictly. Everything streams: one row is held at a
time.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.errors import InputError
from jaxlm.files import parse_json
from jaxlm.reading.columns import ColumnFile
from jaxlm.reading.lines import Errors, Lines

TextFormat = Literal["tsv", "csv", "jsonl"]
# columns: one token and its tag per line.
Format = Literal["tsv", "csv", "jsonl", "parquet", "folder", "columns"]

SUFFIXES: dict[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
LISTED = ".tsv, .csv, .jsonl or .parquet"
SPREADSHEETS = (".xls", ".xlsx", ".xlsm", ".ods")
READ_AS = {"tsv": "TSV", "csv": "CSV", "jsonl": "JSON lines"}
# Text between the columns of a CSV, found by its first line; spreadsheets write the first two.
SEPARATORS = (",", ";", "|")
MAX_QUOTED_LINES = 1000  # bound on the lines of a quoted field, so that an unclosed quote does not read a whole file


def format_of(path: Path | str, otherwise: Format | None = None) -> Format:
    """Return the format of a file by its suffix; a directory is a folder of texts.

    otherwise: the format of files with another suffix. None: InputError for them.
    """
    path = Path(path)
    if path.is_dir():
        return "folder"
    suffix = path.suffix.lower()
    if suffix in SPREADSHEETS:
        raise InputError(f"{path}: a spreadsheet cannot be read; save it as CSV")
    found = SUFFIXES.get(suffix, otherwise)
    if found is None:
        raise InputError(f"{path}: the name must end in {LISTED}, got {suffix or 'no suffix'}; rename or convert it")
    return found


def unit_of(path: Path | str) -> str:
    """Return the word for a row of a file in messages: `line`, or `row` where there are no lines."""
    return "row" if Path(path).suffix.lower() == ".parquet" or Path(path).is_dir() else "line"


def other_format(line: str, read_as: Format) -> TextFormat | None:
    """Return the format that a first line without the required columns seems to have, if it is not `read_as`."""
    seems: TextFormat | None = None
    if line.lstrip().startswith("{"):
        seems = "jsonl"
    elif read_as == "tsv" and "\t" not in line and any(one in line for one in SEPARATORS):
        seems = "csv"
    elif read_as == "csv" and "\t" in line:
        seems = "tsv"
    return None if seems == read_as else seems


def records(
    path: Path | str, form: Format, errors: Errors = "strict", *, text: str = "text", label: str = "label"
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (number from 1, object) for each line of JSON, row of a Parquet file or text of a folder.

    text, label: names of the fields that the text and the class of a folder's files get. A blank line gives None.
    """
    if form == "parquet":
        yield from enumerate(ColumnFile(str(path), "parquet").rows(), 1)
    elif form == "folder":
        yield from folder_rows(Path(path), errors, text=text, label=label)
    else:
        lines = Lines(path, errors)
        yield from json_rows(lines, lines.where, errors)


def folder_rows(
    directory: Path, errors: Errors = "strict", *, text: str = "text", label: str = "label"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, fields) for each text file of a directory, classes and files in sorted order.

    Fields: the whole text, `file` (its path below the directory) and the class, the name of the directory that holds
    it. A directory without others holds texts without a class. Hidden files and, besides classes, files are ignored.

    Raises:
      InputError: a directory within a class; a directory without texts.
    """
    entries = _visible(directory)
    classes = [entry for entry in entries if entry.is_dir()]
    number = 0
    for folder in classes or [directory]:
        for file in _visible(folder) if classes else entries:
            if file.is_dir():
                raise InputError(f"{file}: the folder of a class must hold text files, got a directory; move its files")
            number += 1
            row = {text: Lines(file, errors).text(), "file": file.relative_to(directory).as_posix()}
            yield number, row | ({label: folder.name} if classes else {})
    if not number:
        raise InputError(f"{directory} has no text files; write one file per text, in a folder per class")


def table_rows(
    lines: Iterator[tuple[int, str]], where: Callable[[int], str], *, quoting: str = "none", delimiter: str = "\t"
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
            yield number, _quoted_fields(number, line, lines, where, delimiter)


def json_rows(
    lines: Iterable[tuple[int, str]], where: Callable[[int], str], errors: Errors = "strict", *, check: bool = True
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, object) for each line of JSON; a line of only white space gives None.

    where: returns the place of a line, for messages. check: True if all texts go through `well_formed`.

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
        text.encode()
    except UnicodeEncodeError:
        if errors == "strict":
            raise InputError(
                f"{where(number)}: half of a surrogate pair (\\ud800 to \\udfff) is not text; fix the escape"
            ) from None
        return text.encode(errors="replace").decode()
    return text


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


def _quoted_fields(
    number: int, line: str, lines: Iterator[tuple[int, str]], where: Callable[[int], str], delimiter: str
) -> list[str]:
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
                        f'{where(number)}: the field that opens with " is never closed; '
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
                f"{where(number)}: text follows a closing quote in field {len(fields)}; "
                f'write " inside a quoted field as ""{_or_unquoted(delimiter)}'
            )
        position += 1


def _or_unquoted(delimiter: str) -> str:
    """Return a further remedy for the quotes of a TSV. A CSV is always read with quoting."""
    return ", or read the TSV with quoting none" if delimiter == "\t" else ""


def _visible(directory: Path) -> list[Path]:
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise InputError(f"{directory}: {error.strerror}; give the path of a readable directory") from None
