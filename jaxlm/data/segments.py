"""Segments of sentence pairs, spans of whole sentences: the chunk that gives a pair, and random second segments.

Devlin et al. (2019, appendix A.2); google-research/bert, create_pretraining_data.py:223-330, which makes chunks, pairs
and masks together and writes them to files. Here only the maximum extent of each pair is fixed in advance: a document
is split into chunks of whole sentences up to a target length, most as long as a row allows and some shorter. In any
epoch, the pair of a chunk has at most the chunk's tokens and three special tokens. Rows are therefore packed once,
while pairs are sampled in every epoch. The plan is a function of store, length and options, and of no seed. Long
documents are first split between sentences into spans of about SPAN tokens, so that all spans of a block of documents
are split into chunks in parallel.

If random segments were often shorter than true ones, lengths alone would reveal the random pairs. A span of whole
sentences seldom has a given length, so several candidates are sampled and the closest is taken. Boosted trees given the
lengths of both segments then detect the random pairs of unseen books with an AUC of at most 0.52 (0.58 to 0.66 with one
candidate if chunks are whole or documents short). A random segment ends inside a sentence where the true one would,
since the end of a sentence would reveal as much.
"""

import functools
import itertools
import tempfile
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlm.data.batch import RandomNumbers
from jaxlm.data.packing import Bins, sort_by_size
from jaxlm.data.plan_files import Making, plan_of
from jaxlm.data.store import Section, Store
from jaxlm.errors import InputError

# Special tokens of a pair: CLS, SEP and SEP.
SPECIALS = 3
# Minimum tokens of a pair, one per segment.
SHORTEST = 2

SPAN = 1 << 16
_BLOCK_DOCUMENTS = 1 << 20
_BLOCK_TOKENS = 1 << 28
_SPOOLED = 1 << 28  # bytes of chunks in the order of the text that are kept in memory
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

    starts: (chunks,) int64, offsets into the store's tokens. tokens: (chunks,) int32, number of tokens per chunk. Both
    are in the order of `bins`: by size, then by place.
    capacity: maximum tokens that a pair takes from its chunk. short: number of chunks with a short target.
    alone: number of single-sentence chunks. lost: number of tokens in no chunk. rows: number of rows.
    Memory, or a file, has 12 bytes per chunk.
    """

    def __init__(self, store: Store, section: Section, options: ChunkOptions):
        self.options = options
        self.capacity = options.length - SPECIALS
        assert self.capacity >= SHORTEST
        self._section = section
        self._documents = np.asarray(store.document_starts)
        self._sentences = sentence_starts(store, options.sentence_tokens)
        self._ending = 0 if store.end is None else 1  # end-of-document ids, which are in no pair
        plan = plan_of(store, section, {"kind": "pairs", **options._asdict()}, self._make)
        self.starts, self.tokens = plan.arrays["starts"], plan.arrays["tokens"]
        self.short, self.alone, self.lost = (plan.numbers[name] for name in ("short", "alone", "lost"))
        self.bins = Bins(np.array(plan.numbers["counts"]), options.length, options.pairs_per_row)
        self.rows = self.bins.rows

    def _make(self, making: Making) -> dict[str, Any]:
        """Fill the starts and sizes of the chunks, which are first kept in the order of the text."""
        counts = np.zeros(self.options.length + 1, np.int64)
        short = alone = tokens = blocks = 0
        with tempfile.SpooledTemporaryFile(_SPOOLED) as spool:
            for first, end in self._blocks(self._section):
                making.tell(first - self._section.first_document, self._section.documents)
                starts, sizes, some_short, some_alone = self._split(first, end)
                counts += np.bincount(self._slots(sizes), minlength=len(counts))
                short, alone = short + some_short, alone + some_alone
                tokens, blocks = tokens + int(sizes.sum(dtype=np.int64)), blocks + 1
                np.save(spool, starts)
                np.save(spool, sizes)
            spool.seek(0)
            parts = ((np.load(spool), np.load(spool)) for _ in range(blocks))
            columns = making.array("starts", "<i8", int(counts.sum())), making.array("tokens", "<i4", int(counts.sum()))
            sort_by_size(counts, ((self._slots(sizes), starts, sizes) for starts, sizes in parts), *columns)
        lost = self._section.tokens - self._section.documents * self._ending - tokens
        return {"counts": counts.tolist(), "short": short, "alone": alone, "lost": lost}

    def _slots(self, tokens: np.ndarray) -> np.ndarray:
        """Return the slots of a row that the pairs of chunks take."""
        return np.minimum(tokens, self.capacity) + SPECIALS

    def _blocks(self, section: Section):
        """Yield ranges of the section's documents that are split in parallel."""
        first, last = section.first_document, section.first_document + section.documents
        while first < last:
            reach = int(np.searchsorted(self._documents, int(self._documents[first]) + _BLOCK_TOKENS))
            end = min(max(reach, first + 1), first + _BLOCK_DOCUMENTS, last)
            yield first, end
            first = end

    def _split(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Return the starts and sizes of the chunks of documents first … end - 1, and how many are short and alone."""
        all_short = all_alone = 0
        at, stops, documents = self._spans(first, end)
        options, capacity, sentences = self.options, self.capacity, self._sentences
        starts, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
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
            all_short += int(np.count_nonzero(short & kept))
            inner = np.searchsorted(sentences, ends) - np.searchsorted(sentences, at, side="right")
            all_alone += int(np.count_nonzero((inner == 0) & kept))
            unfinished = ends < stops
            at, stops, documents = ends[unfinished], stops[unfinished], documents[unfinished]
        begins = np.concatenate(starts)
        order = np.argsort(begins, kind="stable")
        return begins[order], np.concatenate(sizes)[order], all_short, all_alone

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
            f"{store.place} keeps no sentences, which pairs are made from; prepare it again with --sentences split "
            "(or lines)"
        )
    return ChunkPlan(store, section, options)


# Random documents that the search for a single span tries before it accepts a short one or part of a sentence.
TRIES = 8

# Minimum sentences per candidate of a long document.
_LONG = 4

_BLOCK = 1 << 20  # documents processed at a time


class RandomParts:
    """Sampler of random second segments for the pairs of a section, from its other documents.

    A section of a single document uses those of the whole store. candidates: spans sampled per segment. A single
    candidate is resampled, up to `TRIES` in all, if its document is too short or no whole sentence of it fits.
    documents: number of documents to sample from; 0 if fewer than two have a token.
    """

    def __init__(self, store: Store, section: Section, candidates: int, sentences: np.ndarray):
        self.candidates = candidates
        self._documents, self._sentences = np.asarray(store.document_starts), sentences
        self._ending = 0 if store.end is None else 1
        self._first = section.first_document
        count = section.documents
        if count < 2:
            self._first, count = 0, store.documents
        filled = 0
        for begin in range(self._first, self._first + count, _BLOCK):
            sizes = np.diff(self._documents[begin : min(begin + _BLOCK, self._first + count) + 1])
            filled += int(np.count_nonzero(sizes > self._ending))
        self.documents = count if filled >= 2 else 0
        self._some_empty = filled < count

    def take(
        self, own: int, tokens: int, room: int, numbers: RandomNumbers, *, begins_within: bool, ends_within: bool
    ) -> tuple[int, int]:
        """Return the start and end of a span of a random document other than that of token `own`.

        tokens: length of the text it replaces. room: tokens of it that fit in the row. If room < tokens, both segments
        are truncated later, and the span reaches `tokens` (with a single candidate, `room`); otherwise it has at most
        `tokens`. Both are whole sentences. begins_within, ends_within: whether the replaced text begins, or also ends,
        inside a sentence. The span then does too, with exactly `tokens` if its document has as many.
        """
        truncates = room < tokens
        if self.candidates == 1:
            wanted = tokens if begins_within else max(1, room)
            return self._first_found(own, wanted, numbers, within=begins_within, truncates=truncates)
        starts, stops, where = self._other_documents(own, numbers)
        if begins_within:
            begins, ends = self._within(starts, stops, where, tokens, ends_within=ends_within)
        else:
            begins, ends = self._whole_sentences(starts, stops, where, tokens, truncates=truncates)
        nearest = int(np.abs(ends - begins - tokens).argmin())
        if begins[nearest] == ends[nearest]:  # every first sentence is too long: truncate one
            return self._first_found(own, tokens, numbers, within=begins_within, truncates=truncates)
        return int(begins[nearest]), int(ends[nearest])

    def _other_documents(self, own: int, numbers: RandomNumbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start and end of each candidate's document, and the candidate's relative position in it.

        A long document gives all candidates, so that all books are sampled equally often. Otherwise books with more
        varied sentence lengths would be preferred, which would reveal random pairs. Short documents give one each.
        """
        which, where = numbers.fractions(2 * self.candidates).reshape(2, -1)
        mine = self._document_of(own)
        inside = self._first <= mine < self._first + self.documents
        chosen = self._first + (which * (self.documents - inside)).astype(np.int64)
        if inside:
            chosen += chosen >= mine
        one = slice(chosen[0], chosen[0] + 2)
        boundary, last = np.searchsorted(self._sentences, self._documents[one]).tolist()
        if last - boundary >= _LONG * self.candidates:
            chosen[:] = chosen[0]
        return self._documents[chosen], self._documents[chosen + 1] - self._ending, where

    def _within(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, ends_within: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return spans that begin at any token, and end with a sentence or at any token."""
        if ends_within:
            begins = starts + (where * np.maximum(1, stops - starts - wanted + 1)).astype(np.int64)
            return begins, np.minimum(begins + wanted, stops)
        boundary = np.searchsorted(self._sentences, np.minimum(starts + wanted, stops))
        last = np.searchsorted(self._sentences, stops)
        ends = np.minimum(self._sentences[boundary + (where * (last - boundary + 1)).astype(np.int64)], stops)
        return np.maximum(starts, ends - wanted), ends

    def _whole_sentences(
        self, starts: np.ndarray, stops: np.ndarray, where: np.ndarray, wanted: int, *, truncates: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return spans of whole sentences that reach `wanted` (truncates) or fit in it; empty if no sentence fits."""
        sentences = self._sentences
        boundary = np.searchsorted(sentences, starts)
        last = np.searchsorted(sentences, np.maximum(starts, stops - wanted) + 1)  # beyond it, too few tokens are left
        begins = sentences[boundary + (where * (last - boundary)).astype(np.int64)]
        if truncates:
            ends = sentences[np.searchsorted(sentences, np.minimum(begins + wanted, stops))]
        else:
            ends = sentences[np.searchsorted(sentences, begins + wanted, side="right") - 1]
        return begins, np.minimum(ends, stops)

    def _first_found(
        self, own: int, wanted: int, numbers: RandomNumbers, *, within: bool, truncates: bool
    ) -> tuple[int, int]:
        """Return the first span found in at most `TRIES` documents.

        within: the span begins at any token, ends with a sentence and has exactly `wanted` tokens. truncates: the
        span is whole sentences from a random one up to the one that reaches `wanted`. Otherwise: whole sentences that
        fit.
        """
        sentences = self._sentences
        for attempt in range(1, TRIES + 1):
            start, end = self._other_document(own, numbers)
            if end - start < wanted and attempt < TRIES:
                continue
            if within:
                boundary, last = np.searchsorted(sentences, (min(start + wanted, end), end)).tolist()
                stop = min(int(sentences[boundary + numbers.below(last - boundary + 1)]), end)
                return max(start, stop - wanted), stop
            latest = max(start, end - wanted)  # beyond it, too few tokens are left
            boundary, last = np.searchsorted(sentences, (start, latest + 1)).tolist()
            begin = int(sentences[boundary + numbers.below(last - boundary)])
            if begin == latest:
                return begin, end
            if truncates:
                return begin, min(int(sentences[np.searchsorted(sentences, begin + wanted)]), end)
            stop = int(sentences[np.searchsorted(sentences, begin + wanted, side="right") - 1])
            if stop > begin:
                return begin, stop
        return begin, begin + wanted  # no first sentence was short enough: truncate the last one

    def _other_document(self, own: int, numbers: RandomNumbers) -> tuple[int, int]:
        """Return the start and end of a random non-empty document other than that of token `own`."""
        mine, first, count = self._document_of(own), self._first, self.documents
        document = first + numbers.below(count - (first <= mine < first + count))
        document += first <= mine <= document
        while self._some_empty and (
            document == mine or self._documents[document + 1] - self._documents[document] <= self._ending
        ):
            document = first + (document + 1 - first) % count
        return int(self._documents[document]), int(self._documents[document + 1]) - self._ending

    def _document_of(self, token: int) -> int:
        return int(np.searchsorted(self._documents, token, side="right")) - 1
