"""Dropout masks: one definition for all layers, backends and devices.

Whether an element is dropped is a function of a key, of its row in the global batch, and of its place in the row. It
does not depend on the mesh, on the number of processes and micro-batches, or on the blocks in which a kernel works.
Everything is arithmetic on uint32, so that XLA computes a mask where it is used instead of storing it, and a kernel can
compute the same one.

A row, and each index on further leading axes, as that of a head, has two key words, one block of Threefry-2x32
(Salmon et al., 2011). A hash of them, of the position l on the last axis but one and of the position s on the last axis
gives 32 bits for two elements 128 positions apart:

    r = fmix32(lowbias32(l + k0) ^ k1)
    w = lowbias32(r + 0x9E3779B9 · (128 ⌊s / 256⌋ + s mod 128))

An element whose s has an even ⌊s / 128⌋ takes the lower half of w, the others the upper one, and it is dropped if its
16 bits are below round(2¹⁶ · rate). The two elements of a word are 128 lanes apart, so that a TPU moves no data between
lanes. lowbias32 is the hash of C. Wellons' "hash prospector", fmix32 the finalizer of MurmurHash3. With one
multiplication less, or Threefry with 8 rounds, neighbours are correlated; keys that count instead of Threefry's words
shift a mask by a position.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxlm.nn.config import STEPS

LANES = 128  # elements between the two that share a word
_GOLDEN = 0x9E3779B9

# (number, parts, rows) of the micro-batch whose loss is traced; None for a whole batch.
_micro_batch: contextvars.ContextVar[tuple[Any, int, int] | None] = contextvars.ContextVar("micro_batch", default=None)


@contextlib.contextmanager
def micro_batch(number: Any, parts: int, rows: int) -> Iterator[None]:
    """While a loss is traced: its row r is row number + parts · r of the global batch, see `split_rows` of the step.

    number: may be traced. rows: those of the micro-batch. Where arrays have several rows for each, as those of tasks
    with several texts, these follow each other.
    """
    token = _micro_batch.set((number, parts, rows))
    try:
        yield
    finally:
        _micro_batch.reset(token)


def _global_rows(count: int) -> jax.Array:
    """Return the numbers in the global batch of the rows of an array, uint32 (count,)."""
    rows = jnp.arange(count, dtype=jnp.uint32)
    if (part := _micro_batch.get()) is None:
        return rows
    number, parts, size = part
    each = np.uint32(max(1, count // size))
    return (jnp.asarray(number, jnp.uint32) + np.uint32(parts) * (rows // each)) * each + rows % each


def threshold(rate: float) -> int:
    """Return the number of 16-bit values, the lowest ones, that drop an element."""
    return round(rate * STEPS)


def key_words(key: jax.Array, leading: Sequence[int], *, of_rows: bool = True) -> jax.Array:
    """Return the key words of each index on leading axes, uint32 (*leading, 2).

    The first axis are the rows of a batch; with of_rows False it is an axis like the others. key: a typed key of
    Threefry, without axes.
    """
    shape = tuple(leading)
    count, size = shape[0] if shape else 1, math.prod(shape[1:])
    rows = _global_rows(count) if of_rows else jnp.arange(count, dtype=jnp.uint32)
    k0, k1 = jax.random.key_data(key)
    counts = (rows[:, None], jnp.arange(size, dtype=jnp.uint32)[None])
    words = threefry2x32_p.bind(*(jnp.broadcast_to(x, (count, size)) for x in (k0, k1, *counts)))
    return jnp.stack(words, axis=-1).reshape(*shape, 2)


def keeps(words: jax.Array, places: Any, columns: Any, drops: int) -> jax.Array:
    """Return True for the elements that are kept, bool (..., L, S).

    words: uint32 (..., 2), those of `key_words`. places: (L,), the positions on the last axis but one. columns: (S,),
    those on the last axis. drops: see `threshold`.
    """
    places, columns = jnp.asarray(places, jnp.uint32), jnp.asarray(columns, jnp.uint32)
    of_place = hash_of_places(words[..., 0, None], words[..., 1, None], places)[..., None]
    number = LANES * (columns // (2 * LANES)) + columns % LANES
    half = (columns // LANES) % 2
    bits = (hash_of_words(of_place, number) >> (16 * half)) & np.uint32(0xFFFF)
    return bits >= np.uint32(drops)


def hash_of_places(k0: Any, k1: Any, places: jax.Array) -> jax.Array:
    """Return r, the hash of positions on the last axis but one, uint32. k0, k1: the key words of their row."""
    return _fmix32(_lowbias32(places + k0) ^ k1)


def hash_of_words(of_place: jax.Array, number: jax.Array) -> jax.Array:
    """Return w, 32 bits for two elements, uint32. of_place: `hash_of_places`. number: 128 ⌊s / 256⌋ + s mod 128."""
    return _lowbias32(of_place + np.uint32(_GOLDEN) * number)


def mask(
    key: jax.Array,
    shape: Sequence[int],
    rate: float,
    *,
    shared_axes: Sequence[int] = (),
    first: int = 0,
    of_rows: bool = True,
) -> jax.Array:
    """Return True for the elements of an array that dropout keeps, bool, of `shape` with 1 for each shared axis.

    shape: (rows, ..., positions, width), (rows, width) or, with of_rows False, that of a parameter. shared_axes: axes
    along which all elements share one sample. first: the position of the first one, in a block of positions.
    """
    own = [1 if axis in shared_axes else size for axis, size in enumerate(shape)]
    *leading, length, width = own if len(own) > 2 or not of_rows else (own[0], 1, own[1])
    words = key_words(key, leading, of_rows=of_rows)
    begin = 0 if len(shape) - 2 in shared_axes else first
    places = begin + jnp.arange(length, dtype=jnp.uint32)  # a table of words has many: no constant of the program
    return keeps(words, places, np.arange(width, dtype=np.uint32), threshold(rate)).reshape(own)


def _lowbias32(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _fmix32(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
