"""Transformer-XL, a decoder with relative positions and a memory of the tokens before its row.

Dai, Yang, Yang, Carbonell, Le and Salakhutdinov, "Transformer-XL: Attentive Language Models beyond a Fixed-Length
Context", 2019, and their code, kimiyoung/transformer-xl (pytorch/mem_transformer.py). Unlike GPT it has no table of
positions. The score of query i and key j is that of their contents and of their distance (section 3.3), where W q is
written q:

    A_ij = (q_i + u) k_j + (q_i + v) W_r R_(i - j)

The memory holds the inputs of every layer at the last M tokens of each row, without gradient, and the current weights
compute keys and values from them. It has a fixed size and a count of valid slots per row, so that an empty memory has
no effect. Evaluation and decoding keep the keys and values themselves (`Cache`), as the weights do not change.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import (
    MASKED,
    STATES,
    LayerNorm,
    WeightDropout,
    dropout,
    fold,
    gathered,
    project_heads,
    project_to_heads,
)
from jaxlm.nn.output import AdaptiveOutput, Embeddings, vocabulary_matrices
from jaxlm.nn.transformer import (
    MOST_BLOCKS,
    SMALLEST_BLOCK,
    FeedForward,
    attend,
    chosen,
    stacked,
    takes_flash,
)


def flops_per_token(config: TransformerXLConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward, with a full memory.

    A token sees the memory and half of its row, or memory_length tokens with same_length. Its attention has three
    products, with keys, distances and values. Keys and values of the memory need no gradient of their inputs. The
    projection of the distances is shared by all rows and not counted.
    """
    d, memory = config.width, config.memory_length
    matrices = config.num_layers * (4 * d**2 + 2 * d * config.feed_forward_width)
    matrices += vocabulary_matrices(config)
    seen = memory if config.same_length else memory + length / 2
    return 6.0 * matrices + config.num_layers * (18.0 * d * seen + 8.0 * d**2 * memory / length)


class Memory(NamedTuple):
    """Inputs of each layer at the last tokens of each row, (N, B, M, D), and the number of these tokens, int32 (1, B).

    The newest token is in the last slot. Slots before these tokens hold nothing.
    """

    x_NBMD: jax.Array
    count_1B: jax.Array


class Cache(NamedTuple):
    """Keys and values of the last tokens of each row, (N, B, H, M, K) each, and their number; see `Memory`."""

    k_NBHMK: jax.Array
    v_NBHMK: jax.Array
    count_1B: jax.Array


def empty_memory(config: TransformerXLConfig, rows: int, dtype: Any) -> Memory | None:
    """Return the memory before the first token of `rows` rows; None for a model without."""
    if not config.memory_length:
        return None
    shape = (config.num_layers, rows, config.memory_length, config.width)
    return Memory(jnp.zeros(shape, dtype), jnp.zeros((1, rows), jnp.int32))


def empty_cache(config: TransformerXLConfig, rows: int, length: int, dtype: Any) -> Cache:
    """Return a cache with room for `length` tokens of each row."""
    shape = (config.num_layers, rows, config.num_heads, length, config.width // config.num_heads)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((1, rows), jnp.int32))


class _Shared(NamedTuple):
    """The inputs that all layers share.

    relative_SD: encodings of the distances S - 1 to 0 for S = M + L keys. limit_LS: added to the scores, None without
    same_length. segments_BL, key_segments_BS: as in `attend`. tokens_B: the tokens of each row without padding. uv_2HK:
    the biases of contents and of distances, None if each layer has its own.
    """

    relative_SD: jax.Array
    limit_LS: jax.Array | None
    segments_BL: jax.Array | None
    key_segments_BS: jax.Array | None
    tokens_B: jax.Array
    uv_2HK: jax.Array | None


class TransformerXL(nn.Module):
    """The decoder: embedding, blocks, and the token table as output layer."""

    config: TransformerXLConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self, inputs: Inputs, carry: Memory | Cache | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states, the memory of the tokens before and in the rows, and as `output` the tables of its ids.

        Positions are not used. carry: a `Memory` or a `Cache`, of any number of slots; padding at the end of a row does
        not enter it, and no gradient flows to it. None: no memory, and none is returned.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        init = nn.initializers.normal(config.init_std)
        x_BLD, output = Embeddings(config, self.execution, init, bias=True, name="embeddings")(inputs.ids)
        x_BLD = x_BLD * math.sqrt(config.width)
        x_BLD = constrain(dropout(x_BLD, config.dropout_rate, fold(key, 0)), STATES)
        carry = jax.lax.stop_gradient(carry)
        shared = self._shared(inputs, carry, fold(key, 1))
        in_axes = (0, nn.broadcast, nn.broadcast, nn.broadcast)
        blocks = stacked(Block, config, self.execution, in_axes=in_axes, static=(4, 5), name="blocks")
        kept = None if carry is None else tuple(carry[:-1])
        h_BLD, (kept, layers_NBLD) = blocks(x_BLD, kept, shared, train, layers)
        after = None
        if carry is not None:
            count_1B = jnp.minimum(carry.count_1B + shared.tokens_B, carry[0].shape[-2])
            after = type(carry)._make((*kept, count_1B))
        hidden = jnp.concatenate([x_BLD[None], layers_NBLD]) if layers else None
        return Outputs(dropout(h_BLD, config.dropout_rate, fold(key, 2)), hidden, after, output, h_BLD)

    def _shared(self, inputs: Inputs, carry: Memory | Cache | None, key: jax.Array | None) -> _Shared:
        config, (rows, length) = self.config, inputs.ids.shape
        slots = 0 if carry is None else carry[0].shape[-2]
        encodings = sinusoids(slots + length, config.width, config.clamp_length)
        relative_SD = jnp.asarray(encodings, self.execution.compute_dtype())
        segments_BL = key_segments_BS = inputs.segments
        tokens_B = jnp.full((rows,), length) if segments_BL is None else jnp.sum(segments_BL > 0, axis=1)
        if carry is not None:
            segments_BL = jnp.ones_like(inputs.ids) if segments_BL is None else segments_BL
            holds_BM = jnp.arange(slots) >= slots - carry.count_1B[0][:, None]
            key_segments_BS = jnp.concatenate([jnp.where(holds_BM, 1, _NO_SEGMENT), segments_BL], axis=1)
        return _Shared(
            relative_SD=dropout(relative_SD, config.dropout_rate, key, of_rows=False),
            limit_LS=_limit(config, length, slots),
            segments_BL=segments_BL,
            key_segments_BS=key_segments_BS,
            tokens_B=tokens_B.astype(jnp.int32),
            uv_2HK=_attention_biases(self, config) if config.attention_biases == "shared" else None,
        )


class Block(nn.Module):
    """Attention and feed-forward, each with a residual sum and a norm.

    norm post: n = norm(x + a(x)), norm(n + m(n)). pre: x + a(norm(x)), x + m(norm(x)); the memory holds states before
    the norm, and is normed with them.
    """

    config: TransformerXLConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, kept, shared: _Shared, train: bool, keep: bool):
        config, pre = self.config, self.config.norm == "pre"
        key = self.make_rng("dropout") if train else None
        attention_norm = LayerNorm(config.norm_eps, name="attention_norm")
        feed_forward_norm = LayerNorm(config.norm_eps, name="feed_forward_norm")
        attention = Attention(config, self.execution, name="attention")
        a_BLD, kept = attention(x_BLD, kept, shared, attention_norm if pre else None, key)
        x_BLD = x_BLD + a_BLD
        x_BLD = x_BLD if pre else attention_norm(x_BLD)
        n_BLD = feed_forward_norm(x_BLD) if pre else x_BLD
        x_BLD = x_BLD + _feed_forward(config, self.execution, n_BLD, fold(key, 2))
        x_BLD = constrain(x_BLD if pre else feed_forward_norm(x_BLD), STATES)
        return x_BLD, (kept, x_BLD if keep else None)


class Attention(nn.Module):
    """Relative attention of a row to itself and to the memory, without biases of the projections."""

    config: TransformerXLConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, kept, shared: _Shared, norm: Any, key: jax.Array | None):
        """Return the branch after its dropout, and the memory of this layer. norm: of the inputs, None for none."""
        config, execution = self.config, self.execution
        d, h = config.width, config.num_heads
        init = nn.initializers.normal(config.init_std)
        names, names_out = ("width", "heads", "head_width"), ("heads", "head_width_in", "whole_width")
        kernel_in = self.param("qkv_kernel", with_axes(init, ("width", "qkv", *names[1:])), (d, 3, h, d // h))
        kernel_relative = self.param("relative_kernel", with_axes(init, names), (d, h, d // h))
        kernel_out = self.param("out_kernel", with_axes(init, names_out), (h, d // h, d))
        uv_2HK = shared.uv_2HK if shared.uv_2HK is not None else _attention_biases(self, config)

        n_BLD = x_BLD if norm is None else norm(x_BLD)
        q_BHLK = project_to_heads(n_BLD, kernel_in[:, 0], None, names, execution)
        source_BSD = n_BLD
        if kept is not None and len(kept) == 1:  # a Memory, whose keys and values are recomputed
            (memory_BMD,) = kept
            source_BSD = jnp.concatenate([memory_BMD if norm is None else norm(memory_BMD), n_BLD], axis=1)
            together_BSD = source_BSD if norm is None else jnp.concatenate([memory_BMD, x_BLD], axis=1)
            kept = (_newest(together_BSD, shared.tokens_B, memory_BMD.shape[1], 1),)
        k_BHSK, v_BHSK = (project_to_heads(source_BSD, kernel_in[:, i], None, names, execution) for i in (1, 2))
        if kept is not None and len(kept) == 2:  # a Cache
            k_BHSK, v_BHSK = (
                jnp.concatenate([old, new], axis=2) for old, new in zip(kept, (k_BHSK, v_BHSK), strict=True)
            )
            kept = tuple(_newest(x, shared.tokens_B, kept[0].shape[2], 2) for x in (k_BHSK, v_BHSK))

        u_H1K, v_H1K = uv_2HK[:, :, None].astype(q_BHLK.dtype)
        queries = (q_BHLK + u_H1K, q_BHLK + v_H1K)
        a_BHLK = _attended(*queries, k_BHSK, v_BHSK, kernel_relative, shared, config, execution, fold(key, 0))
        a_BLD = project_heads(a_BHLK, kernel_out, None, names_out, execution)
        return dropout(a_BLD, config.dropout_rate, fold(key, 1)), kept


_NO_SEGMENT = -1  # of a slot that holds nothing: no token has it


def _feed_forward(
    config: TransformerXLConfig, execution: Execution, x_BLD: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Return the feed-forward of the states, a new submodule, with dropout of its hidden layer and of its outputs."""
    init, rate = nn.initializers.normal(config.init_std), config.dropout_rate
    feed_forward = FeedForward(config, execution, "relu", init, init, rate, name="feed_forward")
    return dropout(feed_forward(x_BLD, fold(key, 0)), rate, fold(key, 1))


def _attention_biases(module: nn.Module, config: TransformerXLConfig) -> jax.Array:
    """Return u and v, a new parameter of `module`, (2, H, K)."""
    shape = (2, config.num_heads, config.width // config.num_heads)
    init = nn.initializers.normal(config.init_std)
    return module.param("attention_biases", with_axes(init, ("biases", "heads", "head_width")), shape)


def _limit(config: TransformerXLConfig, length: int, slots: int) -> jax.Array | None:
    """Return MASKED for the keys that are more than memory_length tokens before a query, else 0, float32 (L, S)."""
    if not config.same_length or slots + length <= config.memory_length + 1:
        return None
    distance_LS = slots + jnp.arange(length)[:, None] - jnp.arange(slots + length)
    return jnp.where(distance_LS > config.memory_length, MASKED, 0.0)


def _newest(together: jax.Array, tokens_B: jax.Array, slots: int, axis: int) -> jax.Array:
    """Return the `slots` entries along `axis` that end with the last token of each row, which padding may follow.

    together: the memory and the row after it.
    """
    return jax.vmap(lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, slots, axis - 1))(together, tokens_B)


def _attended(
    q_BHLK, distance_q_BHLK, k_BHSK, v_BHSK, kernel_DHK, shared: _Shared, config, execution: Execution, key
) -> jax.Array:
    """Return the attention of queries at the last keys, (B, H, L, K), with scores of contents and of distances.

    q_BHLK, distance_q_BHLK: the queries with the biases u and v. kernel_DHK: W_r.
    """
    num_keys = k_BHSK.shape[2]
    offset, scale = num_keys - q_BHLK.shape[2], q_BHLK.shape[3] ** -0.5
    drop = WeightDropout(config.attention_dropout_rate, key)
    named = execution.attention_backend(config.num_layers)
    backend, automatic = chosen(named), named == "auto"
    if backend == "flash" and takes_flash(automatic, q_BHLK, num_keys, offset, drop, False, distances=True):
        from jaxlm.nn.flash_attention import Distances, flash_attention

        encodings_1HSK = project_to_heads(shared.relative_SD[None], kernel_DHK, None, _RELATIVE, execution)
        return flash_attention(
            q_BHLK,
            k_BHSK,
            v_BHSK,
            causal=True,
            segments_BL=shared.segments_BL,
            key_segments_BS=shared.key_segments_BS,
            scale=scale,
            query_offset=offset,
            drop=drop,
            distances=Distances(distance_q_BHLK, encodings_1HSK),
            reach=0 if shared.limit_LS is None else config.memory_length,
        )
    backend = "xla" if backend == "flash" else backend
    distance_scores = _distance_scores(distance_q_BHLK, shared.relative_SD, kernel_DHK, execution)
    return _attended_in_blocks(q_BHLK, k_BHSK, v_BHSK, distance_scores, shared, drop, backend)


def _attended_in_blocks(q_BHLK, k_BHSK, v_BHSK, distance_scores: Any, shared: _Shared, drop, backend) -> jax.Array:
    """Return the attention without a kernel of its own. distance_scores: see there.

    On the CPU the queries are processed in blocks, each with the keys up to its last, as in `attend`.
    """
    length, num_keys, scale = q_BHLK.shape[2], k_BHSK.shape[2], q_BHLK.shape[3] ** -0.5
    blocks = max(1, min(MOST_BLOCKS, length // SMALLEST_BLOCK)) if devices.platform() == "cpu" else 1
    outputs = []
    for number in range(blocks):
        first, end = number * length // blocks, (number + 1) * length // blocks
        seen = num_keys - length + end
        bias_BHMT = scale * by_key(distance_scores(first, end, seen))
        if shared.limit_LS is not None:
            bias_BHMT = bias_BHMT + shared.limit_LS[first:end, :seen]
        attended = attend(
            q_BHLK[:, :, first:end],
            k_BHSK[:, :, :seen],
            v_BHSK[:, :, :seen],
            causal=True,
            segments_BL=None if shared.segments_BL is None else shared.segments_BL[:, first:end],
            key_segments_BS=None if shared.key_segments_BS is None else shared.key_segments_BS[:, :seen],
            bias_BHLS=bias_BHMT,
            scale=scale,
            query_offset=seen - (end - first),
            drop=drop._replace(first=first),
            backend=backend,
        )
        outputs.append(attended)
    return outputs[0] if blocks == 1 else jnp.concatenate(outputs, axis=2)


_RELATIVE = ("width", "heads", "head_width")  # axes of W_r


def _distance_scores(q_BHLK: jax.Array, relative_SD: jax.Array, kernel_DHK: jax.Array, execution: Execution) -> Any:
    """Return a function (first, end, keys) -> q W_r R of queries first to end and the distances keys - 1 to 0.

    The products are taken in the order that needs fewer multiplications. W_r R is shared by all rows and serves a
    training step. For few queries, as in decoding, q W_r is smaller.
    """
    (b, h, length, _), (num_keys, d) = q_BHLK.shape, relative_SD.shape
    if b * length * (d + h * num_keys) < num_keys * (d + b * length):
        q_BHLD = jnp.einsum("bhlk,dhk->bhld", q_BHLK, gathered(kernel_DHK, q_BHLK.dtype, _RELATIVE))

        def by_queries(first: int, end: int, keys: int) -> jax.Array:
            part_BHMD, part_TD = q_BHLD[:, :, first:end], relative_SD[num_keys - keys :]
            return jnp.einsum("bhmd,td->bhmt", part_BHMD, part_TD, preferred_element_type=jnp.float32)

        return by_queries
    r_1HSK = project_to_heads(relative_SD[None], kernel_DHK, None, _RELATIVE, execution)
    # One copy of the projection per row, so that the product has the layout of the other scores.
    r_BHSK = jnp.broadcast_to(r_1HSK, (b, *r_1HSK.shape[1:]))

    def by_distances(first: int, end: int, keys: int) -> jax.Array:
        part_BHMK, part_BHTK = q_BHLK[:, :, first:end], r_BHSK[:, :, num_keys - keys :]
        return jnp.einsum("bhmk,bhtk->bhmt", part_BHMK, part_BHTK, preferred_element_type=jnp.float32)

    return by_distances


ARITHMETIC = Arithmetic(
    module=TransformerXL,
    output_layer=lambda config: AdaptiveOutput(config.adaptive),
    flops_per_token=flops_per_token,
    initial_carry=empty_memory,
    cached_carry=lambda config, rows, dtype: empty_cache(config, rows, config.memory_length, dtype),
    decoding_carry=empty_cache,
)


def sinusoids(num_keys: int, width: int, clamp_length: int = 0) -> np.ndarray:
    """Return the encodings of the distances num_keys - 1 down to 0, float32 (S, D): all sines, then all cosines.

    The frequencies are 10000^(-2 i / D). The two halves are concatenated, where Vaswani et al. (2017) interleave them.
    clamp_length: the largest distance; larger ones have its encoding. 0: no limit.
    """
    distance_S = np.arange(num_keys - 1, -1, -1, dtype=np.float64)
    if clamp_length:
        distance_S = np.minimum(distance_S, clamp_length)
    angles = distance_S[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)[:, :width]


def by_key(scores_BHLS: jax.Array) -> jax.Array:
    """Return scores by key of scores by distance: column s of query l is moved from column s + L - 1 - l.

    scores: column c is for the distance S - 1 - c. Query l is at key S - L + l. The values of the keys after a query's
    own are those of other queries: a causal mask must remove them. All shapes are static, and no element is gathered:
    after a column of padding, the rows are read again with one element more or less each.
    """
    b, h, length, num_keys = scores_BHLS.shape
    padded = jnp.pad(scores_BHLS, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return padded.reshape(b, h, num_keys + 1, length)[:, :, 1:].reshape(b, h, length, num_keys)
