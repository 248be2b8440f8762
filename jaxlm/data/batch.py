"""Batches: rows of tokens, rows of sentence pairs, and labelled examples; and the random numbers of a row.

The loaders fill these with NumPy arrays; the loop turns them into global device arrays with sharded rows.
Letters: B rows or examples, C sequences per example (choices, or both orders of a pair), L length, P pairs per row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from jaxlm.text.characters import PADDING

Array = Any  # a NumPy array on the host, a jax.Array in the step


@struct.dataclass
class Batch:
    """Rows of text for a language model.

    ids, targets, positions, segments: int32 (B, L). targets[b, l] is the token that follows ids[b, l].
    segments number the documents of a row from 1; 0 is padding. positions restart with each segment.
    weights: float32 (B, L), 1 if the target counts, otherwise 0 (padding, the boundary between two segments).
    begins: bool (B,), True if the row begins with an empty carry: the first of its stream, and rows sampled with
    `reset_probability`. None unless rows continue those of the previous batch.
    mask_seeds: uint32 (B, 2), seeds of the masks of each row. None if the objective masks nothing.
    source, source_segments: int32 (B, S), what an encoder-decoder's encoder reads, and its segments, which are numbered
    like those of the row; None without an encoder, and without segments if each source is full.
    index: int32 (B,), the example's row in its split, -1 for padding. None but for the rows of a task.
    characters: int32 (B, L, C), those of each of `ids` (`jaxlm/text/characters.py`); of a word without an id, those of
    its own spelling. None unless they are asked for. backward: a Batch of the rows that the backward direction of a
    bidirectional language model reads, in the order in which it reads them; None unless the layout has two directions.
    """

    ids: Array
    targets: Array
    positions: Array
    segments: Array
    weights: Array
    begins: Array = None
    mask_seeds: Array = None
    source: Array = None
    source_segments: Array = None
    index: Array = None
    characters: Array = None
    backward: Any = None

    def fill_row(self, row: int, before: Any, targets: Array) -> None:
        """Write one segment into a row of padding: `targets`, each of which is predicted from the token before it.

        before: the token before the first one.
        """
        slots = len(targets)
        self.targets[row, :slots] = targets
        self.ids[row, 0], self.ids[row, 1:slots] = before, self.targets[row, : slots - 1]
        self.positions[row, :slots] = np.arange(slots)
        self.segments[row, :slots] = 1
        self.weights[row, :slots] = 1


def empty_batch(rows: int, length: int) -> Batch:
    """Return a batch of padding, with segments and weights 0."""
    ids, targets, positions, segments = (np.zeros((rows, length), np.int32) for _ in range(4))
    return Batch(ids, targets, positions, segments, np.zeros((rows, length), np.float32))


def with_characters(batch: Any, count: int) -> Any:
    """Return a `Batch` whose tokens, those of both directions if it has two, have `count` characters: padding."""
    backward = None if batch.backward is None else with_characters(batch.backward, count)
    characters = np.full((*batch.ids.shape, count), PADDING, np.int32)
    return dataclasses.replace(batch, characters=characters, backward=backward)


def random_text(rows: int, length: int, vocab_size: int) -> Batch:
    """Return a batch of full rows of random ids, each row one segment (None), for measurements."""
    ids = np.random.default_rng(0).integers(vocab_size, size=(rows, length + 1)).astype(np.int32)
    positions_BL = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return Batch(ids[:, :-1], ids[:, 1:], positions_BL, None, np.ones(positions_BL.shape, np.float32))


def mask_seeds(seed: int, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the seeds of the masks of rows, uint32 (B, 2), a function of the run's seed and the row index.

    An index names a row of an epoch, so masks differ between epochs.
    """
    return np.stack([np.random.SeedSequence((seed % 2**64, int(i))).generate_state(2) for i in indices])


@struct.dataclass
class PairBatch:
    """Rows of one or several sentence pairs for an encoder, each CLS A SEP B SEP (BERT, section 3.1).

    ids, types, positions, segments: int32 (B, L). ids are unmasked; the step applies the masks. types (token_type_ids)
    are 0 over CLS A SEP and 1 over B SEP. positions restart with each pair. segments number the pairs of a row from 1;
    0 is padding. firsts: int32 (B, P), the index of each pair's CLS. next_labels: int32 (B, P), 0 if B follows A in its
    document, 1 if B is random. pair_weights: float32 (B, P), 0 for an absent pair.
    mask_seeds: uint32 (B, 2), seeds of the masks of each row.
    """

    ids: Array
    types: Array
    positions: Array
    segments: Array
    firsts: Array
    next_labels: Array
    pair_weights: Array
    mask_seeds: Array


@struct.dataclass
class ExampleBatch:
    """Labelled examples of C token sequences each.

    ids: int32 (B, C, L), padded at the end. lengths: int32 (B, C), number of tokens of each sequence (0: absent).
    extract: int32 (B, C), index of the token whose state is the input of the head: the extract token, or CLS.
    second: int32 (B, C), index at which an encoder's second segment begins (the length if there is none).
    labels: int32 (B,) class or correct choice, float32 (B,) score, float32 (B, labels) 1 for each given label and else
    0, int32 (B, 2) first and last token of a span, or int32 (B, L) tag of each word at its first token (-1: none begins
    there).
    weights: float32 (B,), 0 for padding rows.
    index: int32 (B,), the example's row in its split, by which predictions are ordered (-1: padding).
    characters: int32 (B, C, L, characters), those of each token for models over words; None for all others.
    features: float32 (B, C, L, layers, D) each, of other models for each token; empty for models that read none.
    masked: int32 (B, C, L), `ids` with some words replaced by MASK, which the views of cross-view training read; None
    in labelled batches, and for views of whole sentences.
    """

    ids: Array
    lengths: Array
    extract: Array
    second: Array
    labels: Array
    weights: Array
    index: Array
    characters: Array = None
    features: tuple[Array, ...] = ()
    masked: Array = None


@struct.dataclass
class UnlabelledBatch(ExampleBatch):
    """Examples whose labels are not known: those of words that have a tag are 0."""


_WORDS = 16  # random words generated at a time


class RandomNumbers:
    """Random numbers of a row from Philox (Salmon et al., 2011), a function of a key and a counter.

    key: (2,) uint64. counter: four integers; the last three name the row. seeds: two 32-bit words for its masks.
    """

    def __init__(self, key: np.ndarray, counter: Sequence[int]):
        self._generator = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
        self._words = self._generator.random_raw(_WORDS).tolist()
        word = self._words.pop()
        self.seeds = (word & 0xFFFFFFFF, word >> 32)

    def below(self, count: int) -> int:
        """Return an integer from 0 to count - 1, uniform to within count / 2^64."""
        return (self._word() * count) >> 64

    def heads(self, tosses: int) -> int:
        """Return the number of heads in `tosses` fair coin tosses."""
        heads = 0
        while tosses > 0:
            heads += (self._word() >> max(0, 64 - tosses)).bit_count()
            tosses -= 64
        return heads

    def fractions(self, count: int) -> np.ndarray:
        """Return (count,) float64 in [0, 1), uniform multiples of 2^-53."""
        return (self._generator.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def _word(self) -> int:
        if not self._words:
            self._words = self._generator.random_raw(_WORDS).tolist()
        return self._words.pop()
