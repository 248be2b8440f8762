"""Attention in one kernel for TPUs: which calls it takes, and the preparation of its arrays.

`jaxlm/nn/flash_kernel.py` has the arithmetic. Mosaic compiles it for TPUs; on a CPU it is interpreted. No TPU has run
it yet.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import current_spec
from jaxlm.nn.dropout_masks import LANES, key_words, threshold
from jaxlm.nn.flash_kernel import WHOLE, Arrays, Blocks, Call, flash
from jaxlm.nn.layers import WeightDropout, log_once

SUBLANES = 16  # rows of a register of 16-bit numbers: widths of heads are filled up to a multiple
WIDEST_HEAD = 256
FEWEST_QUERIES = LANES // 2  # they are filled up to LANES
_QUERIES = 2  # the axis of the weights along which one sample of dropout may serve all
_MIB = 2**20
_DEFAULT_MEMORY = 32  # MiB of vector memory that a kernel may use if its arrays do not need more


class Chip(NamedTuple):
    """A kind of TPU: its largest blocks, those of the compiler's fewest cycles for 512 tokens, and its vector memory.

    causal: small ones see fewer keys that the mask removes. bidirectional: large ones keep the matrix units busier.
    memory: in MiB.
    """

    causal: Blocks
    bidirectional: Blocks
    memory: int

    def blocks(self, causal: bool) -> Blocks:
        """Return the blocks of a call."""
        return self.causal if causal else self.bidirectional


_SMALL, _LARGE = Blocks(256, 256, 512), Blocks(512, 512, 512)
CHIPS = {
    "TPU v4": Chip(_SMALL, _SMALL, 16),
    "TPU v5 lite": Chip(_SMALL, _LARGE, 128),
    "TPU v5": Chip(_SMALL, _LARGE, 64),
    "TPU v6 lite": Chip(_SMALL, _LARGE, 128),
}
SAFE = Chip(_SMALL, _SMALL, 16)  # of a kind that is not in the table


class Distances(NamedTuple):
    """Scores by distance, for Transformer-XL: queries (B, H, L, K), and projected encodings (1, H, S, K).

    The encodings are those of the distances S - 1 down to 0, and the last query is at the last key.
    """

    q_BHLK: jax.Array
    encodings_1HSK: jax.Array


def flash_attention(
    q_BHLK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSK: jax.Array,
    *,
    causal: bool,
    segments_BL: jax.Array | None,
    key_segments_BS: jax.Array | None,
    bias_BHLS: jax.Array | None = None,
    scale: float,
    query_offset: int,
    drop: WeightDropout,
    distances: Distances | None = None,
    reach: int = 0,
) -> jax.Array:
    """Return the outputs (B, H, L, K); the arguments are those of `attend`. Interpreted on a CPU.

    distances: added to the products of queries and keys, before the scale. reach: a query sees the keys up to this
    number before its own; 0 for all. Lengths are filled up to the blocks, and heads to a multiple of SUBLANES. The
    kernel runs on one device: rows and heads are sharded explicitly, by the rules of the mesh in use.
    """
    (b, h, length, width), num_keys = q_BHLK.shape, k_BHSK.shape[2]
    needed = vector_memory(q_BHLK, num_keys, bias_BHLS is not None, distances is not None)
    dropped = drop.key is not None and drop.rate > 0
    call = Call(
        causal=causal,
        offset=query_offset,
        reach=reach,
        num_keys=num_keys,
        scale=scale,
        drops=threshold(drop.rate) if dropped else 0,
        first=drop.first,
        along_queries=bool(drop.shared_axes),
        blocks=_blocks(length, num_keys, causal),
        memory=min(_chip().memory, max(_DEFAULT_MEMORY, 2 * needed)),
        interpret=devices.platform() == "cpu",
    )
    fill_L, fill_S = _fill(length, num_keys)
    fill_K = -width % SUBLANES
    k_BHKS, v_BHKS = (_filled(x, fill_K, fill_S) for x in (k_BHSK, v_BHSK))
    arrays = Arrays(_filled(q_BHLK, fill_K, fill_L), k_BHKS, v_BHKS)
    if segments_BL is not None and key_segments_BS is not None:
        own, seen = (segments[:, :, None].astype(jnp.int32) for segments in (segments_BL, key_segments_BS))
        arrays = arrays._replace(own_B1L=_filled(own, 0, fill_L), seen_B1S=_filled(seen, 0, fill_S))
    if bias_BHLS is not None:
        rows, heads = bias_BHLS.shape[:2]
        bias_BHLS = jnp.broadcast_to(bias_BHLS, (rows, h if rows > 1 else heads, length, num_keys))
        arrays = arrays._replace(bias_BHSL=_filled(bias_BHLS.astype(jnp.float32), fill_S, fill_L))
    if distances is not None:
        queries_BHKL = _filled(distances.q_BHLK, fill_K, fill_L)
        columns_1HKC = _columns(distances.encodings_1HSK, call, length, fill_K)
        arrays = arrays._replace(distance_q_BHKL=queries_BHKL, distances_1HKC=columns_1HKC)
    if dropped:
        arrays = arrays._replace(words_BH2=key_words(drop.key, (b, h)))
    return jnp.swapaxes(_sharded(call, arrays)[:, :, :width, :length], 2, 3)


def _fill(length: int, num_keys: int) -> tuple[int, int]:
    """Return how many queries and keys fill the last block up."""
    return -length % LANES, -num_keys % (LANES if num_keys <= WHOLE else 2 * LANES)


def _blocks(length: int, num_keys: int, causal: bool) -> Blocks:
    """Return the blocks of a row: those of the chip, or for a long row the largest of these that divide it."""
    blocks, (fill_L, fill_S) = _chip().blocks(causal), _fill(length, num_keys)
    if num_keys <= WHOLE:
        return blocks

    def divisor(size: int, block: int, multiple: int) -> int:
        return max(part for part in range(multiple, block + 1, multiple) if size % part == 0)

    forward, backward = (divisor(length + fill_L, block, LANES) for block in (blocks.forward, blocks.backward))
    return Blocks(forward, backward, divisor(num_keys + fill_S, blocks.keys, 2 * LANES))


def _columns(encodings_1HSK: jax.Array, call: Call, length: int, fill_K: int) -> jax.Array:
    """Return the encodings by columns, see `Arrays`. A block of queries reads as many columns more than keys."""
    (fill_L, fill_S), blocks = _fill(length, call.num_keys), call.blocks
    after = fill_S + max(blocks.forward, blocks.backward) + (LANES - fill_L if fill_L else 0)
    after += 0 if call.num_keys <= WHOLE else blocks.keys
    return jnp.pad(jnp.swapaxes(encodings_1HSK, 2, 3), ((0, 0), (0, 0), (0, fill_K), (fill_L, after)))


def _sharded(call: Call, arrays: Arrays) -> jax.Array:
    """Run the kernel on each device's rows and heads."""
    spec = current_spec(("batch", "heads", None, None), arrays.q_BHKL.shape)
    if spec is None:
        return flash(call, arrays)

    def like(x: jax.Array) -> jax.sharding.PartitionSpec:  # axes of size 1 are whole
        axes = (axis if size > 1 else None for axis, size in zip(spec, x.shape[:2], strict=False))
        return jax.sharding.PartitionSpec(*axes, *(None,) * (x.ndim - 2))

    on_device = functools.partial(flash, call)
    return jax.shard_map(on_device, in_specs=(jax.tree.map(like, arrays),), out_specs=spec, check_vma=False)(arrays)


def _filled(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Return an array with its last two axes exchanged, and zeros after them."""
    x = jnp.swapaxes(x, -1, -2)
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, rows), (0, columns))) if rows or columns else x


def unsupported(
    q_BHLK: jax.Array, num_keys: int, query_offset: Any, drop: WeightDropout, bias: bool, distances: bool = False
) -> str | None:
    """Return why the kernel cannot do it; None if it can. bias, distances: True if these are added to the scores."""
    length, width = q_BHLK.shape[2:]
    if devices.platform() == "gpu":
        return "flash needs a TPU"
    if not isinstance(query_offset, int):
        return "flash does not support decoding with a cache"
    if length < FEWEST_QUERIES:
        return f"flash needs at least {FEWEST_QUERIES} queries per row, got {length}"
    if q_BHLK.dtype not in (jnp.float32, jnp.bfloat16):
        return f"flash needs float32 or bfloat16, got {q_BHLK.dtype}"
    if not 1 < width <= WIDEST_HEAD:
        return f"flash needs a head width from 2 to {WIDEST_HEAD}, got {width}"
    if drop.shared_axes not in ((), (_QUERIES,)):
        return "weights along other axes than the queries share a sample of dropout"
    needed, memory = vector_memory(q_BHLK, num_keys, bias, distances), _chip().memory
    if needed > memory:
        return (
            f"{length} queries, {num_keys} keys and heads of {width} need {needed} MiB of vector memory, and the chip "
            f"has {memory}"
        )
    return None


def vector_memory(q_BHLK: jax.Array, num_keys: int, bias: bool, distances: bool) -> int:
    """Return the MiB of vector memory of the backward pass, which needs more than the forward pass; rounded up.

    Inputs and outputs are held twice, those of a grid step and of its neighbour: queries, outputs, keys and values with
    their gradients. Three sums are held in float32, and seven arrays of the size of a block's scores.
    """
    (length, width), itemsize, blocks = q_BHLK.shape[2:], q_BHLK.dtype.itemsize, _chip().bidirectional
    arrays = 2 * 4 * (length + num_keys) * width * itemsize + (2 * num_keys + length) * width * 4
    scores = 7 * blocks.backward * (num_keys if num_keys <= WHOLE else blocks.keys) * 4
    if bias:  # and its gradient
        arrays += 2 * 2 * num_keys * length * 4
    if distances:  # queries and encodings, with their gradients, and another sum
        arrays += 2 * 2 * length * width * itemsize + (2 * (itemsize + 4) * num_keys + 4 * length) * width
        scores *= 2
    return math.ceil((arrays + scores) / _MIB)


def _chip() -> Chip:
    kind = devices.kind()
    if kind not in CHIPS and devices.platform() == "tpu":
        log_once(f"flash attention has no blocks for {kind or 'this TPU'}: {SAFE.causal} are used")
    return CHIPS.get(kind, SAFE)
