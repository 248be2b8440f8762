"""The kernel of `jaxlm/nn/flash_attention.py`: attention on one device, forward and backward, in Pallas.

The scores of a block of queries stay in a chip's vector memory, in the manner of FlashAttention (Dao et al., 2022).
Queries, keys, values and outputs of a head are read as (K, L), and scores as (keys, queries): the softmax then reduces
along sublanes, which needs no movement between lanes, and a head of 64 does not fill half of the lanes.

A grid step is one head of one row. Up to `WHOLE` keys a block of queries sees all its keys at once, from the first to
the last that its queries may see. Longer rows are read in blocks of keys, with a running maximum. For the backward pass
one number per query is kept, the logarithm of the sum of its exponentials, and the backward pass computes the weights
again. Which weights are dropped is computed again too, by `jaxlm/nn/dropout_masks.py`, as every other backend does.

Relative positions (Dai et al., 2019, section 3.3) add scores by distance. A block of them is a product with all
distances between its queries and keys, and the part of a query begins one place earlier than that of the query before.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxlm.nn.config import STEPS
from jaxlm.nn.dropout_masks import LANES, hash_of_places, hash_of_words
from jaxlm.nn.layers import MASKED, SAVED

WHOLE = 1024  # keys that a block of queries sees at once
_SEEN = MASKED / 2  # a maximum below it is that of a query without a visible key
_ROWS = 8  # sublanes of a register: a rotation by a multiple of it moves whole registers
_SUMS = ("dbias", "ddistances")  # outputs to which several grid steps may add


class Blocks(NamedTuple):
    """Queries of a block in the forward and in the backward pass, and keys of a block of a long row."""

    forward: int
    backward: int
    keys: int


class Arrays(NamedTuple):
    """The inputs of a kernel. L and S are multiples of LANES, and of the blocks where S is above `WHOLE`.

    own_B1L, seen_B1S: segments of queries and keys, int32; a query sees the keys of its segment. bias_BHSL: float32,
    added to the scaled scores; B and H may be 1. words_BH2: those of `key_words`, for dropout. distance_q_BHKL,
    distances_1HKC: queries and encodings, whose products are added to those of queries and keys. The column of query l
    and key s is s + L - 1 - l.
    """

    q_BHKL: jax.Array
    k_BHKS: jax.Array
    v_BHKS: jax.Array
    own_B1L: jax.Array | None = None
    seen_B1S: jax.Array | None = None
    bias_BHSL: jax.Array | None = None
    words_BH2: jax.Array | None = None
    distance_q_BHKL: jax.Array | None = None
    distances_1HKC: jax.Array | None = None


class Call(NamedTuple):
    """The constants of a kernel, which decide it beside its arrays.

    causal: query l sees the keys up to l + offset. reach: and no more than that many before this one; 0 for all.
    num_keys: the keys without those that fill up the last block. drops: see `threshold`; 0 for no dropout. first: the
    position of the first query. along_queries: one sample of dropout serves all queries. memory: the limit of the
    vector memory in MiB.
    """

    causal: bool
    offset: int
    reach: int
    num_keys: int
    scale: float
    drops: int
    first: int
    along_queries: bool
    blocks: Blocks
    memory: int
    interpret: bool

    @property
    def kept(self) -> float:
        """The factor of the weights that are kept."""
        return STEPS / (STEPS - self.drops)

    def keys_seen(self, last: int, num_keys: int, multiple: int) -> int:
        """Return how many keys the queries up to the last one see, rounded up to a multiple; at least one multiple."""
        end = min(num_keys, last + 1 + self.offset) if self.causal else num_keys
        return max(multiple, -(-end // multiple) * multiple)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(call: Call, arrays: Arrays) -> jax.Array:
    """Return the outputs (B, H, K, L), in the dtype of the queries. A query that sees no key has zeros."""
    return _forward(call, arrays)[0]


def _flash_forward(call: Call, arrays: Arrays) -> tuple[jax.Array, tuple]:
    o_BHKL, sums_BH1L = (checkpoint_name(x, SAVED) for x in _forward(call, arrays))
    return o_BHKL, (arrays, o_BHKL, sums_BH1L)


def _flash_backward(call: Call, saved: tuple, do_BHKL: jax.Array) -> tuple[Arrays]:
    arrays, o_BHKL, sums_BH1L = saved
    (_, _, width, length), num_keys = arrays.q_BHKL.shape, arrays.k_BHKS.shape[3]
    given = {
        "dq": arrays.q_BHKL,
        "dk": arrays.k_BHKS,
        "dv": arrays.v_BHKS,
        "dbias": arrays.bias_BHSL,
        "ddistance_q": arrays.distance_q_BHKL,
        "ddistances": arrays.distances_1HKC,
    }
    outputs = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.float32 if name in _SUMS else x.dtype)
        for name, x in given.items()
        if x is not None
    }
    scratch = {"dq_sum": (width, length), "dk_sum": (width, num_keys), "dv_sum": (width, num_keys)}
    if arrays.distance_q_BHKL is not None:
        scratch["ddistance_q_sum"] = (width, length)
    more = {"o": o_BHKL, "sums": sums_BH1L, "do": do_BHKL}
    found = _run("flash_attention_backward", _backward_kernel, call, arrays, more, outputs, scratch)
    if "ddistances" in found:
        found["ddistances"] = found["ddistances"].astype(arrays.distances_1HKC.dtype)
    more_gradients = (found.get(name) for name in ("ddistance_q", "ddistances"))
    return (Arrays(found["dq"], found["dk"], found["dv"], None, None, found.get("dbias"), None, *more_gradients),)


flash.defvjp(_flash_forward, _flash_backward)


class _Refs(dict[str, Any]):
    """The references of a kernel by the names of its arrays; None for an array that it does not have."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def _run(name: str, kernel: Any, call: Call, arrays: Arrays, more: dict, outputs: dict, scratch: dict) -> dict:
    """Run a kernel for each head of each row, and return its outputs by name.

    more: inputs by name, beside the arrays. outputs: shapes by name. scratch: shapes by name, float32. An array with
    one row, or one head, serves all. Rows are the inner axis of the grid, so that a sum over rows stays in vector
    memory.
    """
    (rows, heads), words = arrays.q_BHKL.shape[:2], arrays.words_BH2
    named = {field.rpartition("_")[0]: array for field, array in arrays._replace(words_BH2=None)._asdict().items()}
    inputs = {name: array for name, array in (named | more).items() if array is not None}
    summed = [name for name in _SUMS if name in outputs]

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        of_row, of_head = (size > 1 for size in shape[:2])

        def index(head, row, _):
            return (row * of_row, head * of_head, *(0,) * (len(shape) - 2))

        return pl.BlockSpec((None, None, *shape[2:]), index)

    def body(words_ref, *refs):
        named = _Refs(zip((*inputs, *outputs, *scratch), refs, strict=True), words=words_ref)
        head, row = pl.program_id(0), pl.program_id(1)
        for name in summed:
            of_row, of_head = (size > 1 for size in outputs[name].shape[:2])
            pl.when((of_row | (row == 0)) & (of_head | (head == 0)))(functools.partial(_zero, named[name]))
        kernel(call, named, row * heads + head)

    inputs = {name: array if array.ndim == 4 else array[:, None] for name, array in inputs.items()}
    found = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, rows),
            in_specs=[spec(array.shape) for array in inputs.values()],
            out_specs=[spec(shape.shape) for shape in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        out_shape=list(outputs.values()),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=call.memory * 2**20,
            dimension_semantics=("arbitrary" if summed else "parallel",) * 2,
        ),
        interpret=call.interpret,
        name=name,
    )(jnp.zeros(1, jnp.uint32) if words is None else words.reshape(-1), *inputs.values())
    return dict(zip(outputs, found, strict=True))


def _forward(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    b, h, width, length = arrays.q_BHKL.shape
    outputs = {
        "o": jax.ShapeDtypeStruct(arrays.q_BHKL.shape, arrays.q_BHKL.dtype),
        "sums": jax.ShapeDtypeStruct((b, h, 1, length), jnp.float32),
    }
    kernel, scratch = _whole_kernel, {}
    if arrays.k_BHKS.shape[3] > WHOLE:
        kernel, scratch = _long_kernel, {"top": (1, length), "total": (1, length), "o_sum": (width, length)}
    found = _run("flash_attention_forward", kernel, call, arrays, {}, outputs, scratch)
    return found["o"], found["sums"]


def _whole_kernel(call: Call, refs: _Refs, head: Any) -> None:
    """Write outputs and sums of queries that see all their keys at once. head: its number among those of all rows."""

    def step(own: Any, seen: Any) -> None:
        s_SL = _scores(call, refs, own, seen)
        top_1L = jnp.max(s_SL, axis=0, keepdims=True)
        p_SL = jnp.exp(s_SL - top_1L)
        total_1L = jnp.sum(p_SL, axis=0, keepdims=True)
        (p_SL,) = _dropped(call, refs, head, own, seen, p_SL)
        o_KL = _product(refs.v[:, seen], p_SL.astype(refs.v.dtype))
        _put(call, refs, own, o_KL, top_1L, total_1L)

    _for_blocks(call, refs, call.blocks.forward, step)


def _long_kernel(call: Call, refs: _Refs, head: Any) -> None:
    """Write outputs and sums of queries that see their keys block by block."""
    refs.top[...] = jnp.full(refs.top.shape, MASKED)
    _zero(refs.total)
    _zero(refs.o_sum)

    def step(own: Any, seen: Any) -> None:
        s_SL = _scores(call, refs, own, seen)
        top_1L = jnp.maximum(refs.top[:, own], jnp.max(s_SL, axis=0, keepdims=True))
        p_SL, less_1L = jnp.exp(s_SL - top_1L), jnp.exp(refs.top[:, own] - top_1L)
        refs.top[:, own] = top_1L
        refs.total[:, own] = less_1L * refs.total[:, own] + jnp.sum(p_SL, axis=0, keepdims=True)
        (p_SL,) = _dropped(call, refs, head, own, seen, p_SL)
        refs.o_sum[:, own] = less_1L * refs.o_sum[:, own] + _product(refs.v[:, seen], p_SL.astype(refs.v.dtype))

    _for_blocks(call, refs, call.blocks.forward, step)
    _put(call, refs, slice(None), refs.o_sum[...], refs.top[...], refs.total[...])


def _put(call: Call, refs: _Refs, own: Any, o_KL: jax.Array, top_1L: jax.Array, total_1L: jax.Array) -> None:
    sees = top_1L > _SEEN
    refs.o[:, own] = (o_KL * jnp.where(sees, call.kept / total_1L, 0.0)).astype(refs.o.dtype)
    refs.sums[:, own] = jnp.where(sees, top_1L + jnp.log(total_1L), 0.0)


def _backward_kernel(call: Call, refs: _Refs, head: Any) -> None:
    """Write the gradients of all inputs, from those of the outputs."""
    summed = [name for name in ("dq", "dk", "dv", "ddistance_q") if name in refs]
    for name in summed:
        _zero(refs[f"{name}_sum"])

    def step(own: Any, seen: Any) -> None:
        q_KL, k_KS, v_KS = refs.q[:, own], refs.k[:, seen], refs.v[:, seen]
        do_KL = refs.do[:, own]
        products_KL = do_KL.astype(jnp.float32) * refs.o[:, own].astype(jnp.float32)
        delta_1L = jnp.sum(products_KL, axis=0, keepdims=True) / call.kept
        p_SL = jnp.exp(_scores(call, refs, own, seen) - (refs.sums[:, own] - math.log(call.kept)))  # times `kept`
        kept_SL, dp_SL = _dropped(call, refs, head, own, seen, p_SL, _product(v_KS, do_KL, 0, 0))
        refs.dv_sum[:, seen] += _product(do_KL, kept_SL.astype(do_KL.dtype), 1, 1)
        ds_SL = p_SL * (dp_SL - delta_1L)
        if refs.bias is not None:
            refs.dbias[seen, own] += ds_SL
        if refs.distances is not None:
            columns = _columns(refs, own, seen)
            by_column_CL = _moved(jnp.pad(ds_SL, ((0, own.size), (0, 0))), own.size, back=True).astype(q_KL.dtype)
            refs.ddistance_q_sum[:, own] += _product(refs.distances[:, columns], by_column_CL)
            refs.ddistances[:, columns] += call.scale * _product(refs.distance_q[:, own], by_column_CL, 1, 1)
        ds_SL = ds_SL.astype(q_KL.dtype)
        refs.dk_sum[:, seen] += _product(q_KL, ds_SL, 1, 1)
        refs.dq_sum[:, own] += _product(k_KS, ds_SL)

    _for_blocks(call, refs, call.blocks.backward, step)
    for name in summed:
        factor = 1.0 if name == "dv" else call.scale
        refs[name][...] = (refs[f"{name}_sum"][...] * factor).astype(refs[name].dtype)


def _for_blocks(call: Call, refs: _Refs, size: int, step: Any) -> None:
    """Run step(queries, keys) for the blocks of queries and, in a long row, of the keys that they see."""
    length, num_keys, block = refs.q.shape[1], refs.k.shape[1], call.blocks.keys
    for first in range(0, length, size):
        queries = min(size, length - first)
        own, last = pl.ds(first, queries), first + queries - 1
        if num_keys <= WHOLE:
            step(own, pl.ds(0, min(num_keys, call.keys_seen(last, num_keys, LANES))))
            continue

        def of_keys(number: Any, _: None, own: Any = own) -> None:
            step(own, pl.ds(pl.multiple_of(number * block, block), block))

        jax.lax.fori_loop(0, call.keys_seen(last, num_keys, block) // block, of_keys, None)


def _scores(call: Call, refs: _Refs, own: Any, seen: Any) -> jax.Array:
    """Return the scores of the keys `seen` and the queries `own`, float32 (S, L), MASKED where a query sees no key."""
    s_SL = _product(refs.k[:, seen], _scaled(refs.q[:, own], call.scale), 0, 0)
    if refs.distances is not None:
        of_columns_KC = refs.distances[:, _columns(refs, own, seen)]
        by_column_CL = _product(of_columns_KC, _scaled(refs.distance_q[:, own], call.scale), 0, 0)
        s_SL = s_SL + _moved(by_column_CL, own.size)[: seen.size]
    if refs.bias is not None:
        s_SL = s_SL + refs.bias[seen, own]
    visible, keys_SL = [], _counted(s_SL.shape, 0, seen.start)
    if call.causal:
        last_SL = _counted(s_SL.shape, 1, own.start + call.offset)
        visible.append(keys_SL <= last_SL)
        if call.reach:
            visible.append(keys_SL >= last_SL - call.reach)
    if refs.k.shape[1] > call.num_keys:
        visible.append(keys_SL < call.num_keys)
    if refs.own is not None:
        of_keys_S1 = jnp.broadcast_to(refs.seen[:, seen], (LANES, seen.size)).T[:, :1]
        visible.append(of_keys_S1 == refs.own[:, own])
    return jnp.where(functools.reduce(jnp.logical_and, visible), s_SL, MASKED) if visible else s_SL


def _scaled(q_KL: jax.Array, scale: float) -> jax.Array:
    return (q_KL.astype(jnp.float32) * scale).astype(q_KL.dtype)


def _columns(refs: _Refs, own: Any, seen: Any) -> Any:
    """Return the columns of the distances of a block: as many as keys and queries, from its last query's first on."""
    first = refs.q.shape[1] - own.start - own.size + seen.start
    if not isinstance(first, int):
        first = pl.multiple_of(first, LANES)
    return pl.ds(first, seen.size + own.size)


def _moved(x_CL: jax.Array, num_queries: int, *, back: bool = False) -> jax.Array:
    """Return scores by key of scores by column: those of query l are moved up by L - 1 - l rows; back: down.

    A movement by each power of two takes place where the number of rows has it. Rows that leave one end come in at the
    other.
    """
    rows_CL = num_queries - 1 - _counted(x_CL.shape, 1, 0)
    size, power = x_CL.shape[0], 1
    while power < num_queries:
        by = power if back else size - power
        other = pltpu.roll(x_CL, by, 0) if power % _ROWS else jnp.concatenate([x_CL[size - by :], x_CL[: size - by]])
        x_CL = jnp.where(rows_CL & power != 0, other, x_CL)
        power *= 2
    return x_CL


def _dropped(call: Call, refs: _Refs, head: Any, own: Any, seen: Any, *arrays_SL: jax.Array) -> tuple[jax.Array, ...]:
    """Return weights, and their gradients, with zeros where a weight is dropped."""
    if not call.drops:
        return arrays_SL
    k0, k1 = refs.words[2 * head], refs.words[2 * head + 1]
    if call.along_queries:
        places = jnp.zeros((1, 1), jnp.uint32)
    else:
        places = _counted((1, own.size), 1, own.start + call.first).astype(jnp.uint32)
    of_place_1L = hash_of_places(k0, k1, places)
    bits = []
    for group in range(0, seen.size, 2 * LANES):
        number = (seen.start >> 1) + group // 2  # blocks of keys begin at multiples of 2 LANES
        words = hash_of_words(of_place_1L, _counted((LANES, of_place_1L.shape[1]), 0, number).astype(jnp.uint32))
        bits += [words & jnp.uint32(0xFFFF), words >> 16][: (seen.size - group) // LANES]
    keep_SL = jnp.concatenate(bits).astype(jnp.int32) >= call.drops
    return tuple(jnp.where(keep_SL, x_SL, 0.0) for x_SL in arrays_SL)


def _zero(ref: Any) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _counted(shape: tuple[int, ...], axis: int, first: Any) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + first


def _product(one: jax.Array, other: jax.Array, axis: int = 1, other_axis: int = 0) -> jax.Array:
    """Return the product of two matrices in float32. axis, other_axis: those that are summed."""
    contracted = (((axis,), (other_axis,)), ((), ()))
    return jax.lax.dot_general(one, other, contracted, preferred_element_type=jnp.float32)
