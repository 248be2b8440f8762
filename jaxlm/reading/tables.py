"""Rows of tables in text files, TSV and CSV, each with the number of its first line.

Quoting is a setting per file: `none` splits at the delimiter and nothing else; `csv` reads fields enclosed in `"` with
`""` inside, strictly.
"""

from collections.abc import Callable, Iterator

from jaxlm.errors import InputError

MAX_QUOTED_LINES = 1000  # bound on the lines of a quoted field, so that an unclosed quote does not read a whole file


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
