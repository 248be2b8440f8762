"""Dropout from half-width random numbers.

Generating the bits is the most expensive part of dropout on a CPU (a fifth of a small model's step). One 32-bit draw
serves two elements: the rate is met to within 1 / 65,536. Keys are threefry's, whose bits are the same on any mesh.
"""

import jax
import jax.numpy as jnp

from jaxlm.errors import InputError

STEPS = 1 << 16  # number of steps between rates of 0 and 1


def check_rate(name: str, rate: float) -> None:
    """Raise InputError for a rate that is not a probability, or so high that every element would be dropped."""
    if not 0.0 <= rate < 1.0 or round(rate * STEPS) == STEPS:
        raise InputError(f"{name} must be a number from 0 to {1 - 1 / STEPS:.5f}, got {rate}; choose another rate")


def dropout(x: jax.Array, rate: float, key: jax.Array | None, *, shared_axes: tuple[int, ...] = ()) -> jax.Array:
    """Zero each element with probability `rate` and scale the rest by 1 / (1 - rate); `key` None keeps `x` as it is.

    Along `shared_axes` all elements share one draw.
    """
    if key is None or rate == 0.0:
        return x
    shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(x.shape))
    threshold = round(rate * STEPS)  # an element is dropped if its 16 bits are below
    keep = random_halves(key, shape) >= jnp.uint16(threshold)
    return jnp.where(keep, x * jnp.asarray(STEPS / (STEPS - threshold), x.dtype), jnp.zeros((), x.dtype))


def fold(key: jax.Array | None, number: int) -> jax.Array | None:
    """Return the key for use number `number` of `key`; None stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def random_halves(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uniform uint16 of `shape`, two per 32-bit draw if the last axis is even: its halves, low and high."""
    if not shape or shape[-1] % 2:
        return jax.random.bits(key, shape, jnp.uint16)
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint32)
    return jnp.concatenate([words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)], axis=-1)
