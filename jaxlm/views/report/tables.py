"""Tables of a report as HTML; every text is escaped."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LONG = 60  # characters of a text that gets a wide column
BRIEF = 32  # characters of a row's header that is kept on one line; half of that in other cells


@dataclass(frozen=True)
class Cell:
    """A cell. value: its number at full precision, for sorting and for CSV. std: the deviation of a mean.

    entry: number of the legend's entry whose line is plotted before the text. code: True if the text is code.
    share: part of the largest value, from 0 to 1, that the background shows.
    """

    text: str
    value: float | None = None
    std: float | None = None
    entry: int | None = None
    code: bool = False
    share: float | None = None


Row = Sequence[Cell | str]
ABSENT = Cell("–")


@dataclass(frozen=True)
class Table:
    """A table. caption: a sentence. name: name of the file that it is saved to; empty, without buttons for that.

    headed: True if the first cell of each row is its header.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    name: str = ""
    headed: bool = True
    sortable: bool = True


def number(value: float | None, std: float | None = None, *, text: str | None = None) -> Cell:
    """Return the cell of a number, with a deviation where there is one."""
    if value is None or not np.isfinite(value):
        return ABSENT if value is None else Cell(str(value))
    shown = text if text is not None else digits(value)
    return Cell(shown if std is None else f"{shown} ± {digits(std)}", float(value), std)


def digits(value: float) -> str:
    """Return a number with four decimals, or four significant digits where that says too little or too much."""
    if value == int(value) and abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def whole(value: int | None) -> Cell:
    """Return the cell of a count or a step."""
    return ABSENT if value is None else Cell(f"{value:,}", float(value))


def table_html(table: Table) -> str:
    """Return a table in a box that scrolls."""
    tools = f' data-name="{escaped(table.name)}"' if table.name else ""
    sortable = " data-sortable" if table.sortable and len(table.rows) > 1 else ""
    numeric = [_is_numeric(row[k] for row in table.rows) for k in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_class("number" * is_numeric)}>{escaped(name)}</th>'
        for name, is_numeric in zip(table.columns, numeric, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(_cell(cell, table.headed and k == 0, numeric[k]) for k, cell in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escaped(table.caption)}"><table{tools}{sortable}>'
        f"<caption>{escaped(table.caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
        "</div>\n"
    )


def swatch(entry: int) -> str:
    """Return a short line in the color and the dashes of an entry of the legend."""
    return (
        f'<svg class="swatch color{entry % 8} dash{entry % 5}" viewBox="0 0 32 8" aria-hidden="true">'
        '<line x1="0" y1="4" x2="32" y2="4"/></svg>'
    )


def escaped(text: object) -> str:
    """Return a text for HTML, also inside an attribute."""
    return html.escape(str(text), quote=True)


def _cell(cell: Cell | str, heads: bool, is_numeric: bool) -> str:
    found = Cell(cell) if isinstance(cell, str) else cell
    content = escaped(found.text)
    if found.code:
        content = f"<code>{content}</code>"
    if found.entry is not None:
        content = swatch(found.entry) + content
    attributes = "" if found.value is None else f' data-value="{found.value!r}"'
    attributes += "" if found.std is None else f' data-std="{found.std!r}"'
    if found.share is not None:
        attributes += f' style="--share:{found.share:.3f}"'
    names = {"number": is_numeric, "shaded": found.share is not None, "long": len(found.text) > LONG}
    names["brief"] = len(found.text) <= (BRIEF if heads else BRIEF // 2)
    attributes += _class(" ".join(name for name, holds in names.items() if holds))
    return f'<th scope="row"{attributes}>{content}</th>' if heads else f"<td{attributes}>{content}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _is_numeric(cells: Iterable[Cell | str]) -> bool:
    """Return True if a column has numbers and otherwise only absent values."""
    found = [cell for cell in cells if cell != ABSENT]
    return bool(found) and all(isinstance(cell, Cell) and cell.value is not None for cell in found)
