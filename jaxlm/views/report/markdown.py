"""A small subset of Markdown as HTML: headings, paragraphs, lists, quotes, code, strong text, emphasis.

Everything else, HTML and links included, is shown as the text that it is.
"""

import re
from collections.abc import Iterator, Sequence

from jaxlm.views.report.tables import escaped

FENCE = "```"
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
ITEM = re.compile(r"\s{0,3}(?:([-*+])|\d{1,9}[.)])\s+(.*)")
CODE = re.compile(r"(`+)(.+?)\1(?!`)")
STRONG = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
EMPHASIS = re.compile(r"(?<![*\w])\*(?=\S)([^*]+?)(?<=\S)\*(?!\w)")
TOP = 3  # level of the largest heading of a text within a page


def markdown_html(text: str) -> str:
    """Return a text in Markdown as HTML."""
    return "\n".join(_blocks(text.splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(FENCE):
            end = next((k for k in range(at + 1, len(lines)) if lines[k].startswith(FENCE)), len(lines))
            yield f"<pre><code>{escaped(chr(10).join(lines[at + 1 : end]))}</code></pre>"
            at = end + 1
        elif heading := HEADING.match(line):
            level = min(TOP + len(heading[1]) - 1, 6)
            yield f"<h{level}>{inline(heading[2])}</h{level}>"
            at += 1
        elif item := ITEM.match(line):
            tag = "ul" if item[1] else "ol"
            items, at = _items(lines, at, bool(item[1]))
            yield f"<{tag}>{''.join(f'<li>{inline(one)}</li>' for one in items)}</{tag}>"
        elif line.startswith(">"):
            end = next((k for k in range(at, len(lines)) if not lines[k].startswith(">")), len(lines))
            yield f"<blockquote><p>{inline(' '.join(one[1:].strip() for one in lines[at:end]))}</p></blockquote>"
            at = end
        elif line.strip():
            end = next((k for k in range(at + 1, len(lines)) if _begins(lines[k])), len(lines))
            yield f"<p>{inline(' '.join(one.strip() for one in lines[at:end]))}</p>"
            at = end
        else:
            at += 1


def _items(lines: Sequence[str], at: int, bullets: bool) -> tuple[list[str], int]:
    """Return the items of a list and the number of the line after it. An indented line continues an item."""
    items: list[str] = []
    while at < len(lines):
        item = ITEM.match(lines[at])
        if item and bool(item[1]) == bullets:
            items.append(item[2])
        elif items and lines[at].startswith(" ") and lines[at].strip():
            items[-1] += " " + lines[at].strip()
        else:
            break
        at += 1
    return items, at


def _begins(line: str) -> bool:
    """Return True if a line ends the paragraph before it."""
    return not line.strip() or bool(line.startswith((FENCE, ">")) or HEADING.match(line) or ITEM.match(line))


def inline(text: str) -> str:
    """Return the text of a block with code, strong text and emphasis as HTML."""
    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [_emphasized(text[at : code.start()]), f"<code>{escaped(code[2].strip())}</code>"]
        at = code.end()
    return "".join([*parts, _emphasized(text[at:])])


def _emphasized(text: str) -> str:
    return EMPHASIS.sub(r"<em>\1</em>", STRONG.sub(r"<strong>\1</strong>", escaped(text)))
