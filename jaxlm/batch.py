"""What a step is fed: one batch of rows of tokens, or one batch of labelled examples.

The loaders fill these with NumPy arrays; the loop turns them into global device arrays with the rows sharded.
Letters: B rows or examples, C sequences of one example (choices, or both orders of a pair), L length.
"""

from typing import Any

from flax import struct

Array = Any  # a NumPy array on the host, a jax.Array in the step


@struct.dataclass
class Batch:
    """Rows of text for a language model.

    ids, targets, positions, segments: int32 (B, L). targets[b, l] is the token that follows ids[b, l].
    segments number the documents of a row from 1; 0 is padding. positions restart with each segment.
    weights: float32 (B, L), 1 where the target counts and 0 elsewhere (padding, the border between two segments).
    """

    ids: Array
    targets: Array
    positions: Array
    segments: Array
    weights: Array


@struct.dataclass
class ExampleBatch:
    """Labelled examples, each of C token sequences.

    ids: int32 (B, C, L), padded at the end. lengths: int32 (B, C), the tokens of each sequence (0: an absent one).
    extract: int32 (B, C), the index of the extract token, whose state goes to the head.
    labels: int32 (B,) class or right choice, or float32 (B,) score. weights: float32 (B,), 0 for rows that only fill
    the batch. index: int32 (B,), the example's row in its split, so that predictions can be put in order (-1: filler).
    """

    ids: Array
    lengths: Array
    extract: Array
    labels: Array
    weights: Array
    index: Array
