"""Spellings: the words of a text without an id, each with a number, in the order of their first appearance."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxlm.text import Tokenizer


class Unknown(NamedTuple):
    """Tokens without an id of their own.

    places: (tokens,) int64, their positions among the ids of a text, ascending. words: (tokens,) int32, the number of
    the word of each. spellings: the words, in the order of their numbers.
    """

    places: np.ndarray
    words: np.ndarray
    spellings: list[str]


def numbered(words: Iterable[str], numbers: dict[str, int]) -> np.ndarray:
    """Return the number of each word, int32 (words,). New ones get the next number in `numbers`, which grows."""
    return np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), "<i4")


def unknown_of(places: np.ndarray, words: Iterable[str], tokenizer: Tokenizer) -> Unknown | None:
    """Return the words without an id at these places of a text, or None if a store of the tokenizer keeps none."""
    if tokenizer.unknown_word is None:
        return None
    numbers: dict[str, int] = {}
    return Unknown(places, numbered(words, numbers), list(numbers))


def sizes_in_bytes(spellings: Iterable[str]) -> np.ndarray:
    """Return the bytes of the UTF-8 of each word, int64 (words,)."""
    return np.fromiter((len(word.encode()) for word in spellings), "<i8")


def split(content: bytes, starts: np.ndarray) -> list[str]:
    """Return the words whose UTF-8 is `content`. starts: (words,), their first bytes. ValueError for other bytes."""
    return [content[first:end].decode() for first, end in itertools.pairwise([*starts.tolist(), len(content)])]
