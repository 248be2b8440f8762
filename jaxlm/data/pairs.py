"""Sentence pairs: the pair of each chunk of a document per epoch, sampled from (seed, section, epoch, row).

Devlin et al. (2019, sections 3.1 and A.2); google-research/bert, create_pretraining_data.py:223-433. A chunk is split
at a random sentence boundary: A is the text before it, and B the text after it or, half of the time, text from a random
other document. Pairs longer than a row allows lose tokens of the longer segment one at a time, from its front or back
with equal probability. Differences from the original code:

- A random B is nearly as long as the text it replaces: of several spans of whole sentences, the longest that fits or,
  if the chunk is longer than a row, the shortest that reaches its end, truncated in the same way (`RandomParts`). The
  original takes the first span that reaches a target length. Its length then differs, so rows cannot be packed before
  sampling; and in documents of a few sentences it separates true from random pairs (AUC 0.66 in documents of 2 or 3
  sentences, 0.60 of 2 to 6, 0.52 in books).
- The text that a random B replaces is in no pair of that epoch. The original returns these sentences, and the next
  chunk begins with them.
- A single-sentence chunk is split at a random token. A random B of it also begins inside a sentence, and ends inside
  one if the sentence continues beyond the chunk; "A and B are spans of text, not sentences" (section 3). The original
  always makes a random pair of it, which is an option here.
- The other document always differs. The original tries ten times, then accepts the same one.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.batch import PairBatch, RandomNumbers
from jaxlm.data.layouts.pairs import SentencePairs
from jaxlm.data.segments import SHORTEST, SPECIALS, ChunkOptions, RandomParts, chunk_plan, sentence_starts
from jaxlm.data.store import PairOrigin, Section, Store
from jaxlm.errors import InputError

# Slots per pair that give the default maximum number of pairs per row.
SLOTS_A_PAIR = 16

ROLES = ("cls", "sep", "mask")


class Pair(NamedTuple):
    """Two spans of a store's tokens, [first, first_end) and [second, second_end), of chunk [chunk, chunk_end)."""

    first: int
    first_end: int
    second: int
    second_end: int
    is_next: bool
    chunk: int
    chunk_end: int


class Pairs:
    """Rows of sentence pairs of a section. rows, targets: numbers of rows and pairs per epoch. most: maximum
    number of pairs per row.

    random_parts: source of random second segments. number: index of the section in the run.
    Raises InputError if the section has no pairs.
    """

    def __init__(
        self,
        store: Store,
        section: Section,
        data: SentencePairs,
        *,
        length: int,
        seed: int,
        number: int,
    ):
        self.store, self.section, self.data, self.length = store, section, data, length
        _, chunks, pairs = data.data_order
        self._key = np.array([seed % 2**64, pairs << 56 | chunks << 48 | length], np.uint64)
        self._number = number
        self._cls, self._sep = _special_ids(store)
        self.plan = chunk_plan(store, section, chunk_options(data, length))
        self.rows, self.targets, self.most = self.plan.rows, len(self.plan.starts), self.plan.bins.most_items
        self._tokens = store.tokens
        self._sentences = sentence_starts(store, data.sentence_tokens)
        self._ending = 0 if store.end is None else 1
        self.random_parts = RandomParts(store, section, data.random_candidates, self._sentences)
        self._check()

    def fill(self, row: int, batch: PairBatch, b: int, epoch: int) -> None:
        """Write row `row` of an epoch into row b of a batch."""
        numbers = self._numbers(row, epoch)
        batch.mask_seeds[b] = numbers.seeds
        ids, types, positions, segments = batch.ids[b], batch.types[b], batch.positions[b], batch.segments[b]
        at = 0
        for k, pair in enumerate(self._pairs(row, numbers)):
            middle = at + pair.first_end - pair.first + 2
            end = middle + pair.second_end - pair.second + 1
            ids[at] = self._cls
            ids[at + 1 : middle - 1] = self._tokens[pair.first : pair.first_end]
            ids[middle - 1] = self._sep
            ids[middle : end - 1] = self._tokens[pair.second : pair.second_end]
            ids[end - 1] = self._sep
            types[middle:end] = 1
            positions[at:end] = np.arange(end - at)
            segments[at:end] = k + 1
            batch.firsts[b, k] = at
            batch.next_labels[b, k] = not pair.is_next
            batch.pair_weights[b, k] = 1
            at = end

    def origin(self, row: int, epoch: int) -> list[PairOrigin]:
        """Return the origins of the pairs of a row, in order."""
        place = functools.partial(self.store.origin, self.section)
        return [
            PairOrigin(
                place(pair.first, pair.first_end),
                place(pair.second, pair.second_end),
                pair.is_next,
                place(pair.chunk, pair.chunk_end),
            )
            for pair in self._pairs(row, self._numbers(row, epoch))
        ]

    def _numbers(self, row: int, epoch: int) -> RandomNumbers:
        copy = epoch if self.data.masks == "dynamic" else epoch % self.data.mask_copies
        return RandomNumbers(self._key, [0, row, copy, self._number])

    def _pairs(self, row: int, numbers: RandomNumbers) -> list[Pair]:
        return [self._pair(chunk, numbers) for chunk, _ in self.plan.bins.row(row)]

    def _pair(self, chunk: int, numbers: RandomNumbers) -> Pair:
        data, sentences = self.data, self._sentences
        start, tokens = int(self.plan.starts[chunk]), int(self.plan.tokens[chunk])
        end, most = start + tokens, min(tokens, self.plan.capacity)
        boundary, last = np.searchsorted(sentences, (start + 1, end)).tolist()
        alone = boundary == last
        random = numbers.below(1 << 32) < round(data.random_share * 2**32)
        if alone:
            middle = start + 1 + numbers.below(tokens - 1)
            random = random or data.one_sentence == "random"
        else:
            middle = int(sentences[boundary + numbers.below(last - boundary)])
        if not random:
            first, first_end, second, second_end = shortened(start, middle, middle, end, most, numbers)
        else:
            ends_within = alone and int(sentences[last]) - end > self._ending  # the sentence is longer than the chunk
            other = self.random_parts.take(
                start, end - middle, start + most - middle, numbers, begins_within=alone, ends_within=ends_within
            )
            first, first_end, second, second_end = shortened(start, middle, *other, most, numbers)
        return Pair(first, first_end, second, second_end, not random, start, end)

    def _check(self) -> None:
        where = f"{self.store.place}: source {self.section.source}"
        if not self.rows:
            raise InputError(
                f"{where} has no chunk of {SHORTEST} tokens to make a pair from; prepare the store without it"
            )
        if not self.data.random_share and self.data.one_sentence == "cut":
            return
        if not self.random_parts.documents:
            raise InputError(
                f"{where} is one document, but random second segments come from another; prepare the store from "
                "several (lines: separates documents at blank lines), or set data.random_share 0"
            )
        bounds = np.searchsorted(
            self._sentences, (self.section.first_token, self.section.first_token + self.section.tokens)
        )
        if int(bounds[1] - bounds[0]) <= self.section.documents:
            raise InputError(
                f"{where}: each of its {self.section.documents} documents is one sentence, so no sentence follows "
                "another; prepare it with --sentences split (or lines), or set data.random_share 0"
            )


def shortened(
    first: int, first_end: int, second: int, second_end: int, most: int, numbers: RandomNumbers
) -> tuple[int, int, int, int]:
    """Return two spans truncated to at most `most` tokens together, a token at a time at front or back of the longer.

    Of equal lengths, the second is truncated (create_pretraining_data.py:418-433). most: 2 or more.
    """
    a, b = first_end - first, second_end - second
    over = a + b - most
    if over <= 0:
        return first, first_end, second, second_end
    # Truncated to equal lengths first, then both in turn, the second one first.
    from_longer = min(over, abs(a - b))
    rest = over - from_longer
    from_a = (from_longer if a > b else 0) + rest // 2
    front_a, front_b = numbers.heads(from_a), numbers.heads(over - from_a)
    return first + front_a, first_end - (from_a - front_a), second + front_b, second_end - (over - from_a - front_b)


def chunk_options(data: SentencePairs, length: int) -> ChunkOptions:
    """Return the options of the chunk plan. Raises InputError if rows of `length` are too short for a pair."""
    if length < SPECIALS + SHORTEST:
        raise InputError(
            f"rows of pairs must have at least {SPECIALS + SHORTEST} slots (CLS A SEP B SEP), got {length}; give a "
            "larger length or data.short_length"
        )
    pairs_per_row = data.pairs_per_row or max(1, length // SLOTS_A_PAIR)
    shares = (data.short_target_share, data.short_target_drawn, data.chunks)
    return ChunkOptions(length, pairs_per_row, *shares, data.sentence_tokens)


def empty_pairs(rows: int, length: int, pairs: int) -> PairBatch:
    """Return a batch of padding, with segments and weights 0."""
    ids, types, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
    firsts, labels = (np.zeros((rows, pairs), np.int32) for _ in range(2))
    weights, seeds = np.zeros((rows, pairs), np.float32), np.zeros((rows, 2), np.uint32)
    return PairBatch(ids, types, positions, segments, firsts, labels, weights, seeds)


@functools.lru_cache(maxsize=64)
def mask_slots(length: int, pairs: int, rate: float = 0.15) -> int:
    """Return the maximum number of predicted tokens in a row of `length` with at most `pairs` pairs.

    A pair of n tokens, CLS and SEP included, has max(1, round(rate n)) (create_pretraining_data.py:369-370).
    """
    sizes = range(SPECIALS + SHORTEST, length + 1)
    most = np.zeros(length + 1, np.int64)  # by number of used slots
    for _ in range(min(pairs, length // (SPECIALS + SHORTEST))):
        grown = most.copy()
        for size in sizes:
            np.maximum(grown[size:], most[: length + 1 - size] + max(1, round(size * rate)), out=grown[size:])
        if (grown == most).all():
            break
        most = grown
    return int(most.max())


class PairStatistics(NamedTuple):
    """Statistics of the pairs of a run. pairs, rows: per epoch of all sections. most: maximum pairs per row.

    short, alone: fractions of chunks with a short target and of a single sentence. lost: tokens in no chunk, and so in
    no pair of any epoch. true, filled: fractions of true pairs and of non-padding slots in a sample of epoch 0.
    candidates: spans sampled per random second segment.
    """

    pairs: int
    rows: int
    most: int
    short: float
    alone: float
    lost: int
    true: float
    filled: float
    candidates: int

    def __str__(self) -> str:
        several = f"the closest in length of {self.candidates} spans"
        return (
            f"{self.pairs:,} pairs in {self.rows:,} rows per epoch, at most {self.most} per row; "
            f"{self.short:.1%} of them short, {self.true:.1%} true, {self.alone:.1%} of one sentence; "
            f"{self.filled:.1%} of slots filled, {self.lost:,} tokens in no pair; "
            f"a random second segment is {several if self.candidates > 1 else 'the first span found'}"
        )


def pair_statistics(rows: Sequence[object]) -> PairStatistics:
    """Return the statistics of the pairs of a run, from 1,024 rows of each section.

    rows: sources of the run's rows, all of them pairs.
    """
    sources = [source for source in rows if isinstance(source, Pairs)]
    pairs = sum(source.targets for source in sources)
    true = filled = 0.0
    for source in sources:
        chosen = np.unique(np.linspace(0, source.rows - 1, min(1024, source.rows)).astype(int))
        batch = empty_pairs(len(chosen), source.length, source.most)
        for b, row in enumerate(chosen.tolist()):
            source.fill(row, batch, b, 0)
        fraction = source.rows / sum(other.rows for other in sources)
        true += fraction * float(1 - batch.next_labels.sum() / batch.pair_weights.sum())
        filled += fraction * float((batch.segments > 0).mean())
    return PairStatistics(
        pairs=pairs,
        rows=sum(source.rows for source in sources),
        most=max(source.most for source in sources),
        short=sum(source.plan.short for source in sources) / pairs,
        alone=sum(source.plan.alone for source in sources) / pairs,
        lost=sum(source.plan.lost for source in sources),
        true=true,
        filled=filled,
        candidates=min(source.random_parts.candidates for source in sources),
    )


@functools.lru_cache(maxsize=64)
def _special_ids(store: Store) -> tuple[int, int]:
    tokenizer = store.tokenizer()
    missing = [role.upper() for role in ROLES if role not in tokenizer.specials]
    if missing:
        raise InputError(
            f"{store.place}: its vocabulary (kind {tokenizer.kind}) has no {', '.join(missing)}, which pairs and masks "
            "need; prepare it again with train-wordpiece:SIZE, train-sentencepiece:SIZE or a BERT vocabulary"
        )
    return tokenizer.specials["cls"], tokenizer.specials["sep"]
