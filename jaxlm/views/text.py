"""Long things made short."""

from collections.abc import Iterable

TEXT = 600  # characters of a document that are shown
HEAD, TAIL = 12, 3  # slots of a segment that are shown, from its beginning and its end


def ends(slots: list[int], *, head: int = HEAD, tail: int = TAIL) -> list[int | None]:
    """The first and the last of `slots`, None between them for what is left out."""
    return [*slots] if len(slots) <= head + tail + 1 else [*slots[:head], None, *slots[-tail:]]


def indented(text: str) -> Iterable[str]:
    """Its lines behind a bar."""
    return (f"    | {line}" for line in text.split("\n"))


def cut(text: str, more: bool = False) -> str:
    """Its first TEXT characters; more: whether it goes on after its own end."""
    return text[:TEXT] + (" …" if more or len(text) > TEXT else "")


def ratio(count: float, by: float) -> str:
    """`count / by` with two places, a dash where there is nothing to divide by."""
    return f"{count / by:.2f}" if by else "-"
