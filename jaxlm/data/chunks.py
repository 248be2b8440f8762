"""Chunks: spans of whole sentences that give one sentence pair each, and their packing into rows.

Devlin et al. (2019, appendix A.2); google-research/bert, create_pretraining_data.py:223-330, which makes chunks, pairs
and masks together and writes them to files. Here only the maximum extent of each pair is fixed in advance: a document
is split into chunks of whole sentences up to a target length, most as long as a row allows and some shorter. In any
epoch, the pair of a chunk has at most the chunk's tokens and three special tokens. Rows are therefore packed once,
while pairs are sampled in every epoch. The plan is a function of store, length and options, and of no seed.

Long documents are first split between sentences into spans of about SPAN tokens, so that all spans of a block of
documents are split into chunks in parallel.
"""

import functools
import itertools
from typing import Literal, NamedTuple

import numpy as np

from jaxlm.data.packing import Bins
from jaxlm.data.store import Section, Store
from jaxlm.errors import InputError

# Special tokens of a pair: CLS, SEP and SEP.
SPECIALS = 3
# Minimum tokens of a pair, one per segment.
SHORTEST = 2

SPAN = 1 << 16
_BLOCK_DOCUMENTS = 1 << 20
_BLOCK_TOKENS = 1 << 28
_VERSION = 1  # of the hash that samples short targets; the second of `SentencePairs.data_order`


class ChunkOptions(NamedTuple):
    """Options of a plan; `SentencePairs` documents them."""

    length: int
    pairs_per_row: int
    short_share: float
    short_drawn: Literal["chunk", "document"]
    chunks: Literal["whole", "filled"]
    sentence_tokens: int = 0


class ChunkPlan:
    """Chunks of a section and their packing into rows, index-addressed.

    starts: (chunks,) int64, offsets into the store's tokens. tokens: (chunks,) int32, number of tokens per chunk.
    capacity: maximum tokens that a pair takes from its chunk. short: number of chunks with a short target.
    alone: number of single-sentence chunks. lost: number of tokens in no chunk. rows: number of rows.
    Memory: 16 bytes per chunk, 28 while the plan is computed.
    """

    def __init__(self, store: Store, section: Section, options: ChunkOptions):
        self.options = options
        self.capacity = options.length - SPECIALS
        assert self.capacity >= SHORTEST
        self._documents = np.asarray(store.document_starts)
        self._sentences = sentence_starts(store, options.sentence_tokens)
        self._ending = 0 if store.end is None else 1  # end-of-document ids, which are in no pair
        self.short = self.alone = 0
        parts = [self._split(first, end) for first, end in self._blocks(section)]
        self.starts = np.concatenate([np.zeros(0, np.int64), *(starts for starts, _ in parts)])
        self.tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in parts)])
        del parts
        self.lost = section.tokens - section.documents * self._ending - int(self.tokens.sum(dtype=np.int64))
        self.bins = Bins(np.minimum(self.tokens, self.capacity) + SPECIALS, options.length, options.pairs_per_row)
        self.rows = self.bins.rows

    def _blocks(self, section: Section):
        """Yield ranges of the section's documents that are split in parallel."""
        first, last = section.first_document, section.first_document + section.documents
        while first < last:
            reach = int(np.searchsorted(self._documents, int(self._documents[first]) + _BLOCK_TOKENS))
            end = min(max(reach, first + 1), first + _BLOCK_DOCUMENTS, last)
            yield first, end
            first = end

    def _split(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and sizes of the chunks of documents first … end - 1."""
        at, stops, documents = self._spans(first, end)
        options, capacity, sentences = self.options, self.capacity, self._sentences
        starts, sizes = [], []
        while len(at):
            keys = at if options.short_drawn == "chunk" else documents
            targets, short = short_targets(keys, capacity, options.short_share)
            # Boundaries after `at`: the first that reaches the target (filled) or the last up to the target (whole).
            if options.chunks == "filled":
                ends = sentences[np.searchsorted(sentences, np.minimum(at + targets, stops))]
                ends = np.minimum(ends, at + 2 * capacity)  # limits the tokens lost of a very long sentence
            else:
                ends = sentences[np.searchsorted(sentences, at + targets, side="right") - 1]
                following = sentences[np.searchsorted(sentences, at, side="right")]
                # A sentence longer than the target is a chunk; one longer than the capacity is split.
                ends = np.where(ends > at, ends, np.minimum(following, at + capacity))
            ends = np.minimum(ends, stops)
            tokens = ends - at
            kept = tokens >= SHORTEST
            starts.append(at[kept])
            sizes.append(tokens[kept].astype(np.int32))
            self.short += int(np.count_nonzero(short & kept))
            inner = np.searchsorted(sentences, ends) - np.searchsorted(sentences, at, side="right")
            self.alone += int(np.count_nonzero((inner == 0) & kept))
            unfinished = ends < stops
            at, stops, documents = ends[unfinished], stops[unfinished], documents[unfinished]
        begins = np.concatenate(starts)
        order = np.argsort(begins, kind="stable")
        return begins[order], np.concatenate(sizes)[order]

    def _spans(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start, stop and document of each span, without end-of-document ids."""
        starts = self._documents[first:end]
        stops = self._documents[first + 1 : end + 1] - self._ending
        counts = np.maximum(1, (stops - starts) // SPAN)
        documents = np.repeat(np.arange(first, end), counts)
        number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        near = np.repeat(starts, counts) + number * SPAN
        begins = np.where(number == 0, near, self._sentences[np.searchsorted(self._sentences, near)])
        begins = np.minimum(begins, np.repeat(stops, counts))
        last = np.append(documents[1:] != documents[:-1], True)
        ends = np.where(last, np.repeat(stops, counts), np.append(begins[1:], 0))
        filled = ends > begins
        return begins[filled], ends[filled], documents[filled]


def short_targets(keys: np.ndarray, capacity: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the target length of each chunk and whether it is short: a fraction of them, uniform in 2 … capacity.

    keys: start of the chunk, or number of its document. Targets are hashes of the keys, independent of their order.
    """
    bits = _hash(keys.astype(np.uint64) ^ np.uint64(_VERSION << 56))
    short = (bits >> np.uint64(32)) < np.uint64(round(fraction * 2**32))
    sampled = SHORTEST + (((bits & np.uint64(0xFFFFFFFF)) * np.uint64(capacity - SHORTEST + 1)) >> np.uint64(32))
    return np.where(short, sampled.astype(np.int64), capacity), short


def _hash(keys: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 hash of each key (Steele, Lea and Flood, 2014)."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sentence_starts(store: Store, sentence_tokens: int) -> np.ndarray:
    """Return the token at which each sentence begins, and the end of the last: (sentences + 1,) int64.

    Documents of a store that keeps no sentences are split into spans of `sentence_tokens` tokens instead.
    """
    if store.sentence_starts is not None:
        return np.asarray(store.sentence_starts)
    documents = np.asarray(store.document_starts)
    spans = [np.arange(first, end, sentence_tokens) for first, end in itertools.pairwise(documents.tolist())]
    return np.concatenate([*spans, documents[-1:]]).astype(np.int64)


@functools.lru_cache(maxsize=8)
def chunk_plan(store: Store, section: Section, options: ChunkOptions) -> ChunkPlan:
    """Return the plan of a section, cached. Raises InputError if the store keeps no sentences."""
    if store.sentence_starts is None and not options.sentence_tokens:
        raise InputError(
            f"{store.path} keeps no sentences, which pairs are made from; prepare it again with --sentences split "
            "(or lines)"
        )
    return ChunkPlan(store, section, options)
