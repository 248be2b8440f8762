"""Sentence boundaries of streamed documents, from sentencex or from the line breaks of the input.

sentencex (Wikimedia's rules for about 300 languages, in Rust) works offline, keeps every character, does not split
quotations, and processes 66 MB of books per second on one core, faster than any tokenizer. A boundary is kept only if
splitting the text there does not change its ids; otherwise two sentences become one. A document therefore has the same
ids with and without sentences.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal

from jaxlm.data.sources import Fragments
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer

Sentences = Literal["auto", "split", "lines", "none"]
Boundaries = Callable[[str], list[int]]

# Maximum characters of a paragraph, the unit of processing; most end earlier, at a blank line.
PARAGRAPH = 1 << 16

_BREAK = re.compile(r"\n[^\S\n]*\n\s*(?=\S)")
_WHITE_SPACE = re.compile(r"\s")


def resolved(sentences: Sentences, tokenizer: Tokenizer) -> Sentences:
    """Return `sentences` with `auto` resolved: split for WordPiece, none for other tokenizers.

    Raises InputError if texts cannot be split at boundaries without changing the tokenizer's ids.
    """
    if sentences == "auto":
        return "split" if tokenizer.kind == "wordpiece" else "none"
    if sentences != "none" and not tokenizer.can_split:
        raise InputError(
            f"--sentences must be none for a vocabulary of kind {tokenizer.kind!r}, where splitting changes ids, "
            f"got {sentences}; use none, or a WordPiece, BPE or GPT-2 vocabulary"
        )
    return sentences


def borders_by(sentences: Sentences, language: str) -> Boundaries | None:
    """Return a function from a paragraph to the end offsets of its sentences, before trailing white space; or None."""
    if sentences == "none":
        return None
    return line_ends if sentences == "lines" else sentence_ends(language)


def sentence_ends(language: str) -> Boundaries:
    """Return the boundary function of sentencex. language: a code such as en; unknown codes use general rules."""
    from sentencex import segment

    def ends(paragraph: str) -> list[int]:
        found, at = [], 0
        for sentence in segment(language, paragraph):
            # Searched for, not counted: the library drops the white space at the end of long paragraphs.
            place = paragraph.find(content, at) if (content := sentence.strip()) else -1
            if place >= 0:
                at = place + len(content)
                found.append(at)
        return found

    return ends


def line_ends(paragraph: str) -> list[int]:
    """Return the end offsets of the non-blank lines, each of which is a sentence."""
    return [found.end() for found in re.finditer(r"\S(?=[^\S\n]*(?:\n|$))", paragraph)]


def sentences_of(fragments: Fragments, tokenizer: Tokenizer, boundaries: Boundaries) -> Iterator[tuple[str, bool]]:
    """Yield the sentences of documents: (sentence, whether the document ends with it).

    White space between two sentences belongs to the second. The result does not depend on the split into fragments.
    """
    open_text = ""
    for paragraph, last in paragraphs(fragments):
        text, begin = open_text + paragraph, 0
        for end in boundaries(paragraph):
            place = end + len(open_text)
            # The boundary is the first place from there on that allows a split, skipping white space only.
            while not (safe := tokenizer.is_split_point(text, place)) and place < len(text) and text[place].isspace():
                place += 1
            if safe and place > begin:
                yield text[begin:place], False
                begin = place
        open_text = text[begin:]
        if last:
            yield open_text, True
            open_text = ""


def paragraphs(fragments: Fragments) -> Iterator[tuple[str, bool]]:
    """Yield the paragraphs of documents with the blank lines after them: (paragraph, whether it is the last)."""
    text = ""
    for fragment, last in fragments:
        text += fragment
        begin = 0
        while True:
            found = _BREAK.search(text, begin, begin + PARAGRAPH + 1)
            if found is not None and found.end() - begin <= PARAGRAPH:
                end = found.end()
            elif len(text) - begin > PARAGRAPH:
                end = _after_white_space(text, begin, begin + PARAGRAPH)
            else:
                break
            yield text[begin:end], False
            begin = end
        text = text[begin:]
        if last:
            yield text, True
            text = ""


def _after_white_space(text: str, begin: int, end: int) -> int:
    """Return the last place in (begin, end] that follows white space, or `end`."""
    for place in range(end, begin, -1):
        if _WHITE_SPACE.match(text[place - 1]):
            return place
    return end
