"""T5, an encoder and a decoder of Transformer blocks with relative positions.

Raffel, Shazeer, Roberts, Lee, Narang, Matena, Zhou, Li and Liu, "Exploring the Limits of Transfer Learning with a
Unified Text-to-Text Transformer", 2020; in the form of the original code (mesh_tensorflow/transformer) and of T5 1.1
(google-research/t5x, examples/t5). No layer has a bias vector. Norms divide by the root mean square, before each
branch and at the end of each stack. Queries are not scaled: their initial weights are smaller instead. A score of the
attention has a bias per head that depends on the distance of query and key alone; each stack has one table of these
biases for all its layers, and the attention to the source has none.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.model import Arithmetic, Inputs, Outputs, reordered_targets
from jaxlm.models.t5 import T5Config
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import (
    STATES,
    RMSNorm,
    WeightDropout,
    activate,
    dropout,
    embed,
    fold,
    project,
    project_heads,
    project_to_heads,
)
from jaxlm.nn.output import UntiedOutput
from jaxlm.nn.transformer import Cache, attend, put, stacked

TABLE = ("vocabulary", "width")
ALONG_LENGTH = (1,)  # the axis of states (B, L, D) along which a dropout mask is shared
ALONG_QUERIES = (2,)  # that of the attention's weights (B, H, L, S)
# Target tokens per source token of pretraining: 114 of 512.
TARGETS_PER_ROW = 114 / (512 + 114)


class Decoding(NamedTuple):
    """The carry of decoding, for all layers.

    own: keys and values of the targets so far. source: those of the source, (N, B, H, S, K), and its segments, int32
    (N, B, S); None before the source is read. A step does not change it.
    """

    own: Cache
    source: Any = None


class T5(nn.Module):
    """The encoder and the decoder of T5."""

    config: T5Config
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution, every = self.config, self.execution, nn.broadcast
        self.embeddings = Embeddings(config, execution)
        self.encoder_positions = RelativePositions(config, directions=2)
        self.encoder_blocks = stacked(
            EncoderBlock, config, execution, in_axes=(every,) * 4, static=(4, 5), num_layers=config.num_encoder_layers
        )
        self.encoder_norm = RMSNorm(config.norm_eps)
        self.decoder_positions = RelativePositions(config, directions=1)
        in_axes = (every, every, every, 0, every, every, every)
        self.decoder_blocks = stacked(DecoderBlock, config, execution, in_axes=in_axes, static=(7, 8))
        self.decoder_norm = RMSNorm(config.norm_eps)

    def __call__(
        self, inputs: Inputs, carry: Decoding | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return the states of the decoder, and as `output` the token table (V, D).

        carry: keys and values of the preceding tokens, for decoding; the source is read with the first of them.
        inputs.positions are used for decoding alone: they place the first token of each row in the cache.
        """
        source = None if inputs.source is None else self.encode(inputs.source, train)
        x_BLD, table_VD = self.embeddings(inputs.ids, train)
        length, first_B = inputs.ids.shape[1], None if carry is None else inputs.positions[:, 0]
        if carry is None:
            bias_BHLS = self.decoder_positions(np.arange(length)[None, :, None] - np.arange(length))
        else:
            queries_BL = inputs.positions[:, :1] + jnp.arange(length)
            bias_BHLS = self.decoder_positions(queries_BL[:, :, None] - jnp.arange(carry.own.k_NBHSK.shape[3]))
        segments_BL = inputs.segments if carry is None else None
        if segments_BL is None:
            segments_BL = jnp.ones_like(inputs.ids)
        x_BLD, (carry, layers_NBLD) = self.decoder_blocks(
            x_BLD, source, bias_BHLS, segments_BL, carry, first_B, train, layers
        )
        h_BLD = self.decoder_norm(x_BLD)
        hidden = self._hidden(inputs.ids, layers_NBLD, h_BLD) if layers else None
        h_BLD = self._dropped(h_BLD, train)
        return Outputs(h_BLD, hidden, carry, table_VD)

    def read(self, source: Inputs, layers: bool = False) -> Outputs:
        """Return the outputs of the encoder. layers: the embeddings, and the states of each block, the last normed."""
        states_BSD, layers_NBSD = self._encoded(source, False, layers)
        hidden = self._hidden(source.ids, layers_NBSD, states_BSD) if layers else None
        return Outputs(states_BSD, hidden, None, None)

    def _hidden(self, ids_BL: jax.Array, layers_NBLD: jax.Array, last_BLD: jax.Array) -> jax.Array:
        """Return the embeddings and the states of each block, the last normed (N + 1, B, L, D)."""
        embedded_BLD, _ = self.embeddings(ids_BL, False)
        return jnp.concatenate([embedded_BLD[None], layers_NBLD[:-1], last_BLD[None]])

    def encode(self, source: Inputs, train: bool = False) -> tuple[jax.Array, jax.Array]:
        """Return the states of the encoder (B, S, D) and the segments of the source (B, S)."""
        states_BSD, _ = self._encoded(source, train, False)
        segments_BS = jnp.ones_like(source.ids) if source.segments is None else source.segments
        return states_BSD, segments_BS

    def _encoded(self, source: Inputs, train: bool, layers: bool) -> tuple[jax.Array, Any]:
        """Return the states of the encoder (B, S, D), and with `layers` the outputs of its blocks (N, B, S, D)."""
        x_BSD, _ = self.embeddings(source.ids, train)
        length = source.ids.shape[1]
        bias_BHSS = self.encoder_positions(np.arange(length)[None, :, None] - np.arange(length))
        x_BSD, layers_NBSD = self.encoder_blocks(x_BSD, bias_BHSS, source.segments, train, layers)
        return self._dropped(self.encoder_norm(x_BSD), train), layers_NBSD

    def _dropped(self, h_BLD: jax.Array, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        return dropout(h_BLD, self.config.dropout_rate, key, shared_axes=ALONG_LENGTH)


class Embeddings(nn.Module):
    """The token table (V, D), which encoder and decoder share."""

    config: T5Config
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        """Return the embeddings with dropout (B, L, D), and the table."""
        config = self.config
        init = nn.initializers.normal(config.init_scale)
        table_VD = self.param("tokens", with_axes(init, TABLE), (config.vocab_size, config.width))
        key = self.make_rng("dropout") if train else None
        x_BLD = dropout(
            embed(table_VD, ids_BL, TABLE, self.execution), config.dropout_rate, key, shared_axes=ALONG_LENGTH
        )
        return constrain(x_BLD, STATES), table_VD


def buckets(distances: np.ndarray, num_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket, int32, of distances of a key before its query, 0 or more, in one direction.

    The first half of the buckets have one distance each; the others grow in logarithmic steps up to max_distance, from
    which on all distances are in the last one (mesh_tensorflow/transformer/transformer_layers.py:1000-1042).
    """
    exact = num_buckets // 2
    steps = np.log(np.maximum(distances, 1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    far = np.minimum(exact + np.maximum(steps, 0).astype(np.int32), num_buckets - 1)
    return np.where(distances < exact, distances, far).astype(np.int32)


class RelativePositions(nn.Module):
    """Biases of the attention's scores by the distance of query and key, a table (buckets, H).

    directions: 2 for an encoder, whose second half of the buckets is for keys ahead; 1 for a decoder, where they are
    masked.
    """

    config: T5Config
    directions: int

    @nn.compact
    def __call__(self, distances: Any) -> jax.Array:
        """Return the biases (B, H, L, S), float32. distances: query less key position, (B, L, S)."""
        config = self.config
        init = nn.initializers.normal(config.init_scale * config.width**-0.5)
        shape = (config.num_buckets, config.num_heads)
        table_NH = self.param("biases", with_axes(init, ("buckets", "heads")), shape)
        each = config.num_buckets // self.directions
        of_distance = buckets(np.arange(config.max_distance + 1), each, config.max_distance)
        if self.directions == 2:
            of_distance = np.concatenate([(of_distance[1:] + each)[::-1], of_distance])  # of -max_distance, …
        least = config.max_distance * (1 - self.directions)
        if isinstance(distances, np.ndarray):
            found = of_distance[np.clip(distances, least, config.max_distance) - least]
        else:
            found = jnp.asarray(of_distance)[jnp.clip(distances, least, config.max_distance) - least]
        # A product, as the gradient of a gather would add thousands of positions to a few rows in sequence.
        one_hot = jax.nn.one_hot(found, config.num_buckets, dtype=jnp.float32)
        return jnp.einsum("blsn,nh->bhls", one_hot, table_NH, precision="highest")


class Attention(nn.Module):
    """Attention without bias vectors and without a scale of the scores."""

    config: T5Config
    execution: Execution

    def setup(self) -> None:
        """Create the kernels: queries, keys and values (D, H, K), and the output (H, K, D)."""
        config = self.config
        d, h, k = config.width, config.num_heads, config.head_width
        narrow, wide = config.init_scale * (d * k) ** -0.5, config.init_scale * d**-0.5
        for name, std in (("q_kernel", narrow), ("k_kernel", wide), ("v_kernel", wide)):
            init = with_axes(nn.initializers.normal(std), ("width", "heads", "head_width"))
            setattr(self, name, self.param(name, init, (d, h, k)))
        init = nn.initializers.normal(config.init_scale * (h * k) ** -0.5)
        names = ("heads", "head_width_in", "whole_width")
        self.out_kernel = self.param("out_kernel", with_axes(init, names), (h, k, d))

    def keys_and_values(self, y_BSD: jax.Array) -> Cache:
        """Return the keys and values of these states, (B, H, S, K) each."""
        return Cache(self._project(y_BSD, self.k_kernel), self._project(y_BSD, self.v_kernel))

    def __call__(
        self, x_BLD: jax.Array, seen: Cache, key: jax.Array | None, *, causal: bool = False, **masks: Any
    ) -> jax.Array:
        """Return the outputs (B, L, D). seen: keys and values. key: of the dropout. masks: arguments of `attend`."""
        a_BHLK = attend(
            self._project(x_BLD, self.q_kernel),
            seen.k_NBHSK,
            seen.v_NBHSK,
            causal=causal,
            scale=1.0,
            drop=WeightDropout(self.config.dropout_rate, key, ALONG_QUERIES),
            backend=self.execution.attention_backend(self.config.num_layers),
            **masks,
        )
        return project_heads(a_BHLK, self.out_kernel, None, ("heads", "head_width_in", "whole_width"), self.execution)

    def _project(self, x_BLD: jax.Array, kernel_DHK: jax.Array) -> jax.Array:
        return project_to_heads(x_BLD, kernel_DHK, None, ("width", "heads", "head_width"), self.execution)


class FeedForward(nn.Module):
    """Two layers with a ReLU and dropout between them; or, as in T5 1.1, with a GELU of a third layer as a gate."""

    config: T5Config
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return the outputs (B, L, D). key: of the dropout; None: evaluation."""
        config = self.config
        d, f = config.width, config.feed_forward_width
        names_in, names_out = ("width", "feed_forward"), ("feed_forward_in", "whole_width")
        init, end = (nn.initializers.normal(config.init_scale * size**-0.5) for size in (d, f))

        def hidden(name: str) -> jax.Array:
            return project(x_BLD, self.param(name, with_axes(init, names_in), (d, f)), None, names_in, self.execution)

        if config.feed_forward == "relu":
            h_BLF = activate(hidden("in_kernel"), "relu")
        else:
            h_BLF = activate(hidden("gate_kernel"), "gelu_tanh") * hidden("in_kernel")
        h_BLF = dropout(h_BLF, config.dropout_rate, key, shared_axes=ALONG_LENGTH)
        kernel_out = self.param("out_kernel", with_axes(end, names_out), (f, d))
        return project(h_BLF, kernel_out, None, names_out, self.execution)


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each x + branch(norm(x))."""

    config: T5Config
    execution: Execution

    @nn.compact
    def __call__(self, x_BSD, bias_BHSS, segments_BS, train: bool, keep: bool):
        config, execution = self.config, self.execution
        key = self.make_rng("dropout") if train else None
        attention = Attention(config, execution, name="attention")
        feed_forward = FeedForward(config, execution, name="feed_forward")

        def branch(output_BSD, number: int):
            return dropout(output_BSD, config.dropout_rate, fold(key, number), shared_axes=ALONG_LENGTH)

        n_BSD = RMSNorm(config.norm_eps, name="attention_norm")(x_BSD)
        seen = attention.keys_and_values(n_BSD)
        a_BSD = attention(n_BSD, seen, fold(key, 0), bias_BHLS=bias_BHSS, segments_BL=segments_BS)
        x_BSD = x_BSD + branch(a_BSD, 1)
        n_BSD = RMSNorm(config.norm_eps, name="feed_forward_norm")(x_BSD)
        x_BSD = x_BSD + branch(feed_forward(n_BSD, fold(key, 2)), 3)
        return constrain(x_BSD, STATES), x_BSD if keep else None


class DecoderBlock(nn.Module):
    """Attention to the targets so far, attention to the source, and feed-forward, each x + branch(norm(x))."""

    config: T5Config
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, source, bias_BHLS, segments_BL, carry, first_B, train: bool, keep: bool):
        config, execution = self.config, self.execution
        key = self.make_rng("dropout") if train else None
        attention = Attention(config, execution, name="attention")
        source_attention = Attention(config, execution, name="source_attention")
        feed_forward = FeedForward(config, execution, name="feed_forward")

        def branch(output_BLD, number: int):
            return dropout(output_BLD, config.dropout_rate, fold(key, number), shared_axes=ALONG_LENGTH)

        n_BLD = RMSNorm(config.norm_eps, name="attention_norm")(x_BLD)
        own, masks = attention.keys_and_values(n_BLD), {"segments_BL": segments_BL}
        if carry is not None:
            own = Cache(*(put(kept, new, first_B) for kept, new in zip(carry.own, own, strict=True)))
            masks = {"query_offset": first_B}
        a_BLD = attention(n_BLD, own, fold(key, 0), causal=True, bias_BHLS=bias_BHLS, **masks)
        x_BLD = x_BLD + branch(a_BLD, 1)

        n_BLD = RMSNorm(config.norm_eps, name="source_attention_norm")(x_BLD)
        if source is None:
            of_source, segments_BS = carry.source
        else:
            states_BSD, segments_BS = source
            of_source = source_attention.keys_and_values(states_BSD)
        a_BLD = source_attention(n_BLD, of_source, fold(key, 2), segments_BL=segments_BL, key_segments_BS=segments_BS)
        x_BLD = x_BLD + branch(a_BLD, 3)

        n_BLD = RMSNorm(config.norm_eps, name="feed_forward_norm")(x_BLD)
        x_BLD = x_BLD + branch(feed_forward(n_BLD, fold(key, 4)), 5)
        carry = None if carry is None else Decoding(own, (of_source, segments_BS))
        return constrain(x_BLD, STATES), (carry, x_BLD if keep else None)


class T5Output(UntiedOutput):
    """Scores are h W^T, with the token table or a classifier of its own as W (V, D), and h scaled by D^-0.5 or not."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config.vocab_size, config.width, config.init_std)
        self._tied, self._scale = config.output == "tied", config.width**-0.5 if config.scaled_output else 1.0

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return the classifier, or nothing if the output is tied."""
        return {} if self._tied else super().init(key)

    def available(self, params: Any) -> bool:
        """Return True if the parameters hold what the output needs."""
        return self._tied or super().available(params)

    def table(self, params: Any, output: jax.Array) -> jax.Array:
        """Return the token table (V, D), or the classifier."""
        return output if self._tied else super().table(params, output)

    def scored(self, states: jax.Array) -> jax.Array:
        """Return the states, scaled or not."""
        return states if self._scale == 1.0 else states * jnp.asarray(self._scale, states.dtype)


def flops_per_token(config: T5Config, length: int, predicted: float | None) -> float:
    """Return the FLOPs of a training step per token of a row, of its source and of its target.

    length: the tokens of both. predicted: the fraction of them that are targets; None: that of span corruption.
    """
    targets = TARGETS_PER_ROW if predicted is None else predicted
    target_length, source_length = length * targets, length * (1 - targets)
    inner, d = config.num_heads * config.head_width, config.width
    projection = d * inner  # of queries, keys, values or outputs
    feed_forward = (2 if config.feed_forward == "relu" else 3) * d * config.feed_forward_width
    source = config.num_encoder_layers * (4 * projection + feed_forward) + config.num_layers * 2 * projection
    target = config.num_layers * (6 * projection + feed_forward) + d * config.vocab_size
    attention = config.num_encoder_layers * source_length * (1 - targets)
    attention += config.num_layers * targets * (0.5 * target_length + source_length)
    return 6 * ((1 - targets) * source + targets * target) + 12 * inner * attention


def decoding_carry(config: T5Config, rows: int, length: int, dtype: Any) -> Decoding:
    """Return the carry before the source is read, with room for `length` targets."""
    shape = (config.num_layers, rows, config.num_heads, length, config.head_width)
    return Decoding(Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))


ARITHMETIC = Arithmetic(
    module=T5,
    output_layer=T5Output,
    flops_per_token=flops_per_token,
    decoding_carry=decoding_carry,
    reordered=reordered_targets,
)
