"""The dropout masks: their frequencies and independence, and what they do and do not depend on.

The references are the binomial distribution, the definition in the docstring of `jaxlm/nn/dropout_masks.py` in Python's
integers, and Threefry-2x32's published answers (Random123, `kat_vectors`).
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.dropout_masks import key_words, mask, micro_batch, threshold
from jaxlm.nn.layers import dropout, fold

SHAPE = (4, 4, 512, 512)
FAR = 4.8  # deviations: of a thousand normal values, one in a thousand times one lies beyond


def masked(key=0, shape=SHAPE, rate=0.1, **more) -> np.ndarray:
    return np.asarray(jax.jit(lambda key: mask(key, shape, rate, **more))(jax.random.key(key)))


def deviation(one: np.ndarray, other: np.ndarray, kept: float) -> float:
    """How many deviations the mean product of centred values is away from zero."""
    product = (one - kept) * (other - kept)
    return abs(product.mean()) / (kept * (1 - kept)) * math.sqrt(product.size)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_frequency_and_independence(rate):
    """Fails if neighbours, blocks of lanes, halves of a word, heads or rows share bits."""
    found = masked(rate=rate).astype(np.float32)
    kept = 1 - threshold(rate) / 65536
    assert abs(found.mean() - kept) < FAR * math.sqrt(kept * (1 - kept) / found.size)
    for lag in (1, 2, 16, 127, 128, 255, 256):
        pairs = {
            "queries": (found[:, :, lag:], found[:, :, :-lag]),
            "keys": (found[..., lag:], found[..., :-lag]),
            "diagonals": (found[:, :, lag:, lag:], found[:, :, :-lag, :-lag]),
            "other diagonals": (found[:, :, lag:, :-lag], found[:, :, :-lag, lag:]),
        }
        for name, pair in pairs.items():
            assert deviation(*pair, kept) < FAR, (name, lag)
    for axis, name in enumerate(("rows", "heads")):
        one, other = np.split(found, 2, axis)
        assert deviation(one, other, kept) < FAR, name


@pytest.mark.parametrize("changed", ["layer", "step", "seed", "next seed"])
def test_masks_of_other_keys_are_independent(changed):
    """Fails if keys that are made of neighbouring numbers give masks that are shifted or equal."""
    kept = 1 - threshold(0.1) / 65536

    def key(number: int) -> jax.Array:
        first = jax.random.key(7 + number if changed == "next seed" else 1000 * number if changed == "seed" else 7)
        return fold(fold(first, number if changed == "step" else 3), number if changed == "layer" else 5)

    one, other = (np.asarray(mask(key(number), SHAPE, 0.1), np.float32) for number in range(2))
    assert deviation(one, other, kept) < FAR
    for shift in (1, 2, 128):
        assert deviation(one[:, :, shift:], other[:, :, :-shift], kept) < FAR, shift
        assert deviation(one[..., shift:], other[..., :-shift], kept) < FAR, shift


def test_a_mask_is_what_the_definition_says():
    """In integers of Python. Fails if a constant, a shift, a half or the place of a row, head or key is another one."""

    def mixed(x: int, first: int, second: int, shifts: tuple[int, int, int]) -> int:
        x = (x ^ x >> shifts[0]) * first % 2**32
        x = (x ^ x >> shifts[1]) * second % 2**32
        return x ^ x >> shifts[2]

    shape, rate = (3, 2, 5, 300), 0.3
    words = np.asarray(key_words(jax.random.key(11), shape[:2])).tolist()
    found = masked(11, shape, rate)
    for row, head, place, column in itertools.product(range(3), range(2), range(5), (0, 1, 127, 128, 255, 256, 299)):
        k0, k1 = words[row][head]
        of_place = mixed((place + k0) % 2**32, 0x7FEB352D, 0x846CA68B, (16, 15, 16))
        of_place = mixed(of_place ^ k1, 0x85EBCA6B, 0xC2B2AE35, (16, 13, 16))
        number = 128 * (column // 256) + column % 128
        word = mixed((of_place + 0x9E3779B9 * number) % 2**32, 0x7FEB352D, 0x846CA68B, (16, 15, 16))
        bits = word >> 16 if column // 128 % 2 else word & 0xFFFF
        assert found[row, head, place, column] == (bits >= round(65536 * rate))


def test_key_words_are_threefry():
    """The answers are those of Random123's `kat_vectors` for threefry2x32, 20 rounds."""
    zero = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
    assert np.asarray(key_words(zero, (1, 1))).ravel().tolist() == [0x6B200159, 0x99BA4EFE]
    key = jax.random.wrap_key_data(jnp.array([0x13198A2E, 0x03707344], jnp.uint32), impl="threefry2x32")
    with micro_batch(0x243F6A88, 1, 1):
        words = key_words(key, (1, 2))
    assert words.shape == (1, 2, 2)


def test_micro_batches_blocks_and_devices_have_the_mask_of_the_whole():
    """Fails if a mask depends on how rows are split, on the rows of an example, or on a block's place."""
    whole = masked(rate=0.3, shape=(8, 4, 16, 300))
    for number, parts in itertools.product(range(2), (2, 4)):
        with micro_batch(number, parts, 8 // parts):
            np.testing.assert_array_equal(masked(rate=0.3, shape=(8 // parts, 4, 16, 300)), whole[number::parts])
    with micro_batch(1, 2, 2):  # two examples of two texts each
        texts = masked(rate=0.3, shape=(4, 4, 16, 300))
    np.testing.assert_array_equal(texts, whole[[2, 3, 6, 7]])
    np.testing.assert_array_equal(masked(rate=0.3, shape=(8, 4, 6, 300), first=10), whole[:, :, 10:])
    np.testing.assert_array_equal(masked(rate=0.3, shape=(8, 4, 16, 170)), whole[..., :170])
    for first in (0, 10):
        shared = masked(rate=0.3, shape=(8, 4, 6, 300), shared_axes=(2,), first=first)
        np.testing.assert_array_equal(shared, whole[:, :, :1])
    sharding = jax.sharding.NamedSharding(jax.make_mesh((4, 2), ("a", "b")), jax.P("a", "b"))
    sharded = jax.jit(lambda key: mask(key, whole.shape, 0.3), out_shardings=sharding)(jax.random.key(0))
    np.testing.assert_array_equal(sharded, whole)


def test_parameters_have_one_mask_in_all_micro_batches():
    """Fails if the mask of a table of words differs between the parts of a batch."""
    table = masked(shape=(40, 24), of_rows=False)
    with micro_batch(1, 2, 20):
        np.testing.assert_array_equal(masked(shape=(40, 24), of_rows=False), table)
        assert not np.array_equal(masked(shape=(40, 24)), table)


def test_gradients_have_the_mask_of_the_outputs():
    x = jnp.ones((4, 16, 32))
    gradient = jax.grad(lambda x: jnp.sum(dropout(x, 0.4, jax.random.key(2))))(x)
    np.testing.assert_array_equal(gradient, dropout(x, 0.4, jax.random.key(2)))
