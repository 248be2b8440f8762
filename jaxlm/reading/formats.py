"""Formats of labelled files: named by the suffix, or given; and files whose content is of another format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.errors import InputError
from jaxlm.reading.columns import ColumnFile
from jaxlm.reading.json_lines import json_rows
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
    it. A directory without others holds texts without a class. Hidden files and, beside classes, files are ignored.

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


def _visible(directory: Path) -> list[Path]:
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise InputError(f"{directory}: {error.strerror}; give the path of a readable directory") from None
