"""Reader of the rows of TSV, CSV, JSONL and Parquet files and of folders as examples, by column name.

One reader serves the tasks' own files, a user's files and the rows that `jaxlm.predict` labels. A TSV's first line
names its columns, unless the task's files may come without a header and this one does. Columns that a task does not use
are ignored; a text is stripped of blanks at its ends (SST-2's texts all end in one), and inner blanks are kept.
"""

import itertools
import logging
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Example, Split
from jaxlm.tasks.reading.files import Errors, json_rows, numbered_lines, open_input, table_rows
from jaxlm.tasks.reading.formats import READ_AS, SEPARATORS, Format, format_of, other_format, records, unit_of
from jaxlm.tasks.task import Columns, Quoting, Task
from jaxlm.wording import did_you_mean

LabelRule = Literal["required", "optional", "ignored"]
Separator = Literal["auto", ",", ";", "|", "tab"]

log = logging.getLogger(__name__)


class RowReader:
    """Iterates over (line number, example) of one file; labels are kept as the file spells them.

    Args:
      path: a file, a folder of texts, or `-` for standard input.
      columns: the names to look for.
      label: `required` raises for a file or row without one, `optional` gives None there, `ignored` never looks.
      quoting: quoting of a TSV, `none` or `csv`. A CSV is always read with quoting.
      separator: the text between the columns of a TSV or CSV. auto: a tab in a TSV, in a CSV the one of SEPARATORS with
        which its first line has the required columns.
      headerless: names of the columns, for files that may come without a header.
      blank_lines: `drop` counts blank lines between rows as dropped, `refuse` raises InputError. Those at the end of
        the file are ignored.
      warn_quotes: whether to warn, after the last row, about fields that look as if they needed csv quoting.
      short_rows: `drop` counts rows with another number of columns, and rows without a required label, as dropped;
        `refuse` raises InputError.
      skip_flag: the flag that drops such rows, for the error; empty where there is none.
      form: the format. None: that of the suffix; standard input is JSONL if its first line begins with `{`, else TSV.
      keep: whether examples keep their `row`, by the names of the header or of the fields.
      unit: the word for a row in messages. None: `line`, or `row` where there are no lines.

    Attributes, complete once the iteration ends: rows_read, dropped, empty_fields, quoted_fields. or_skip: the remedy
    by `skip_flag`, for the end of an error.

    Raises:
      InputError: a missing column or field, or a row that does not fit, with file and line number.
    """

    def __init__(
        self,
        path: Path | str,
        columns: Columns,
        *,
        label: LabelRule = "required",
        quoting: Quoting = "none",
        separator: Separator = "auto",
        headerless: tuple[str, ...] = (),
        errors: Errors = "strict",
        blank_lines: Literal["drop", "refuse"] = "drop",
        warn_quotes: bool = False,
        short_rows: Literal["drop", "refuse"] = "refuse",
        skip_flag: str = "",
        form: Format | None = None,
        keep: bool = False,
        unit: str | None = None,
    ) -> None:
        self.path, self.columns, self.label, self.quoting = path, columns, label, quoting
        self.separator = separator
        self.headerless, self.errors, self.blank_lines, self.warn_quotes = headerless, errors, blank_lines, warn_quotes
        self.short_rows, self.form, self.keep = short_rows, form, keep
        self.name = "standard input" if str(path) == "-" else str(path)
        self._unit = unit_of(path) if unit is None else unit
        self.rows_read = self.empty_fields = self.quoted_fields = 0
        self.dropped: list[tuple[int, str]] = []
        self.or_skip = f", or leave such rows out with {skip_flag}" if skip_flag else ""

    def __iter__(self) -> Iterator[tuple[int, Example]]:
        for number, example in self._examples():
            self.empty_fields += sum(not text for text in (*example.texts, *example.choices))
            yield number, example
        if self.warn_quotes and self.quoted_fields:
            warnings.warn(
                f'{self.name}: {self.quoted_fields} fields begin and end with " and hold "" inside; the file was read '
                "with --custom.quoting none and probably needs --custom.quoting csv",
                stacklevel=2,
            )

    def where(self, number: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.name} {self._unit} {number}"

    def _examples(self) -> Iterator[tuple[int, Example]]:
        form = self.form
        if form is None and str(self.path) != "-":
            form = format_of(self.path)
        if form in ("parquet", "folder"):
            yield from self.from_records(self._records(form))
            return
        with open_input(self.path) as stream:
            lines = numbered_lines(stream, self.name, self.errors)
            if form is None:
                first = next(lines, None)
                form = "jsonl" if first is not None and first[1].lstrip().startswith("{") else "tsv"
                lines = lines if first is None else itertools.chain([first], lines)
            if form == "jsonl":
                yield from self.from_records(json_rows(lines, self.name))
            else:
                yield from self._from_table(lines, form)

    def _records(self, form: Format) -> Iterator[tuple[int, dict[str, Any] | None]]:
        columns = self.columns
        if form == "folder" and (len(columns.texts) != 1 or columns.choices or columns.choice_list):
            raise InputError(
                f"{self.name}: rows of this task must be in a file with columns, got a folder; give a file"
            )
        label = columns.label[0] if columns.label else "label"
        yield from records(self.path, form, self.errors, text=(*columns.texts, ("text",))[0][0], label=label)

    def _rows(self, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield the rows that are not blank; blank lines are counted once a row follows them."""
        blank: list[int] = []
        for number, row in rows:
            if row is None:
                blank.append(number)
                continue
            if blank and self.blank_lines == "refuse":
                raise InputError(f"{self.where(blank[0])}: there is an empty line between rows; remove it")
            self.dropped += [(line, "empty line") for line in blank]
            self.rows_read += len(blank) + 1
            blank = []
            yield number, row

    def _from_table(self, lines: Iterator[tuple[int, str]], form: Format) -> Iterator[tuple[int, Example]]:
        quoting = "csv" if form == "csv" else self.quoting
        lines, delimiter = self._delimited(lines, form)
        rows = table_rows(lines, self.name, quoting=quoting, delimiter=delimiter)
        first = next(((number, fields) for number, fields in rows if fields is not None), None)
        if first is None:
            raise InputError(f"{self.name} has no rows; its first line must name the columns")
        header = [field.strip() for field in first[1]]
        if self._without_header(header):
            header = list(self.headerless)
            rows = itertools.chain([first], rows)
        elif not all(any(name in header for name in names) for names in self.columns.texts):
            self._check_format(delimiter.join(header), form)
        text_at = [self._column(header, names) for names in self.columns.texts]
        choice_at = [self._column(header, names) for names in self.columns.choices]
        if self.columns.choice_list and not choice_at:
            raise InputError(
                f"{self.name}: a list of choices in one field ({self.columns.choice_list[0]}) needs JSONL; "
                "in a TSV give each choice a column"
            )
        label_at = None
        if self.label != "ignored" and self.columns.label:
            if self.label == "required" or any(name in header for name in self.columns.label):
                label_at = self._column(header, self.columns.label)
        for number, fields in self._rows(rows):
            if len(fields) != len(header) and self.short_rows == "drop":
                self.dropped.append((number, f"{len(fields)} columns"))
                continue
            if len(fields) != len(header):
                hint = (
                    '; a field enclosed in " needs --custom.quoting csv'
                    if quoting == "none" and _quoted(fields)
                    else ""
                )
                raise InputError(
                    f"{self.where(number)}: the row must have {len(header)} columns ({', '.join(header)}), got "
                    f"{len(fields)}; fix the row{hint}{self.or_skip}"
                )
            if quoting == "none":
                self.quoted_fields += sum('""' in field[1:-1] for field in fields if _wrapped(field))
            label = None if label_at is None else self._label(fields[label_at])
            if label is None and self.label == "required":
                if self.short_rows == "drop":
                    self.dropped.append((number, "no label"))
                    continue
                column = header[label_at or 0]
                raise InputError(f"{self.where(number)}: the label ({column}) is empty; fill it in{self.or_skip}")
            texts = self._joined(tuple(fields[at].strip() for at in text_at))
            row = dict(zip(header, fields, strict=False)) if self.keep else None
            yield number, Example(texts, tuple(fields[at].strip() for at in choice_at), label, row=row)

    def _delimited(self, lines: Iterator[tuple[int, str]], form: Format) -> tuple[Iterator[tuple[int, str]], str]:
        """Return the lines, and the text between their columns, which a CSV's first line may have to tell."""
        if self.separator != "auto":
            return lines, "\t" if self.separator == "tab" else self.separator
        if form != "csv" or self.headerless:
            return lines, "," if form == "csv" else "\t"
        read = []
        for line in lines:
            read.append(line)
            if line[1].strip(" "):
                break
        first = read[-1][1] if read else ""
        delimiter = max(SEPARATORS, key=lambda one: (self._has_columns(first, one), first.count(one)))
        if delimiter != ",":
            log.info("%s: its columns are separated by %r", self.name, delimiter)
        return itertools.chain(read, lines), delimiter

    def _has_columns(self, first: str, delimiter: str) -> bool:
        """Return whether a first line names all required columns with this text between them."""
        header = [field.strip().strip('"') for field in first.split(delimiter)]
        wanted = (*self.columns.texts, *self.columns.choices)
        return bool(wanted) and all(any(name in header for name in names) for names in wanted)

    def from_records(self, found: Iterator[tuple[int, dict[str, Any] | None]]) -> Iterator[tuple[int, Example]]:
        """Yield (number, example) of numbered objects instead of the file's rows."""
        rows = 0
        for number, row in self._rows(found):
            rows += 1
            if self.short_rows == "drop" and (lacking := self._lacking(row)):
                self.dropped.append((number, f"no {lacking}"))
                continue
            whole = next((name for name in self.columns.whole if name in row), None)
            if whole is not None:
                texts: tuple[str, ...] = (self._string(number, whole, row[whole]),)
            else:
                texts = self._joined(tuple(self._text(number, row, names) for names in self.columns.texts))
            label = None
            if self.label != "ignored" and self.columns.label:
                label = self._json_label(number, row)
            yield number, Example(texts, self._json_choices(number, row), label, row=row if self.keep else None)
        if not rows:
            raise InputError(f"{self.name} has no rows; write one JSON object per line")

    def _label(self, text: str) -> str | tuple[str, ...] | None:
        """Return the label in a field: None if it is empty, or a tuple, maybe an empty one, of several labels."""
        separator = self.columns.label_separator
        if separator:
            return tuple(name.strip() for name in text.split(separator) if name.strip())
        return text.strip() or None

    def _lacking(self, row: dict[str, Any]) -> str:
        """Return the first required field that a JSON row lacks, or `label`; empty if there is none."""
        if not any(name in row for name in self.columns.whole):
            for names in (*self.columns.texts, *self.columns.choices):
                if not any(name in row for name in names):
                    return names[0]
        label = next((row[name] for name in self.columns.label if name in row), None)
        empty = label is None or (label == "" and not self.columns.label_separator)
        return "label" if self.label == "required" and empty else ""

    def _joined(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        return (" ".join(texts),) if self.columns.whole else texts

    def _without_header(self, fields: list[str]) -> bool:
        named = all(any(name in fields for name in names) for names in self.columns.texts)
        return len(self.headerless) == len(fields) and not named

    def _check_format(self, first_line: str, form: Format) -> None:
        """Raise InputError if the first line, which lacks required columns, looks like another format."""
        seems = other_format(first_line, form)
        if seems is None:
            return
        fix = f"rename it to .{seems}" if str(self.path) != "-" else f"give --input-format {seems}, or a .{seems} file"
        raise InputError(f"{self.name} looks like {READ_AS[seems]}, but is read as {READ_AS[form]}; {fix}")

    def _column(self, header: list[str], names: tuple[str, ...]) -> int:
        for name in names:
            if header.count(name) > 1:
                raise InputError(f"{self.name} line 1: columns must be distinct, got {name!r} twice; rename one")
            if name in header:
                return header.index(name)
        raise InputError(
            f"{self.name} line 1 has no column {' or '.join(map(repr, names))}; its columns are "
            f"{', '.join(header)[:300]}; {self._hint(names, header)}"
        )

    def _hint(self, names: tuple[str, ...], known: Collection[str]) -> str:
        """Return a suggestion for a column that a file lacks."""
        near = (did_you_mean(name, known) for name in names)
        return next((hint for hint in near if hint), f"required are {self.columns.describe()}")

    def _text(self, number: int, row: dict[str, Any], names: tuple[str, ...]) -> str:
        for name in names:
            if name in row:
                return self._string(number, name, row[name])
        raise InputError(
            f"{self.where(number)} has no field {' or '.join(map(repr, names))}; its fields are "
            f"{', '.join(row)[:300]}; {self._hint(names, row)}{self.or_skip}"
        )

    def _string(self, number: int, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InputError(f"{self.where(number)}: {name} must be a string, got {value!r:.80}")
        return value.strip()

    def _json_choices(self, number: int, row: dict[str, Any]) -> tuple[str, ...]:
        for name in self.columns.choice_list:
            if name in row:
                if not isinstance(row[name], list):
                    raise InputError(f"{self.where(number)}: {name} must be a list of strings")
                return tuple(self._string(number, name, value) for value in row[name])
        if self.columns.choice_list and not self.columns.choices:
            raise InputError(
                f"{self.where(number)} has no field {self.columns.choice_list[0]!r}; its fields are "
                f"{', '.join(row)[:300]}"
            )
        return tuple(self._text(number, row, names) for names in self.columns.choices)

    def _json_label(self, number: int, row: dict[str, Any]) -> str | tuple[str, ...] | None:
        value = next((row[name] for name in self.columns.label if name in row), None)
        if self.columns.label_separator and isinstance(value, list):
            return tuple(self._string(number, "a label", name) for name in value)
        if self.columns.label_separator and isinstance(value, str):
            return self._label(value)
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, int | float):
            value = str(value)
        if value is None or (isinstance(value, str) and not value.strip()):
            if self.label == "required":
                raise InputError(
                    f"{self.where(number)} has no label ({' or '.join(self.columns.label)}); add it{self.or_skip}"
                )
            return None
        if not isinstance(value, str):
            raise InputError(f"{self.where(number)}: the label must be a string or a number, got {value!r:.80}")
        return value.strip()


def collect(
    rows: list[tuple[int, Example]], reader: RowReader, task: Task, *, dropped_labels: tuple[str, ...] = ()
) -> Split:
    """Return a split of rows that were read, with the task's labels; rows with `dropped_labels` are dropped and
    counted.

    Raises:
      InputError: an unknown label, with its line.
    """
    dropped = [(number, f"label {example.label}") for number, example in rows if example.label in dropped_labels]
    rows = [(number, example) for number, example in rows if example.label not in dropped_labels]
    examples = []
    for number, example in rows:
        check_choices(example, task, reader.where(number))
        examples.append(Example(example.texts, example.choices, parse(example.label, task, reader.where(number))))
    if not examples:
        raise InputError(f"{reader.name} has no rows")
    missing = [number for (number, _), example in zip(rows, examples, strict=True) if example.label is None]
    if missing and len(missing) < len(examples) and reader.short_rows == "drop":
        dropped += [(number, "no label") for number in missing]
        examples = [example for example in examples if example.label is not None]
    elif missing and len(missing) < len(examples):
        raise InputError(
            f"{reader.where(missing[0])} has no label, but other rows have one; label all rows or none{reader.or_skip}"
        )
    return Split(tuple(examples), reader.rows_read, tuple(sorted([*reader.dropped, *dropped])), reader.empty_fields)


def parse(label: str | float | tuple[str, ...] | None, task: Task, where: str) -> str | float | tuple[str, ...] | None:
    """Return a label as the task names it. InputError gives the place of the row and the fault."""
    if label is None:
        return None
    try:
        return task.parse_label(label if isinstance(label, tuple) else str(label))
    except ValueError as error:
        raise InputError(f"{where}: {error}; fix the row") from None


def check_choices(example: Example, task: Task, where: str) -> Example:
    """Return the example. Raise InputError if its number of choices is not the task's."""
    if task.has_choices and len(example.choices) != task.num_choices:
        raise InputError(f"{where}: the row must have {task.num_choices} choices, got {len(example.choices)}; fix it")
    return example


def _wrapped(field: str) -> bool:
    return len(field) > 2 and field[0] == field[-1] == '"'


def _quoted(fields: list[str]) -> bool:
    return any(field.startswith('"') for field in fields)
