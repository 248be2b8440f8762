"""Chunks: stretches of whole sentences that each give one pair, and the rows that hold them, decided once for a store.

Devlin et al. (2019, appendix A.2); google-research/bert, create_pretraining_data.py:223-330, where chunks, pairs and
masks are made together and written down. Here only what a pair can be at most is decided: a document is cut, once,
into chunks of whole sentences up to a target length, most of them as long as a row allows and some shorter, and
whatever pair a chunk gives in some epoch has at most its tokens and the three special ones. So rows can be packed for
good, while pairs are drawn anew in every epoch. The plan is a function of store, length and options; no seed is in it.

Long documents are cut into stretches of about STRETCH tokens first, between sentences, so that all of a block's
stretches are cut into chunks side by side.
"""

import functools
from typing import Literal, NamedTuple

import numpy as np

from jaxlm.data.packing import Bins
from jaxlm.data.store import Section, Store
from jaxlm.errors import InputError

# CLS, SEP and SEP of a pair.
SPECIALS = 3
# A pair has a token of each side at least.
SHORTEST = 2

STRETCH = 1 << 16
_BLOCK_DOCUMENTS = 1 << 20
_BLOCK_TOKENS = 1 << 28
_VERSION = 1  # of the hash that draws short targets; `DataVersions.chunks`


class ChunkOptions(NamedTuple):
    """What a plan depends on beside the store; `SentencePairs` says what each means."""

    length: int
    pairs_per_row: int
    short_share: float
    short_drawn: Literal["chunk", "document"]
    chunks: Literal["whole", "filled"]


class ChunkPlan:
    """The chunks of a section and the rows they are packed in, index-addressed.

    starts: (chunks,) int64, where in the store's tokens each begins. tokens: (chunks,) int32, how many it has.
    capacity: the most tokens that a pair takes from its chunk. short: chunks with a short target. alone: chunks without
    a border of sentences in them. lost: tokens in no chunk. rows: how many. Memory: 16 bytes a chunk, 28 in making it.
    """

    def __init__(self, store: Store, section: Section, options: ChunkOptions):
        self.options = options
        self.capacity = options.length - SPECIALS
        assert self.capacity >= SHORTEST
        assert store.sentence_starts is not None
        self._documents = np.asarray(store.document_starts)
        self._sentences = np.asarray(store.sentence_starts)
        self._ending = 0 if store.end is None else 1  # tokens that end a document and are in no pair
        self.short = self.alone = 0
        parts = [self._cut(first, end) for first, end in self._blocks(section)]
        self.starts = np.concatenate([np.zeros(0, np.int64), *(starts for starts, _ in parts)])
        self.tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in parts)])
        del parts
        self.lost = section.tokens - section.documents * self._ending - int(self.tokens.sum(dtype=np.int64))
        self.bins = Bins(np.minimum(self.tokens, self.capacity) + SPECIALS, options.length, options.pairs_per_row)
        self.rows = self.bins.rows

    def _blocks(self, section: Section):
        """Ranges of the section's documents that are cut side by side."""
        first, last = section.first_document, section.first_document + section.documents
        while first < last:
            reach = int(np.searchsorted(self._documents, int(self._documents[first]) + _BLOCK_TOKENS))
            end = min(max(reach, first + 1), first + _BLOCK_DOCUMENTS, last)
            yield first, end
            first = end

    def _cut(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The chunks of documents first … end - 1: where each begins, and its tokens."""
        at, stops, documents = self._stretches(first, end)
        options, capacity, sentences = self.options, self.capacity, self._sentences
        starts, sizes = [], []
        while len(at):
            keys = at if options.short_drawn == "chunk" else documents
            targets, short = short_targets(keys, capacity, options.short_share)
            # The borders after `at`: the last one up to the target, the first one that reaches it, the very first.
            if options.chunks == "filled":
                ends = sentences[np.searchsorted(sentences, np.minimum(at + targets, stops))]
                ends = np.minimum(ends, at + 2 * capacity)  # not more of an endless sentence is thrown away
            else:
                ends = sentences[np.searchsorted(sentences, at + targets, side="right") - 1]
                following = sentences[np.searchsorted(sentences, at, side="right")]
                # A sentence over the target is a chunk; one over the capacity is cut.
                ends = np.where(ends > at, ends, np.minimum(following, at + capacity))
            ends = np.minimum(ends, stops)
            tokens = ends - at
            kept = tokens >= SHORTEST
            starts.append(at[kept])
            sizes.append(tokens[kept].astype(np.int32))
            self.short += int(np.count_nonzero(short & kept))
            inner = np.searchsorted(sentences, ends) - np.searchsorted(sentences, at, side="right")
            self.alone += int(np.count_nonzero((inner == 0) & kept))
            going = ends < stops
            at, stops, documents = ends[going], stops[going], documents[going]
        begins = np.concatenate(starts)
        order = np.argsort(begins, kind="stable")
        return begins[order], np.concatenate(sizes)[order]

    def _stretches(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where each stretch begins and stops, and its document; a document's end is in none."""
        starts = self._documents[first:end]
        stops = self._documents[first + 1 : end + 1] - self._ending
        counts = np.maximum(1, (stops - starts) // STRETCH)
        documents = np.repeat(np.arange(first, end), counts)
        number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        near = np.repeat(starts, counts) + number * STRETCH
        begins = np.where(number == 0, near, self._sentences[np.searchsorted(self._sentences, near)])
        begins = np.minimum(begins, np.repeat(stops, counts))
        last = np.append(documents[1:] != documents[:-1], True)
        ends = np.where(last, np.repeat(stops, counts), np.append(begins[1:], 0))
        filled = ends > begins
        return begins[filled], ends[filled], documents[filled]


def short_targets(keys: np.ndarray, capacity: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The target length of each chunk and whether it is a short one: a share of them, uniform in 2 … capacity.

    keys: what it is drawn by: where the chunk begins, or its document's number. A hash, so the same in any order.
    """
    bits = _hash(keys.astype(np.uint64) ^ np.uint64(_VERSION << 56))
    short = (bits >> np.uint64(32)) < np.uint64(round(share * 2**32))
    drawn = SHORTEST + (((bits & np.uint64(0xFFFFFFFF)) * np.uint64(capacity - SHORTEST + 1)) >> np.uint64(32))
    return np.where(short, drawn.astype(np.int64), capacity), short


def _hash(keys: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood, 2014): 64 well mixed bits of each key."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def chunk_plan(store: Store, section: Section, options: ChunkOptions) -> ChunkPlan:
    """The plan of a section, made once. InputError where the store has no sentences."""
    if store.sentence_starts is None:
        raise InputError(
            f"{store.path} keeps no sentences, and pairs are made of them: prepare it again with --sentences split "
            "(or lines)"
        )
    return ChunkPlan(store, section, options)
