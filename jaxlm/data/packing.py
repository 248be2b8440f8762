"""Packing of documents or sentence pairs into rows, computed once per store, longest first.

A document of n tokens gives n pairs of an input and a target if its first input is the end-of-document id, otherwise
n - 1. In rows of L slots it is split into spans of L pairs, which fill a row each, and a remainder. The last target of
a span is the first input of the next span, so that every token, or every token but a document's first, is a target
once.
The remainders are packed on the histogram of their lengths: take the longest one left, fill the rest of the row with
the longest that fit, and repeat this pattern as often as the histogram allows. There are a few patterns per length for
any number of documents, and the documents of a row follow by arithmetic.
"""

import bisect
from typing import NamedTuple

import numpy as np

# Documents processed at a time, which bounds the temporary arrays.
_BLOCK = 1 << 20


class Span(NamedTuple):
    """Span of a row: `slots` pairs of a document, from pair `token` on.

    document: its number in the section. token: offset in the document of the first target if documents begin with the
    end-of-document id, otherwise of the first input.
    """

    document: int
    token: int
    slots: int


class _Uses(NamedTuple):
    """Entry of a pattern: `uses` remainders of length `slots`, after `taken` of that length in earlier patterns."""

    slots: int
    uses: int
    taken: int


class Bins:
    """Items of given sizes packed into rows of `length` slots, index-addressed.

    sizes: (items,) below 2^31, at most `length` each; items of size 0 are left out. most: maximum items per row (None:
    as many as fit). rows: number of rows. total: sum of the sizes.
    Memory: 4 bytes per item (8 from 2^31 items on), twice that while it is computed.
    """

    def __init__(self, sizes: np.ndarray, length: int, most: int | None = None):
        counts = np.bincount(sizes, minlength=length + 1)
        # Items by size, then in store order. A stable sort of small sizes is a linear-time radix sort.
        order = np.argsort(sizes, kind="stable")[counts[0] :]
        self._order = order.astype(np.int32 if len(sizes) < 1 << 31 else np.int64)
        counts[0] = 0
        self._class_starts = np.cumsum(counts) - counts
        self._patterns, self._times = pack_lengths(counts, length, most)
        self._ends = np.cumsum(self._times, dtype=np.int64)
        self.rows = int(self._ends[-1]) if len(self._times) else 0
        self.total = int(counts @ np.arange(len(counts)))

    def row(self, index: int) -> list[tuple[int, int]]:
        """Return the items of a row and their sizes, longest first."""
        pattern = int(np.searchsorted(self._ends, index, side="right"))
        repeat = index - (int(self._ends[pattern - 1]) if pattern else 0)
        items = []
        for slots, uses, taken in self._patterns[pattern]:
            first = int(self._class_starts[slots]) + taken + repeat * uses
            items += [(item, slots) for item in self._order[first : first + uses].tolist()]
        return items

    @property
    def most_items(self) -> int:
        """Return the maximum number of items in a row."""
        return max((sum(part.uses for part in pattern) for pattern in self._patterns), default=0)


class PackingPlan:
    """Rows of packed documents of a section, index-addressed.

    starts: (documents + 1,) offsets of the documents' tokens. length: slots per row, L. begun: True if the first input
    of a document is the end-of-document id, so that it has as many pairs as tokens.
    rows: number of rows. pairs: number of pairs of input and target in all rows.
    Memory: 12 bytes per document (16 from 2^31 documents on), 26 while it is computed.
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

    def row(self, index: int) -> list[Span]:
        """Return the spans of a row, longest first."""
        if index >= self._rests.rows:
            full = index - self._rests.rows
            document = int(np.searchsorted(self._full_before, full, side="right")) - 1
            return [Span(document, (full - int(self._full_before[document])) * self._length, self._length)]
        spans = []
        for document, slots in self._rests.row(index):
            pairs = int(self._starts[document + 1]) - int(self._starts[document]) - self._unpaired
            spans.append(Span(document, pairs - slots, slots))
        return spans


def pack_lengths(counts: np.ndarray, length: int, most: int | None = None) -> tuple[list[tuple[_Uses, ...]], list[int]]:
    """Return the patterns of rows and the number of rows of each, longest first.

    counts[n]: number of items of n slots, n <= length. most: maximum items per row (None: as many as fit).
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
