"""Vectors of words from files in GloVe's text format, for the words of a vocabulary.

A line is a word and its numbers, with a blank between them (Pennington, Socher and Manning, 2014). The first line gives
the number of columns. It may be word2vec's, the numbers of words and of columns. A word may have blanks, as some of
glove.840B have: the last columns are its numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlm.errors import InputError
from jaxlm.reading.lines import Lines
from jaxlm.text.library import LibraryTokenizer
from jaxlm.text.units import listed_words

_LARGEST = float(np.finfo(np.float32).max)
_HEADER = re.compile(r"(\d+) (\d+)")


@dataclass(frozen=True)
class WordVectors:
    """The vectors of the words of a vocabulary. rows: float32 (V, D), zeros for words without one. known: bool (V,)."""

    path: str
    rows: np.ndarray
    known: np.ndarray

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.rows.shape[1]


def read_vectors(path: str, width: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the words of a file, which may be compressed, and their vectors, float32 (D,).

    width: D; 0: that of the first line.

    InputError, with the line, for a line with another number of columns, for what is not a finite number, for a word
    that is there twice, for another number of words than the first line says, and for a file without vectors.
    """
    lines, columns, promised = Lines(path, decompress=True), width, None
    seen: dict[str, int] = {}
    for number, line in lines:
        line = line.rstrip(" ")
        if number == 1 and (header := _HEADER.fullmatch(line)) is not None:
            promised, columns = map(int, header.groups())
            continue
        parts = line.split(" ")
        columns = columns or len(parts) - 1
        word, where = " ".join(parts[:-columns]), lines.where(number)
        # The last part of a word with blanks is never a number, or the line has too many.
        if not columns or not word or (len(parts) > columns + 1 and _is_number(parts[-columns - 1])):
            wanted = f"{columns} numbers{'' if width else ', as the first line says'}" if columns else "numbers"
            raise InputError(f"{where} must have a word and {wanted}, got {len(parts) - 1} after the word; correct it")
        if word in seen:
            raise InputError(
                f"{where} must have a word of its own, got {word!r}, the word of line {seen[word]}; leave one out"
            )
        seen[word] = number
        yield word, _numbers(parts[-columns:], where)
    if promised is not None and promised != len(seen):
        raise InputError(
            f"{path} must have {promised} words, as its first line says, got {len(seen)}; replace the file"
        )
    if not seen:
        raise InputError(f"{path} must have vectors of words, got none; give a file in GloVe's text format")


def vectors_of(path: str, words: Sequence[str]) -> WordVectors:
    """Return the vectors of `words` in a file, by their spelling, else by their spelling in lower case.

    InputError if no word has one; for others see `read_vectors`.
    """
    exact, lower = defaultdict(list), defaultdict(list)
    for place, word in enumerate(words):
        exact[word].append(place)
        lower[word.lower()].append(place)
    found: dict[int, np.ndarray] = {}
    width = 0
    for word, vector in read_vectors(path):
        width = len(vector)
        found |= dict.fromkeys(exact.get(word, ()), vector)
        found |= {place: vector for place in lower.get(word, ()) if place not in found}
    if not found:
        raise InputError(
            f"word_vectors must have vectors for words of the vocabulary, got none in {path} for {len(words):,} words; "
            "give a tokenizer of words, such as words:SIZE or vectors:FILE"
        )
    rows, known = np.zeros((len(words), width), np.float32), np.zeros(len(words), bool)
    for place, vector in found.items():
        rows[place], known[place] = vector, True
    return WordVectors(path, rows, known)


def vectors_tokenizer(path: str) -> LibraryTokenizer:
    """Return the vocabulary of the words of a file; words with blanks, which no text has, are left out."""
    return listed_words([word for word, _ in read_vectors(path) if not re.search(r"\s", word)])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(texts: Sequence[str], where: str) -> np.ndarray:
    try:
        found = np.array(list(map(float, texts)))  # faster than NumPy's own reading of strings
    except ValueError:
        found = np.full(1, np.nan)
    if not np.all(np.abs(found) <= _LARGEST):
        wrong = next(text for text in texts if not (_is_number(text) and abs(float(text)) <= _LARGEST))
        raise InputError(f"{where} must have finite numbers after the word, got {wrong!r}; correct it")
    return found.astype(np.float32)
