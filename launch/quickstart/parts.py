"""Splits of the documents: repeats removed, a split for each file by its hash, and no leaks into dev and test.

A sentence that occurred before, exactly or nearly, is removed. A dev or test sentence that shares more than 30 % of its
word 4-grams with any other split is removed too. All n-grams of the corpus are compared as sorted 64-bit hashes: 8
bytes per word, without sampling.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PARTS = ("pretrain", "labelled", "dev", "test")
PERCENTAGES = (81, 7, 5, 7)  # of the files
NEAR_GRAM, NEAR_FRACTION = 8, 0.5  # a sentence with more than this fraction of its 8-grams seen before is a near repeat
LEAK_GRAM, LEAK_FRACTION = 4, 0.3  # limit on what dev and test sentences may share with the other splits

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


@dataclass(frozen=True)
class Document:
    """The prose of one file: `paragraphs` of sentences; `name` is its path relative to its library."""

    name: str
    paragraphs: tuple[tuple[str, ...], ...]


def part_of(name: str) -> int:
    """Return the index in PARTS of a file, from the md5 of its relative path."""
    bucket = int.from_bytes(hashlib.md5(name.encode(), usedforsecurity=False).digest()[:8], "big") % sum(PERCENTAGES)
    for part, percentage in enumerate(PERCENTAGES):
        bucket -= percentage
        if bucket < 0:
            return part
    raise AssertionError("the percentages cover every bucket")


def words_of(sentence: str) -> list[str]:
    """Return the words by which sentences are compared: lower case, no punctuation."""
    return _WORD.findall(sentence.lower())


@dataclass(frozen=True)
class Grams:
    """Hashes of the word n-grams of many sentences: `hashes` (G,) uint64 and `sentences` (G,), the sentence of each."""

    hashes: np.ndarray
    sentences: np.ndarray


def word_ids(sentences: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids of all words, concatenated; the offset of each sentence, and the end): int32 and int64."""
    vocabulary: dict[str, int] = {}
    ids = bytearray()
    offsets = [0]
    for sentence in sentences:
        row = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words_of(sentence)], np.int32)
        ids += row.tobytes()
        offsets.append(offsets[-1] + len(row))
    return np.frombuffer(ids, np.int32), np.array(offsets, np.int64)


def grams(ids: np.ndarray, offsets: np.ndarray, n: int) -> Grams:
    """Return every window of `n` words within one sentence, hashed to 64 bits."""
    count = max(len(ids) - n + 1, 0)
    owner = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    inside = owner[:count] == owner[n - 1 : n - 1 + count]
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes = _mix(hashes ^ (ids[i : i + count].astype(np.uint64) + np.uint64(1)))
    return Grams(hashes[inside], owner[:count][inside])


def _mix(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 (Steele, Lea and Flood, 2014): every input bit affects every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def repeated(ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (exact, near): bool (sentences,), True for sentences that repeat an earlier sentence."""
    count = len(offsets) - 1
    seen: set[bytes] = set()
    exact = np.zeros(count, bool)
    for i in range(count):
        key = hashlib.blake2b(ids[offsets[i] : offsets[i + 1]].tobytes(), digest_size=8).digest()
        exact[i] = key in seen
        seen.add(key)
    windows = grams(ids, offsets, NEAR_GRAM)
    _, first, inverse = np.unique(windows.hashes, return_index=True, return_inverse=True)
    earlier = windows.sentences[first[inverse]] != windows.sentences
    return exact, ~exact & (_fraction(earlier, windows.sentences, count) > NEAR_FRACTION)


def leaking(ids: np.ndarray, offsets: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return bool (sentences,): those of dev and test that share more than 30 % of their 4-grams with other splits."""
    windows = grams(ids, offsets, LEAK_GRAM)
    gram_parts = parts[windows.sentences]
    result = np.zeros(len(offsets) - 1, bool)
    for part in (PARTS.index("dev"), PARTS.index("test")):
        own = gram_parts == part
        shared = np.isin(windows.hashes[own], np.unique(windows.hashes[~own]))
        result |= _fraction(shared, windows.sentences[own], len(result)) > LEAK_FRACTION
    return result


def _fraction(marked: np.ndarray, sentences: np.ndarray, count: int) -> np.ndarray:
    total = np.bincount(sentences, minlength=count)
    return np.bincount(sentences, weights=marked, minlength=count) / np.maximum(total, 1)


@dataclass(frozen=True)
class Corpus:
    """The documents of each split after removal, `parts[name]`, and the number of removed sentences."""

    parts: dict[str, list[Document]]
    removed: dict[str, int]  # removed sentences, by reason


def divide(documents: Sequence[Document]) -> Corpus:
    """Remove repeats, split by the hash of the file, and remove what dev and test share with the rest."""
    names = [document.name for document in documents]
    flat = [sentence for document in documents for paragraph in document.paragraphs for sentence in paragraph]
    sizes = [sum(len(paragraph) for paragraph in document.paragraphs) for document in documents]
    parts = np.repeat(np.array([part_of(name) for name in names], np.int8), sizes)
    ids, offsets = word_ids(flat)
    exact, near = repeated(ids, offsets)
    keep = ~(exact | near)
    kept_ids = ids[np.repeat(keep, np.diff(offsets))]
    kept_offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[keep])])
    leaks = leaking(kept_ids, kept_offsets, parts[keep])
    keep[np.flatnonzero(keep)[leaks]] = False

    divided: dict[str, list[Document]] = {part: [] for part in PARTS}
    position = 0
    for document in documents:
        paragraphs = []
        for paragraph in document.paragraphs:
            left = tuple(sentence for i, sentence in enumerate(paragraph, start=position) if keep[i])
            position += len(paragraph)
            if left:
                paragraphs.append(left)
        if paragraphs:
            divided[PARTS[part_of(document.name)]].append(Document(document.name, tuple(paragraphs)))
    removed = {
        "exact repeats": int(exact.sum()),
        "near repeats": int(near.sum()),
        "shared with the rest": int(leaks.sum()),
    }
    return Corpus(divided, removed)
