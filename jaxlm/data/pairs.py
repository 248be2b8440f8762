"""Sentence pairs: what a chunk of a document gives in an epoch, drawn from (seed, section, epoch, row).

Devlin et al. (2019, sections 3.1 and A.2); google-research/bert, create_pretraining_data.py:223-433. A chunk's
sentences are parted at a random border: A before it, B after it or, half of the time, from a random other document.
What is over the longest that a row takes is cut from the longer side, a token at a time, from its front or its back
with equal chances. Where this differs from the original code:

- A random B is nearly as long as what it stands in for: of several stretches of whole sentences the longest that fits,
  or, where the chunk is longer than a row, the one that reaches its end with the least over it, cut in the same way
  (`random_parts`). In the original it is the first stretch that reaches a target length. So it has a length of its own,
  and a row cannot be packed before it is drawn; in documents of a few sentences that length tells true pairs from
  random ones (an AUC of 0.66 in documents of 2 or 3 sentences, 0.60 in those of 2 to 6, 0.52 in books).
- The part of a chunk that a random B stands in for is in no pair of that epoch. The original puts these sentences back,
  and the next chunk begins with them.
- A chunk of one sentence is parted at a random token, and a random B beside it begins within a sentence too, and ends
  within one where the sentence goes on beyond the chunk; "A and B are spans of text, not sentences" (section 3). The
  original makes it a random pair always, which is a choice here.
- The other document is another one. The original tries ten times, and then takes what it has.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlm.data.batch import PairBatch
from jaxlm.data.chunks import SHORTEST, SPECIALS, ChunkOptions, chunk_plan
from jaxlm.data.config import SentencePairs
from jaxlm.data.draws import Draws
from jaxlm.data.origin import PairOrigin, RowOrigin
from jaxlm.data.random_parts import RandomParts
from jaxlm.data.store import Section, Store
from jaxlm.data.versions import DataVersions
from jaxlm.errors import InputError

# One pair for so many slots, the most in a row where the config does not say.
SLOTS_A_PAIR = 16

ROLES = ("cls", "sep", "mask")


class Pair(NamedTuple):
    """Two stretches of a store's tokens, [first, first_end) and [second, second_end), of chunk [chunk, chunk_end)."""

    first: int
    first_end: int
    second: int
    second_end: int
    is_next: bool
    chunk: int
    chunk_end: int


class Pairs:
    """The rows of a section in pairs. rows: how many in an epoch. most: the most pairs that a row has.

    random_parts: where the second parts of random pairs are from. number: which section of a run it is. versions: those
    of the run. Raises InputError where there is nothing to make pairs of.
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
        versions: DataVersions,
    ):
        self.store, self.section, self.data, self.length = store, section, data, length
        self._key = np.array([seed % 2**64, versions.pairs << 56 | versions.chunks << 48 | length], np.uint64)
        self._number = number
        self._cls, self._sep = _special_ids(store)
        self.plan = chunk_plan(store, section, chunk_options(data, length))
        self.rows, self.most = self.plan.rows, self.plan.bins.most_items
        self._tokens, self._documents = store.tokens, np.asarray(store.document_starts)
        self._sentences = np.asarray(store.sentence_starts)
        self._ending = 0 if store.end is None else 1
        self.random_parts = RandomParts(store, section, 1 if versions.pairs == 1 else data.random_candidates)
        self._check()

    def fill(self, row: int, batch: PairBatch, b: int, epoch: int) -> None:
        """Write row `row` of an epoch into row b of a batch."""
        draws = self._draws(row, epoch)
        batch.mask_seeds[b] = draws.seeds
        ids, types, positions, segments = batch.ids[b], batch.types[b], batch.positions[b], batch.segments[b]
        at = 0
        for k, pair in enumerate(self._pairs(row, draws)):
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
        """Where the pairs of a row came from, in their order."""
        return [
            PairOrigin(
                self._place(pair.first, pair.first_end),
                self._place(pair.second, pair.second_end),
                pair.is_next,
                self._place(pair.chunk, pair.chunk_end),
            )
            for pair in self._pairs(row, self._draws(row, epoch))
        ]

    def _place(self, start: int, end: int) -> RowOrigin:
        document = int(np.searchsorted(self._documents, start, side="right")) - 1
        offset = start - int(self._documents[document])
        return RowOrigin(str(self.store.path), self.section.source, document, offset, end - start)

    def _draws(self, row: int, epoch: int) -> Draws:
        copy = epoch if self.data.masks == "dynamic" else epoch % self.data.mask_copies
        return Draws(self._key, [0, row, copy, self._number])

    def _pairs(self, row: int, draws: Draws) -> list[Pair]:
        return [self._pair(chunk, draws) for chunk, _ in self.plan.bins.row(row)]

    def _pair(self, chunk: int, draws: Draws) -> Pair:
        data, sentences = self.data, self._sentences
        start, tokens = int(self.plan.starts[chunk]), int(self.plan.tokens[chunk])
        end, most = start + tokens, min(tokens, self.plan.capacity)
        border, last = np.searchsorted(sentences, (start + 1, end)).tolist()
        alone = border == last
        random = draws.below(1 << 32) < round(data.random_share * 2**32)
        if alone:
            middle = start + 1 + draws.below(tokens - 1)
            random = random or data.one_sentence == "random"
        else:
            middle = int(sentences[border + draws.below(last - border)])
        if not random:
            first, first_end, second, second_end = shortened(start, middle, middle, end, most, draws)
        else:
            ends_within = alone and int(sentences[last]) - end > self._ending  # a sentence longer than the chunk
            other = self.random_parts.take(
                start, end - middle, start + most - middle, draws, begins_within=alone, ends_within=ends_within
            )
            first, first_end, second, second_end = shortened(start, middle, *other, most, draws)
        return Pair(first, first_end, second, second_end, not random, start, end)

    def _check(self) -> None:
        where = f"{self.store.path}: source {self.section.source}"
        if not self.rows:
            raise InputError(
                f"{where} has no stretch of {SHORTEST} tokens to make pairs of; prepare the store without it"
            )
        if not self.data.random_share and self.data.one_sentence == "cut":
            return
        if not self.random_parts.documents:
            raise InputError(
                f"{where} is one document, and a random second sentence is from another: prepare the store from "
                "several (lines: takes blank lines for borders), or set data.random_share 0"
            )
        borders = np.searchsorted(
            self._sentences, (self.section.first_token, self.section.first_token + self.section.tokens)
        )
        if int(borders[1] - borders[0]) <= self.section.documents:
            raise InputError(
                f"{where}: each of its {self.section.documents} documents is one sentence, so that none follows "
                "another: prepare it with --sentences split (or lines), or set data.random_share 0"
            )


def shortened(
    first: int, first_end: int, second: int, second_end: int, most: int, draws: Draws
) -> tuple[int, int, int, int]:
    """Two stretches with `most` tokens together at most: the longer one loses a token, at its front or back, and again.

    Where both are as long the second one does (create_pretraining_data.py:418-433). most: 2 or more.
    """
    a, b = first_end - first, second_end - second
    over = a + b - most
    if over <= 0:
        return first, first_end, second, second_end
    # Taken down to the other's length first, then from both in turn, the second one first.
    from_longer = min(over, abs(a - b))
    rest = over - from_longer
    from_a = (from_longer if a > b else 0) + rest // 2
    front_a, front_b = draws.heads(from_a), draws.heads(over - from_a)
    return first + front_a, first_end - (from_a - front_a), second + front_b, second_end - (over - from_a - front_b)


def chunk_options(data: SentencePairs, length: int) -> ChunkOptions:
    """What the plan of chunks and rows of `length` depends on. InputError where a row is too short for a pair."""
    if length < SPECIALS + SHORTEST:
        raise InputError(
            f"rows of {length} are too short for pairs: CLS A SEP B SEP takes {SPECIALS + SHORTEST} slots at least"
        )
    pairs_per_row = data.pairs_per_row or max(1, length // SLOTS_A_PAIR)
    return ChunkOptions(length, pairs_per_row, data.short_target_share, data.short_target_drawn, data.chunks)


def empty_pairs(rows: int, length: int, pairs: int) -> PairBatch:
    """Padding everywhere: segment 0, weight 0."""
    ids, types, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
    firsts, labels = (np.zeros((rows, pairs), np.int32) for _ in range(2))
    weights, seeds = np.zeros((rows, pairs), np.float32), np.zeros((rows, 2), np.uint32)
    return PairBatch(ids, types, positions, segments, firsts, labels, weights, seeds)


@functools.lru_cache(maxsize=64)
def mask_slots(length: int, pairs: int, rate: float = 0.15) -> int:
    """The most tokens that are predicted of a row of `length` with at most `pairs` pairs.

    Of a pair of n tokens, CLS and SEP counted, they are max(1, round(rate n)) (create_pretraining_data.py:369-370).
    """
    sizes = range(SPECIALS + SHORTEST, length + 1)
    most = np.zeros(length + 1, np.int64)  # by the slots that are taken
    for _ in range(min(pairs, length // (SPECIALS + SHORTEST))):
        grown = most.copy()
        for size in sizes:
            np.maximum(grown[size:], most[: length + 1 - size] + max(1, round(size * rate)), out=grown[size:])
        if (grown == most).all():
            break
        most = grown
    return int(most.max())


class PairFigures(NamedTuple):
    """What pairs a run sees. pairs, rows: in an epoch of all sections. short: the share of chunks with a short target.

    true, filled: shares of true pairs and of slots that are no padding, counted in some rows of epoch 0. candidates:
    the stretches that are drawn for a random second part. alone: the share of chunks of a single sentence. lost: tokens
    in no chunk, and so in no pair of any epoch.
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
        several = f"the nearest in length of {self.candidates} stretches"
        return (
            f"{self.pairs:,} pairs in {self.rows:,} rows an epoch, at most {self.most} a row; "
            f"{self.short:.1%} of them short, {self.true:.1%} true, {self.alone:.1%} of one sentence; "
            f"{self.filled:.1%} of slots filled, {self.lost:,} tokens in no pair; "
            f"a random second part is {several if self.candidates > 1 else 'the first stretch found'}"
        )


def pair_figures(rows: Sequence[object], sample: int = 1024) -> PairFigures:
    """The shares of true pairs, short pairs and filled slots; see PairFigures. sample: rows counted a section.

    rows: the sources of a run's rows, all of them pairs.
    """
    sources = [source for source in rows if isinstance(source, Pairs)]
    pairs = sum(len(source.plan.starts) for source in sources)
    true = filled = 0.0
    for source in sources:
        chosen = np.unique(np.linspace(0, source.rows - 1, min(sample, source.rows)).astype(int))
        batch = empty_pairs(len(chosen), source.length, source.most)
        for b, row in enumerate(chosen.tolist()):
            source.fill(row, batch, b, 0)
        share = source.rows / sum(other.rows for other in sources)
        true += share * float(1 - batch.next_labels.sum() / batch.pair_weights.sum())
        filled += share * float((batch.segments > 0).mean())
    return PairFigures(
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
            f"{store.path}: its vocabulary (kind {tokenizer.kind}) has no {', '.join(missing)}, which pairs and masks "
            "need: prepare it again with train-wordpiece:SIZE, train-sentencepiece:SIZE or a BERT vocabulary"
        )
    return tokenizer.specials["cls"], tokenizer.specials["sep"]
