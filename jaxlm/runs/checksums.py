"""One 32-bit checksum for each leaf of a tree of arrays, computed where the arrays live.

A checksum is the sum modulo 2**32 of mix(bits[i] + i * GOLDEN) over the elements i of the leaf, in row-major order of
the global array. The sum does not depend on the order of its terms, so every sharding, mesh and number of processes
gives the same value. `mix` and the odd multiplier are bijections: a single changed element is always detected, any
other change with probability 1 - 2**-32. Bits are compared, not values: -0.0 differs from 0.0 and a NaN equals itself.
`mix` is the finalizer of MurmurHash3 (Appleby, 2011).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.runs.trees import named_leaves

PyTree = Any
GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio, odd


def leaf_checksums(tree: PyTree) -> dict[str, int]:
    """Return the checksum of each leaf by its path, the same under every sharding.

    Leaves are arrays of bool, integers or floats of 8 to 64 bits, of any shape. Every process must call this function.
    Leaves are processed one at a time, and stacks layer by layer: on a CPU, where XLA does not fuse the operations, the
    temporary memory is that of one layer.
    """
    leaves = named_leaves(tree)
    checksum = _compiled(_replicated(leaves.values()))
    return {name: int(checksum(leaf)) for name, leaf in leaves.items()}


def _replicated(leaves) -> NamedSharding | None:
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


@functools.cache
def _compiled(out_sharding: NamedSharding | None):
    return jax.jit(_checksum, out_shardings=out_sharding)


def _checksum(leaf: jax.Array) -> jax.Array:
    if leaf.ndim < 3:
        return _mixed_sum(leaf, jnp.uint32(0))
    # The layers of a stack one at a time, so that the temporaries have the size of one layer.
    stride = jnp.uint32(GOLDEN * (leaf.size // max(1, leaf.shape[0])) % 2**32)

    def add(total: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _mixed_sum(layer[1], layer[0] * stride), None

    total, _ = jax.lax.scan(add, jnp.uint32(0), (jnp.arange(leaf.shape[0], dtype=jnp.uint32), leaf))
    return total


def _mixed_sum(leaf: jax.Array, start: jax.Array) -> jax.Array:
    """Return the sum over a leaf, or one layer of it, whose first element has the index `start` / GOLDEN."""
    bits = _bits(leaf)
    mixed = bits + start
    stride = GOLDEN
    for axis in reversed(range(bits.ndim)):
        mixed = mixed + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _bits(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}.get(leaf.dtype.itemsize)
    if unsigned is None or not (jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise TypeError(
            f"dtype must be bool, an integer or a float of 8 to 64 bits, got {leaf.dtype}; convert the array"
        )
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
