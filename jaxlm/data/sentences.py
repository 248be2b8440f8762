"""Where sentences begin, found while documents stream: by sentencex, or at the input's own line breaks.

sentencex (Wikimedia's rules for some 300 languages, in Rust) works offline, keeps every character and splits 66 MB of
books a second on one core, which is more than any tokenizer takes; it leaves a quotation whole. A border is kept where
cutting the text does not change its ids; elsewhere two sentences are one. So a document has the same ids with and
without sentences.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal

from jaxlm.data.files import Fragments
from jaxlm.errors import InputError
from jaxlm.text import Tokenizer

Sentences = Literal["auto", "split", "lines", "none"]
Borders = Callable[[str], list[int]]

# A paragraph ends at a blank line or, where none comes, after so many characters: what is looked at in one go.
PARAGRAPH = 1 << 16

_BREAK = re.compile(r"\n[^\S\n]*\n\s*(?=\S)")
_WHITE_SPACE = re.compile(r"\s")


def resolved(sentences: Sentences, tokenizer: Tokenizer) -> Sentences:
    """`auto` made plain: split for WordPiece, none for the others. InputError where the tokenizer allows no borders."""
    if sentences == "auto":
        return "split" if tokenizer.kind == "wordpiece" else "none"
    if sentences != "none" and not tokenizer.cuts:
        raise InputError(
            f"--sentences {sentences}: a text in the vocabulary of kind {tokenizer.kind!r} cannot be cut without "
            "changing its ids; use a WordPiece, BPE or GPT-2 vocabulary, or --sentences none"
        )
    return sentences


def borders_by(sentences: Sentences, language: str) -> Borders:
    """The function from a paragraph to the places where its sentences end, white space after them left out."""
    return line_ends if sentences == "lines" else sentence_ends(language)


def sentence_ends(language: str) -> Borders:
    """sentencex's borders. language: a code such as en; one that it does not know gets its general rules."""
    from sentencex import segment

    def ends(paragraph: str) -> list[int]:
        found, at = [], 0
        for sentence in segment(language, paragraph):
            # Found in the text, not counted: of long paragraphs the library leaves out the white space at the end.
            place = paragraph.find(content, at) if (content := sentence.strip()) else -1
            if place >= 0:
                at = place + len(content)
                found.append(at)
        return found

    return ends


def line_ends(paragraph: str) -> list[int]:
    """Each line that is not blank is a sentence."""
    return [found.end() for found in re.finditer(r"\S(?=[^\S\n]*(?:\n|$))", paragraph)]


def sentences_of(fragments: Fragments, tokenizer: Tokenizer, borders: Borders) -> Iterator[tuple[str, bool]]:
    """The same documents, cut where sentences begin: (sentence, whether the document ends with it).

    White space between two sentences goes to the second. Depends on the text alone, not on how it comes in fragments.
    """
    open_text = ""
    for paragraph, last in paragraphs(fragments):
        text, begin = open_text + paragraph, 0
        for end in borders(paragraph):
            place = end + len(open_text)
            # The border is the first place from there on that can be cut, past no more than white space.
            while not (cut := tokenizer.cuts_at(text, place)) and place < len(text) and text[place].isspace():
                place += 1
            if cut and place > begin:
                yield text[begin:place], False
                begin = place
        open_text = text[begin:]
        if last:
            yield open_text, True
            open_text = ""


def paragraphs(fragments: Fragments) -> Iterator[tuple[str, bool]]:
    """The same documents in paragraphs with the blank lines after them; (paragraph, whether it is the last)."""
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
    """The last place in (begin, end] that follows white space, or `end`."""
    for place in range(end, begin, -1):
        if _WHITE_SPACE.match(text[place - 1]):
            return place
    return end
