"""Streams of sentences in two directions, for a bidirectional language model with a carry (ELMo).

Peters et al. (2018, section 3.4); allenai/bilm-tf, bilm/data.py:252-321 (`_get_batch`) and 466-494
(`BidirectionalLMDataset`). A sentence of the words w1 … wn has the inputs <S> w1 … wn and the targets w1 … wn </S>;
backward, it has the inputs </S> wn … w1 and the targets wn … w1 <S>. The next sentence follows in the same row, and the
model keeps its state. Each direction reads all sentences in an order of its own, which changes with the epoch. A line
break and the end of a document are no words.

A row of bilm-tf takes the next sentence of its reader whenever it needs one, so that a batch depends on all before it.
Here the sentences of an epoch, one after the other, are divided into one stream per row beforehand: any batch is had at
once, and the first sentence of a stream may be the rest of one that the stream before it begins.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.data.batch import Batch
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.store import RowOrigin, Store
from jaxlm.data.streams import FixedWindows
from jaxlm.errors import InputError
from jaxlm.text.characters import character_ids

if TYPE_CHECKING:
    from jaxlm.data.layouts.sentence_streams import SentenceStreams

_BLOCK = 1 << 22  # tokens that are searched at a time
_WORDS = 1 << 16  # words whose characters are computed at a time
_LINE_BREAK = "\n"


class StoreSentences:
    """Sentences of one store: those with words, in order. lengths: (sentences,) int32, number of words of each.

    characters: number of characters of a token, 0: none are read. Memory: 8 bytes per sentence, and 2 bytes per
    character of each different word (100 MB per million words of 50 characters).
    Raises InputError if the store keeps no sentences, or no spellings if characters are read.
    """

    def __init__(self, data: "SentenceStreams", store: Store, characters: int):
        if store.sentence_starts is None:
            raise InputError(
                f"{store.path} keeps no sentences, which data.layout {data.layout} reads; prepare it again with "
                "--sentences split (or lines)"
            )
        self.store, self._starts = store, np.asarray(store.sentence_starts)
        tokenizer = data.with_special_tokens(store.tokenizer())
        self._marks = tokenizer.specials["start"], tokenizer.specials["end"]
        self._unknown = tokenizer.unknown_word
        self._is_word, self._numbers, self.lengths = counted_words(store)
        self._characters = characters_of(store, characters) if characters else None
        self._mark_characters = character_ids(("<S>", "</S>"), characters) if characters else None

    def read(self, number: int, backward: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return ids (words + 2,) and characters (words + 2, C) of a sentence with its marks; None if none are read."""
        words = self.store.word_ids(*self._span(number))
        words = words[self._is_word[words]]
        ids = words if self._unknown is None else np.where(words < self.store.vocab_size, words, self._unknown)
        step = -1 if backward else 1
        ids = np.concatenate([self._marks[:1], ids, self._marks[1:]], dtype=np.int32)[::step]
        if self._characters is None or self._mark_characters is None:
            return ids, None
        first, last = self._mark_characters[:, None]
        return ids, np.concatenate([first, self._characters[words], last])[::step]

    def origin(self, number: int) -> RowOrigin:
        """Return the origin of a sentence."""
        first, end = self._span(number)
        section = next(s for s in self.store.sections if first < s.first_token + s.tokens)
        return self.store.origin(section, first, end)

    def _span(self, number: int) -> tuple[int, int]:
        own = int(self._numbers[number])
        return int(self._starts[own]), int(self._starts[own + 1])


@functools.lru_cache(maxsize=8)
def counted_words(store: Store) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which of a store's ids and words are words, and number and words of each sentence that has words.

    bool (num_types,), int32 (sentences,) and int32 (sentences,). The tokens of the store are read once.
    """
    is_word = np.array([word != _LINE_BREAK for word in store.spellings(0, store.num_types or store.vocab_size)])
    if store.end is not None:
        is_word[store.end] = False
    others = []
    for first in range(0, store.num_tokens, _BLOCK):
        ids = store.word_ids(first, min(first + _BLOCK, store.num_tokens))
        others.append(first + np.flatnonzero(~is_word[ids]))
    starts = np.asarray(store.sentence_starts)
    words = np.diff(starts) - np.diff(np.searchsorted(np.concatenate(others), starts))
    numbers = np.flatnonzero(words)
    return is_word, numbers.astype(np.int32), words[numbers].astype(np.int32)


@functools.lru_cache(maxsize=8)
def characters_of(store: Store, size: int) -> np.ndarray:
    """Return the characters of all words of a store, uint16 (num_types, size), computed once.

    Raises InputError if the store keeps no spellings.
    """
    if store.num_types is None:
        raise InputError(
            f"{store.path} keeps no spelling of words without an id, which characters are read from; prepare it again "
            "with --tokenizer words:SIZE"
        )
    found = np.empty((store.num_types, size), np.uint16)
    for first in range(0, store.num_types, _WORDS):
        end = min(first + _WORDS, store.num_types)
        found[first:end] = character_ids(store.spellings(first, end), size)
    return found


class Sentences:
    """Sentences of several stores. lengths: (sentences,) int32. targets: those of all sentences in one direction.

    characters: number of characters of a token, 0: none are read.
    """

    def __init__(self, data: "SentenceStreams", stores: Sequence[Store], characters: int = 0):
        self.characters = characters
        self._stores = [StoreSentences(data, store, characters) for store in stores]
        self.lengths = np.concatenate([np.zeros(0, np.int32), *(store.lengths for store in self._stores)])
        self._firsts = np.cumsum([0, *(len(store.lengths) for store in self._stores)])
        self.targets = int(self.lengths.sum(dtype=np.int64)) + len(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int, backward: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return ids and characters of a sentence; see `StoreSentences`."""
        store, own = self._place(number)
        return store.read(own, backward)

    def origin(self, number: int, backward: bool) -> RowOrigin:
        """Return the origin of a sentence. backward: True if it is read backward."""
        store, own = self._place(number)
        return replace(store.origin(own), backward=backward)

    def _place(self, number: int) -> tuple[StoreSentences, int]:
        store = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._stores[store], number - int(self._firsts[store])


class Direction:
    """Sentences one after the other, in an order, forward or backward.

    order: (sentences,), their numbers. Memory: 8 bytes per sentence, besides the order.
    """

    def __init__(self, sentences: Sentences, order: np.ndarray, backward: bool):
        self._sentences, self._order, self._backward = sentences, order, backward
        self._ends = np.cumsum(sentences.lengths[order] + 1, dtype=np.int64)  # of the targets of each sentence

    def fill(self, start: int, end: int, batch: Batch, b: int) -> None:
        """Write the inputs and targets `start` … `end` - 1 of all into row b of a batch, of the own direction."""
        rows = batch.backward if self._backward else batch
        at = 0
        for number, first, stop in self._parts(start, end):
            ids, characters = self._sentences.read(number, self._backward)
            slots = slice(at, at + stop - first)
            rows.ids[b, slots], rows.targets[b, slots] = ids[first:stop], ids[first + 1 : stop + 1]
            if characters is not None:
                rows.characters[b, slots] = characters[first:stop]
            at = slots.stop
        rows.positions[b, :at] = np.arange(at)
        rows.segments[b, :at] = 1
        rows.weights[b, :at] = 1

    def origins(self, start: int, end: int) -> list[RowOrigin]:
        """Return the origins of the sentences of these inputs, each whole."""
        return [self._sentences.origin(number, self._backward) for number, _, _ in self._parts(start, end)]

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the sentences of the inputs `start` … `end` - 1: number, first input and end within the sentence."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            number = int(self._order[place])
            begin = int(self._ends[place]) - int(self._sentences.lengths[number]) - 1
            stop = min(int(self._ends[place]), end)
            yield number, start - begin, stop - begin
            start, place = stop, place + 1


def shuffled(count: int, seed: int, version: int, epoch: int, backward: bool) -> np.ndarray:
    """Return the numbers below `count` in the order of an epoch and a direction, int32, or int64 from 2^31 on."""
    key = np.random.SeedSequence((seed % 2**64, version, epoch, int(backward))).generate_state(2, np.uint64)
    order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
    return order.astype(np.int32 if count < 1 << 31 else np.int64)


class SentenceStreamRows:
    """Endless rows of a run: row r belongs to stream r % batch_size.

    In each epoch, all sentences follow each other in a new order, with T targets in all. They are divided into
    B = batch_size streams of S = floor(T / (B L)) L targets; the rows of a stream are windows of L targets, one per
    step. The last T - B S targets are in no row of the epoch, and these are others in each epoch. The backward
    direction has the same sizes and an order of its own. `begins` is True in the first rows of an epoch. rows: number
    of rows per epoch. unused: number of targets in no row.

    Each order is made once per epoch. Memory: 12 bytes per sentence, direction and epoch that is read, those of
    `Sentences` and temporarily 24 bytes per sentence.
    Raises InputError if the text is too short for one row per stream.
    """

    def __init__(self, data: "SentenceStreams", reading: Reading):
        self._data, self._seed = data, reading.seed
        self.length, self.batch_size = reading.length, reading.batch_size
        self.sentences = Sentences(data, reading.stores, reading.characters)
        targets = self.sentences.targets
        if targets < self.length * self.batch_size:
            most = targets // self.length
            name, most, got = ("batch_size", most, self.batch_size) if most else ("length", targets, self.length)
            raise InputError(
                f"{name} must be at most {most} for {len(self.sentences):,} sentences of {targets:,} words and ends in "
                f"rows of {self.length}, got {got}; give a smaller one, or more text"
            )
        steps = targets // (self.batch_size * self.length)
        self._stream = steps * self.length
        self.windows = FixedWindows(self._stream, self.length)
        self.rows, self.unused = steps * self.batch_size, targets - self._stream * self.batch_size
        self._directions = functools.lru_cache(maxsize=2)(self._directions_of)  # two at the border of epochs

    def empty(self, rows: int) -> Batch:
        """Return a batch of padding, (rows, L)."""
        return self._data.empty(rows, self.length, (self.sentences,))

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows of these indices as one batch, (len(indices), L)."""
        batch = self.empty(len(indices))
        for b, index in enumerate(indices):
            epoch, start, first = self._place(int(index))
            batch.begins[b] = first
            for direction in self._directions(epoch):
                direction.fill(start, start + self.length, batch, b)
        return batch

    def origin(self, index: int) -> list[RowOrigin]:
        """Return the origins of the sentences of a row, each whole: those read forward, then those read backward."""
        epoch, start, _ = self._place(index)
        return [
            origin for direction in self._directions(epoch) for origin in direction.origins(start, start + self.length)
        ]

    def inputs(self, steps: int) -> int:
        """Return the inputs of one stream, in one direction, in the first `steps` steps."""
        return self.windows.inputs(steps)

    def description(self) -> str:
        """Return one line on the streams for logs."""
        return (
            f"{len(self.sentences):,} sentences in {self.batch_size} streams of {self._stream:,} words and ends in "
            f"each direction, {self.windows.per_epoch:,} steps per epoch; {self.unused:,} of them, others in each "
            "epoch, are in no row"
        )

    def _directions_of(self, epoch: int) -> tuple[Direction, Direction]:
        """Return the forward and the backward direction of an epoch."""
        version = self._data.data_order
        forward, backward = (shuffled(len(self.sentences), self._seed, version, epoch, way) for way in (False, True))
        return Direction(self.sentences, forward, False), Direction(self.sentences, backward, True)

    def _place(self, index: int) -> tuple[int, int, bool]:
        """Return the epoch of row `index`, its first input among all, and whether it is the first of its stream."""
        step, stream = divmod(index, self.batch_size)
        start, _ = self.windows.place(step)
        return step // self.windows.per_epoch, stream * self._stream + start, start == 0
