"""What a step is fed: one batch of rows of tokens, of rows of sentence pairs, or of labelled examples.

The loaders fill these with NumPy arrays; the loop turns them into global device arrays with the rows sharded.
Letters: B rows or examples, C sequences of one example (choices, or both orders of a pair), L length, P pairs in a row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

Array = Any  # a NumPy array on the host, a jax.Array in the step


@struct.dataclass
class Batch:
    """Rows of text for a language model.

    ids, targets, positions, segments: int32 (B, L). targets[b, l] is the token that follows ids[b, l].
    segments number the documents of a row from 1; 0 is padding. positions restart with each segment.
    weights: float32 (B, L), 1 where the target counts and 0 elsewhere (padding, the border between two segments).
    begins: of streams, bool (B,), True where the row is the first of its stream, so that a state carried from the
    batch before must be empty. None in other layouts.
    mask_seeds: uint32 (B, 2), from which a row's masks are drawn; None where the objective masks nothing.
    """

    ids: Array
    targets: Array
    positions: Array
    segments: Array
    weights: Array
    begins: Array = None
    mask_seeds: Array = None


def mask_seeds(seed: int, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the seeds of the masks of rows, uint32 (B, 2): a function of the run's seed and the index of the row.

    An index names a row of an epoch, so that other masks are drawn in every epoch.
    """
    return np.stack([np.random.SeedSequence((seed % 2**64, int(i))).generate_state(2) for i in indices])


@struct.dataclass
class PairBatch:
    """Rows of sentence pairs for an encoder, one or several to a row: CLS A SEP B SEP each (BERT, section 3.1).

    ids, types, positions, segments: int32 (B, L). ids are the text's own, masks are made in the step. types are 0 over
    CLS A SEP and 1 over B SEP; positions restart with each pair; segments number the pairs of a row from 1, 0 is
    padding. firsts: int32 (B, P), the index of each pair's CLS. next_labels: int32 (B, P), 0 where B follows A in its
    document, 1 where it is from elsewhere. pair_weights: float32 (B, P), 0 for a pair that is not there.
    mask_seeds: uint32 (B, 2), from which a row's masks are drawn.
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
    """Labelled examples, each of C token sequences.

    ids: int32 (B, C, L), padded at the end. lengths: int32 (B, C), the tokens of each sequence (0: an absent one).
    extract: int32 (B, C), the index of the token whose state goes to the head: the extract token, an encoder's CLS.
    second: int32 (B, C), the index at which an encoder's second segment begins (the length where there is none).
    labels: int32 (B,) class or right choice, float32 (B,) score, int32 (B, 2) first and last token of a span, or int32
    (B, L) tag of each token (-1: no tag is asked for). weights: float32 (B,), 0 for rows that only fill the batch.
    index: int32 (B,), the example's row in its split, so that predictions can be put in order (-1: filler).
    """

    ids: Array
    lengths: Array
    extract: Array
    second: Array
    labels: Array
    weights: Array
    index: Array
