"""Training rows: row r of a run is a function of its stores, its layout, its seed and r, and of nothing else.

Each section of a store is a source of rows. In every epoch of a section each of its rows comes once, in an order drawn
from (seed, section, epoch); sections are interleaved evenly by their shares. All of it is arithmetic on r, so that any
row can be had at once: resuming costs nothing, and any number of processes share the work by taking their own indices.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from grain.experimental import index_shuffle

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.data.config import ShuffledConfig
from jaxlm.data.origin import PairOrigin, RowOrigin
from jaxlm.data.packing import PackingPlan
from jaxlm.data.pairs import Pairs, empty_pairs, pair_figures
from jaxlm.data.store import Section, Store
from jaxlm.data.versions import CURRENT, DataVersions
from jaxlm.errors import InputError

# What rows of a layout are called.
LAYOUTS = {"windows": "windows", "packed": "packed rows", "pairs": "rows of pairs", "streams": "streams"}

# Grain's permutation works within 32 bits; a larger section is shuffled in parts that are mixed evenly.
_MOST_ROWS = 1 << 31
# Shares that are not counts of rows become integers of this sum, so that mixing is exact arithmetic.
_SHARES = 1 << 40
_SHUFFLE_ROUNDS = 4
# Up to this many rows an epoch's order is a list: Grain's permutation walks a cycle of 65,536 whatever their number,
# 2 ms for an index of 12 rows.
_LISTED_ROWS = 1 << 14


class _Windows:
    """Rows of a section's text as it stands, across documents; the last row may be short."""

    def __init__(self, store: Store, section: Section, length: int):
        self.store, self.section, self._length = store, section, length
        self._tokens = store.tokens  # not as an array, which would read and check all of it now
        self.pairs = max(section.tokens - 1, 0)
        self.rows = -(-self.pairs // length)

    def fill(self, row: int, batch: Batch, b: int, epoch: int) -> None:
        start = row * self._length
        slots = min(self._length, self.pairs - start)
        start += self.section.first_token
        stretch = self._tokens[start : start + slots + 1]
        batch.ids[b, :slots] = stretch[:-1]
        batch.targets[b, :slots] = stretch[1:]
        batch.positions[b, :slots] = np.arange(slots)
        batch.segments[b, :slots] = 1
        batch.weights[b, :slots] = 1

    def origin(self, row: int, epoch: int) -> list[RowOrigin]:
        start = row * self._length
        token = self.section.first_token + start
        starts = self.store.document_starts
        document = int(np.searchsorted(starts, token, side="right")) - 1
        tokens = min(self._length, self.pairs - start) + 1
        offset = token - int(starts[document])
        return [RowOrigin(str(self.store.path), self.section.source, document, offset, tokens)]


class Packed:
    """Rows of packed documents: segments number them, positions restart, no target lies across a border.

    A document begins with the id that ends documents as its first input, so that each of its tokens is a target; where
    the tokenizer has none, and in version 1, its first token is its first input and no target.
    """

    def __init__(self, store: Store, section: Section, length: int, versions: DataVersions):
        self.store, self.section = store, section
        self._begin = store.end if versions.begins_documents(store.end) else None
        self._tokens = store.tokens
        first = section.first_document
        self._starts = np.asarray(store.document_starts)[first : first + section.documents + 1]
        self._plan = PackingPlan(self._starts, length, begun=self._begin is not None)
        self.pairs, self.rows = self._plan.pairs, self._plan.rows

    def fill(self, row: int, batch: Batch, b: int, epoch: int) -> None:
        ids, targets = batch.ids[b], batch.targets[b]
        at = 0
        sizes, begins = [], []
        for document, token, slots in self._plan.row(row):
            start, end = int(self._starts[document]) + token, at + slots
            if self._begin is not None and token == 0:
                targets[at:end] = self._tokens[start : start + slots]
                ids[at] = self._begin
                ids[at + 1 : end] = targets[at : end - 1]
            else:
                start -= self._begin is not None  # the last target of the piece before
                stretch = self._tokens[start : start + slots + 1]
                ids[at:end] = stretch[:-1]
                targets[at:end] = stretch[1:]
            sizes.append(slots)
            begins.append(at)
            at = end
        batch.segments[b, :at] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        batch.positions[b, :at] = np.arange(at) - np.repeat(begins, sizes)
        batch.weights[b, :at] = 1

    def origin(self, row: int, epoch: int) -> list[RowOrigin]:
        name, source, first = str(self.store.path), self.section.source, self.section.first_document
        more = self._begin is None  # the first token of a piece is read there, and predicted in the piece before
        return [RowOrigin(name, source, first + d, token, slots + more) for d, token, slots in self._plan.row(row)]


Source = _Windows | Packed | Pairs


@dataclass(frozen=True)
class _Part:
    """Rows of one source that are shuffled together: `rows` of them from `first` on."""

    source: Source
    first: int
    rows: int
    number: int


class TrainingRows:
    """All rows of a run, without end.

    sources: of each section. pairs_per_row: P of a PairBatch; 0 where rows are no pairs. order: its version.
    """

    def __init__(
        self, sources: Sequence[Source], shares: Sequence[int], length: int, seed: int, order: int = CURRENT.order
    ):
        self.length, self._order = length, order
        self.sources = tuple(sources)
        self.pairs_per_row = max((source.most for source in sources if isinstance(source, Pairs)), default=0)
        self._seed = seed % 2**64
        self._parts: list[_Part] = []
        self._shares: list[int] = []
        counts = [-(-source.rows // _MOST_ROWS) for source in sources]
        for source, share, count in zip(sources, shares, counts, strict=True):
            edges = [source.rows * k // count for k in range(count + 1)]
            for first, end in itertools.pairwise(edges):
                self._parts.append(_Part(source, first, end - first, len(self._parts)))
                self._shares.append(share * math.lcm(*counts) // count)
        self._total = sum(self._shares)

    def empty(self, rows: int) -> Batch | PairBatch:
        """Return a batch of padding, (rows, L)."""
        if self.pairs_per_row:
            return empty_pairs(rows, self.length, self.pairs_per_row)
        return empty_batch(rows, self.length)

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch | PairBatch:
        """The rows of these indices as one batch, (len(indices), L)."""
        batch: Any = self.empty(len(indices))
        for b, index in enumerate(indices):
            part, row, epoch = self._place(int(index))
            part.source.fill(row, batch, b, epoch)
        return batch

    def origin(self, index: int) -> list[RowOrigin] | list[PairOrigin]:
        """Where the pieces of a row came from, in their order."""
        part, row, epoch = self._place(index)
        return part.source.origin(row, epoch)

    def description(self) -> str | None:
        """Return a sentence on the pairs, for people; None where rows are no pairs."""
        return str(pair_figures(self.sources)) if self.pairs_per_row else None

    def _place(self, index: int) -> tuple[_Part, int, int]:
        """The part that row `index` is taken from, the row of its source, and the epoch of that part."""
        part, taken = self._deal(index)
        epoch, at = divmod(taken, part.rows)
        # Named by all of these, not by a sum of them: else epoch 1 of seed 0 would be epoch 0 of seed 1.
        key = (self._order, self._seed, part.number, epoch)
        return part, part.first + _shuffled(at, part.rows, key), epoch

    def _deal(self, index: int) -> tuple[_Part, int]:
        """The part that deals row `index`, and how many rows it has dealt before.

        Of the first k rows that reach a part, floor(k * rest / all) go on to the parts after it, where `rest` is their
        shares and `all` theirs and its own: each part's rows lie evenly among the others' for ever.
        """
        before, after, remaining = index, index + 1, self._total
        for part, share in zip(self._parts[:-1], self._shares, strict=False):
            rest = remaining - share
            on_before, on_after = before * rest // remaining, after * rest // remaining
            if on_before == on_after:
                return part, before - on_before
            before, after, remaining = on_before, on_after, rest
        return self._parts[-1], before


def training_rows(
    stores: Sequence[Store], data: ShuffledConfig, *, length: int, seed: int, versions: DataVersions = CURRENT
) -> TrainingRows:
    """The rows of a run: infinite, index-addressed; row r depends on the stores, layout, weights, length, seed and r.

    versions: those of the run. InputError where a section has nothing to make a row of, or the weights do not fit the
    stores.
    """
    data.check()
    sources = _sources(stores, data, length, seed, versions)
    return TrainingRows(sources, mixture_shares(sources, stores, data.weights), length, seed, versions.order)


def rows_per_epoch(
    stores: Sequence[Store], data: ShuffledConfig, length: int, versions: DataVersions = CURRENT
) -> list[int]:
    """Rows in one pass over each section, the stores' one after the other."""
    return [source.rows for source in _sources(stores, data, length, 0, versions)]


def mixture_shares(sources: Sequence[Source], stores: Sequence[Store], weights: Sequence[float]) -> list[int]:
    """Each section's share of the rows, as integers.

    A store's share is its weight in data.weights, without these the number of its rows; in a store the sections share
    by the weights they got at preparation, without these by their numbers of rows.
    """
    if not weights and all(section.weight is None for store in stores for section in store.sections):
        return [source.rows for source in sources]
    shares: list[float] = []
    for number, store in enumerate(stores):
        rows = [source.rows for source in sources if source.store is store]
        given = [section.weight for section in store.sections]
        own = [float(weight) for weight in given if weight is not None] if None not in given else rows
        of_store = weights[number] if weights else sum(rows)
        shares += [of_store * weight / sum(own) for weight in own]
    return [max(1, round(_SHARES * share / sum(shares))) for share in shares]


def empty_batch(rows: int, length: int) -> Batch:
    """Padding everywhere: segment 0, weight 0."""
    ids, targets, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
    return Batch(ids, targets, positions, segments, np.zeros((rows, length), np.float32))


def _sources(
    stores: Sequence[Store], data: ShuffledConfig, length: int, seed: int, versions: DataVersions
) -> list[Source]:
    sources: list[Source] = []
    for store in stores:
        for section in store.sections:
            if data.layout == "pairs":
                number = len(sources)
                sources.append(Pairs(store, section, data, length=length, seed=seed, number=number, versions=versions))
                continue
            source: Source = _Windows(store, section, length)
            if data.layout == "packed":
                source = Packed(store, section, length, versions)
            if source.rows == 0:
                raise InputError(
                    f"{store.path}: source {section.source} holds {section.tokens} tokens in {section.documents} "
                    "documents, not one that follows another; prepare the store without it"
                )
            sources.append(source)
    return sources


def _shuffled(at: int, rows: int, key: tuple[int, ...]) -> int:
    """The `at`-th of `rows` indices in the order that `key` names."""
    if rows <= _LISTED_ROWS:
        return int(_order(rows, key)[at])
    return index_shuffle(at, max_index=rows - 1, seed=_seed32(key), rounds=_SHUFFLE_ROUNDS)


@functools.lru_cache(maxsize=512)
def _order(rows: int, key: tuple[int, ...]) -> np.ndarray:
    return np.argsort(np.random.SeedSequence(key).generate_state(rows, np.uint64), kind="stable").astype(np.uint16)


@functools.lru_cache(maxsize=4096)
def _seed32(key: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])
