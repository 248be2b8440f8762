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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxlm.data.plan_files import Making, plan_of
from jaxlm.data.store import Section, Store

# Documents processed at a time, which bounds the temporary arrays.
_BLOCK = 1 << 18


class Span(NamedTuple):
    """Span of a row: `slots` pairs of a document.

    start: offset among the store's tokens of the first target if documents begin with the end-of-document id, otherwise
    of the first input.
    """

    start: int
    slots: int


class _Uses(NamedTuple):
    """Entry of a pattern: `uses` remainders of length `slots`, after `taken` of that length in earlier patterns."""

    slots: int
    uses: int
    taken: int


class Bins:
    """Items of given sizes packed into rows of `length` slots, index-addressed.

    Items are numbered by size, then in their own order, and those of size 0 are left out: see `sort_by_size`.
    counts: (length + 1,) number of items of each size. most: maximum items per row (None: as many as fit).
    rows: number of rows. total: sum of the sizes. most_items: maximum items in a row.
    """

    def __init__(self, counts: np.ndarray, length: int, most: int | None = None):
        counts = np.array(counts, np.int64)
        counts[0] = 0
        self._class_starts = np.cumsum(counts) - counts
        self._patterns, self._times = pack_lengths(counts, length, most)
        self._ends = np.cumsum(self._times, dtype=np.int64)
        self.rows = int(self._ends[-1]) if len(self._times) else 0
        self.total = int(counts @ np.arange(len(counts)))
        self.most_items = max((sum(part.uses for part in pattern) for pattern in self._patterns), default=0)

    def row(self, index: int) -> list[tuple[int, int]]:
        """Return the items of a row and their sizes, longest first."""
        pattern = int(np.searchsorted(self._ends, index, side="right"))
        repeat = index - (int(self._ends[pattern - 1]) if pattern else 0)
        items = []
        for slots, uses, taken in self._patterns[pattern]:
            first = int(self._class_starts[slots]) + taken + repeat * uses
            items += [(item, slots) for item in range(first, first + uses)]
        return items


def sort_by_size(
    counts: np.ndarray, blocks: Iterable[tuple[np.ndarray, *tuple[np.ndarray, ...]]], *columns: np.ndarray
) -> None:
    """Write values of items into `columns` at the items' numbers.

    counts: as of `Bins`. blocks: the sizes of successive items, and a value of each for every column.
    """
    free = np.cumsum(counts) - counts
    free -= counts[0]
    for sizes, *values in blocks:
        inner = np.bincount(sizes, minlength=len(counts))
        # A stable sort of small sizes is a linear-time radix sort.
        order = np.argsort(sizes, kind="stable")[inner[0] :]
        inner[0] = 0
        places = np.arange(len(order)) + np.repeat(free - (np.cumsum(inner) - inner), inner)
        for column, value in zip(columns, values, strict=True):
            column[places] = value[order]
        free += inner


class PackingPlan:
    """Rows of packed documents of a section, index-addressed.

    store, section: the documents. length: slots per row, L.
    rows: number of rows. pairs: number of pairs of input and target in all rows.
    Memory, or a file, has 8 bytes per document, and 8 per row that one document fills.
    """

    def __init__(self, store: Store, section: Section, length: int):
        self._store, self._section, self._length = store, section, length
        # The first input of a document is the end-of-document id, so that it has as many pairs as tokens.
        self._unpaired = 1 if store.end is None else 0
        plan = plan_of(store, section, {"kind": "packed", "length": length}, self._make)
        self._starts, self._full_starts = plan.arrays["starts"], plan.arrays["full_starts"]
        self._rests = Bins(np.array(plan.numbers["counts"]), length)
        self.rows = self._rests.rows + len(self._full_starts)
        self.pairs = len(self._full_starts) * length + self._rests.total

    def row(self, index: int) -> list[Span]:
        """Return the spans of a row, longest first."""
        if index >= self._rests.rows:
            return [Span(int(self._full_starts[index - self._rests.rows]), self._length)]
        return [Span(int(self._starts[item]), slots) for item, slots in self._rests.row(index)]

    def _make(self, making: Making) -> dict[str, Any]:
        """Fill the offset of each remainder, by its number, and of each span that fills a row."""
        length = self._length
        counts, full = np.zeros(length + 1, np.int64), 0
        for _, pairs in self._documents(making):
            counts += np.bincount(pairs % length, minlength=length + 1)
            full += int((pairs // length).sum())
        full_starts, at = making.array("full_starts", "<i8", full), 0

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            nonlocal at
            for starts, pairs in self._documents(making):
                spans = pairs // length
                first = np.repeat(np.cumsum(spans) - spans, spans)
                numbers = np.arange(len(first)) - first
                full_starts[at : at + len(first)] = np.repeat(starts, spans) + numbers * length
                at += len(first)
                yield (pairs % length).astype(np.uint16 if length <= 1 << 16 else np.int32), starts + spans * length

        sort_by_size(counts, blocks(), making.array("starts", "<i8", int(counts[1:].sum())))
        return {"counts": counts.tolist()}

    def _documents(self, making: Making) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the offsets of documents and their numbers of pairs, a block at a time."""
        first, last = self._section.first_document, self._section.first_document + self._section.documents
        for begin in range(first, last, _BLOCK):
            starts = np.asarray(self._store.document_starts[begin : min(begin + _BLOCK, last) + 1])
            making.tell(begin - first, last - first)
            yield starts[:-1], np.maximum(np.diff(starts) - self._unpaired, 0)


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
