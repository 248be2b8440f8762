"""Packing: which documents, or sentence pairs, share a row, decided once for a store, longest first.

A document of n tokens gives n pairs of an input and a target where the id that ends documents is its first input, and
n - 1 where its first token is; in rows of L slots it is cut into pieces of L pairs that fill a row each, and a rest.
The last target of a piece is the first input of the piece after it, so that every token is a target once, or every
token but a document's first.
The rests are packed on the histogram of their lengths: take the longest that is left, fill what remains of the row
with the longest that fit, and repeat that pattern as often as the histogram allows. There are a few patterns a length,
however many documents, and which documents a row holds follows by arithmetic.
"""

import bisect
from typing import NamedTuple

import numpy as np

# Documents looked at in one go; bounds the temporary arrays.
_BLOCK = 1 << 20


class Piece(NamedTuple):
    """A part of a row: `slots` pairs of a document, from pair `token` on.

    document: numbered in the section. token: offset in the document, of the first target where a document begins with
    the id that ends documents, of the first input where it does not.
    """

    document: int
    token: int
    slots: int


class _Uses(NamedTuple):
    """In a pattern: `uses` rests of `slots`; `taken` rests of that length have gone to earlier patterns."""

    slots: int
    uses: int
    taken: int


class Bins:
    """Items of given sizes in rows of `length` slots, at most `most` to a row (None: as many as fit), index-addressed.

    sizes: (items,) below 2^31, at most `length` each; items of size 0 are left out. rows: how many there are.
    Memory: 4 bytes an item (8 from 2^31 items on), twice that while it is made.
    """

    def __init__(self, sizes: np.ndarray, length: int, most: int | None = None):
        counts = np.bincount(sizes, minlength=length + 1)
        # Stable, so a radix sort in linear time for small sizes: items by size, in the order of the store.
        order = np.argsort(sizes, kind="stable")[counts[0] :]
        self._order = order.astype(np.int32 if len(sizes) < 1 << 31 else np.int64)
        counts[0] = 0
        self._class_starts = np.cumsum(counts) - counts
        self._patterns, self._times = pack_lengths(counts, length, most)
        self._ends = np.cumsum(self._times, dtype=np.int64)
        self.rows = int(self._ends[-1]) if len(self._times) else 0
        self.total = int(counts @ np.arange(len(counts)))

    def row(self, index: int) -> list[tuple[int, int]]:
        """The items of a row and their sizes, longest first."""
        pattern = int(np.searchsorted(self._ends, index, side="right"))
        repeat = index - (int(self._ends[pattern - 1]) if pattern else 0)
        items = []
        for slots, uses, taken in self._patterns[pattern]:
            first = int(self._class_starts[slots]) + taken + repeat * uses
            items += [(item, slots) for item in self._order[first : first + uses].tolist()]
        return items

    @property
    def most_items(self) -> int:
        """The most items that a row holds."""
        return max((sum(part.uses for part in pattern) for pattern in self._patterns), default=0)


class PackingPlan:
    """The rows of a section of packed documents, index-addressed.

    starts: (documents + 1,) offsets of the documents' tokens. length: slots of a row, L. begun: whether a document's
    first input is the id that ends documents, so that it has as many pairs as tokens.
    rows: how many there are. pairs: pairs of input and target in all of them.
    Memory: 12 bytes a document (16 from 2^31 documents on), 26 while it is made.
    """

    def __init__(self, starts: np.ndarray, length: int, *, begun: bool):
        documents = len(starts) - 1
        self._starts, self._length, self._unpaired = starts, length, 0 if begun else 1
        rests = np.empty(documents, np.uint16 if length <= 1 << 16 else np.int32)
        self._full_before = np.zeros(documents + 1, np.int64)
        for first in range(0, documents, _BLOCK):
            block = np.diff(np.asarray(starts[first : first + _BLOCK + 1]))
            pairs = np.maximum(block - self._unpaired, 0)
            rests[first : first + _BLOCK] = pairs % length
            self._full_before[first + 1 : first + 1 + len(block)] = pairs // length
        np.cumsum(self._full_before, out=self._full_before)
        self._rests = Bins(rests, length)
        self.rows = self._rests.rows + int(self._full_before[-1])
        self.pairs = int(self._full_before[-1]) * length + self._rests.total

    def row(self, index: int) -> list[Piece]:
        """The pieces of a row, longest first."""
        if index >= self._rests.rows:
            full = index - self._rests.rows
            document = int(np.searchsorted(self._full_before, full, side="right")) - 1
            return [Piece(document, (full - int(self._full_before[document])) * self._length, self._length)]
        pieces = []
        for document, slots in self._rests.row(index):
            pairs = int(self._starts[document + 1]) - int(self._starts[document]) - self._unpaired
            pieces.append(Piece(document, pairs - slots, slots))
        return pieces


def pack_lengths(counts: np.ndarray, length: int, most: int | None = None) -> tuple[list[tuple[_Uses, ...]], list[int]]:
    """Patterns of rows and how often each occurs, longest first; counts[n] pieces have n slots, n <= length.

    most: pieces of a row; None: as many as fit.
    """
    left = {slots: int(count) for slots, count in enumerate(counts) if slots and count}
    taken = dict.fromkeys(left, 0)
    lengths = sorted(left)
    patterns: list[tuple[_Uses, ...]] = []
    times: list[int] = []
    while lengths:
        room, places, pattern, at = length, most or length, [], len(lengths)
        while places and (at := bisect.bisect_right(lengths, room, hi=at)):
            at -= 1
            slots = lengths[at]
            uses = min(left[slots], room // slots, places)
            pattern.append(_Uses(slots, uses, taken[slots]))
            room -= slots * uses
            places -= uses
        repeats = min(left[slots] // uses for slots, uses, _ in pattern)
        for slots, uses, _ in pattern:
            left[slots] -= repeats * uses
            taken[slots] += repeats * uses
            if not left[slots]:
                lengths.remove(slots)
        patterns.append(tuple(pattern))
        times.append(repeats)
    return patterns, times
