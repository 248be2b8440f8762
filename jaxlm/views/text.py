"""Shortened text."""

from collections.abc import Iterable

TEXT = 600  # characters of a document that are shown
HEAD, TAIL = 12, 3  # positions of a segment that are shown, from its start and its end


def ends(slots: list[int], *, head: int = HEAD, tail: int = TAIL) -> list[int | None]:
    """Return the first and the last of `slots`, with None between them for the omitted ones."""
    return [*slots] if len(slots) <= head + tail + 1 else [*slots[:head], None, *slots[-tail:]]


def indented(text: str) -> Iterable[str]:
    """Return the lines of a text, indented behind a bar."""
    return (f"    | {line}" for line in text.split("\n"))


def truncated(text: str, more: bool = False) -> str:
    """Return the first TEXT characters of a text. more: True if the text is only the start of a longer one."""
    return text[:TEXT] + (" …" if more or len(text) > TEXT else "")


def ratio(count: float, by: float) -> str:
    """Return `count / by` with two decimals, or a dash if `by` is zero."""
    return f"{count / by:.2f}" if by else "-"
