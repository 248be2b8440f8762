"""GPT-1, a decoder of post-norm Transformer blocks with learned positions and a tied output.

Radford, Narasimhan, Salimans and Sutskever, "Improving Language Understanding by Generative Pre-Training", 2018
(openai/finetune-transformer-lm). Unlike BERT it is causal, has no segment embedding and no norm after the embedding;
unlike GPT-2 the norm comes after each residual sum and there is none at the end.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.nn.attention import attend
from jaxlm.nn.dropout import dropout, fold
from jaxlm.nn.execution import Execution
from jaxlm.nn.linear import gathered, project
from jaxlm.nn.norm import LayerNorm
from jaxlm.nn.partition import constrain, with_axes
from jaxlm.nn.stack import stacked


@dataclass(frozen=True)
class GPTConfig:
    """What the parameters and the mathematics of a GPT are."""

    kind: Literal["gpt"] = "gpt"
    vocab_size: int = 0
    """Rows of the token table, special tokens included; 0: taken from the store's tokenizer."""
    num_positions: int = 512
    """Rows of the position table: the longest sequence possible."""
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    feed_forward_width: int = 3072
    dropout_rate: float = 0.1
    """Of each residual branch."""
    embedding_dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    embedding_dropout: Literal["sum", "table"] = "sum"
    """Drops elements of the summed embeddings (paper), or of the tables that the softmax shares (original code)."""
    init_std: float = 0.02
    """Of all weights and both tables. 0.02 is the paper's for width 768; narrow models want 0.02 sqrt(768 / D)."""
    norm_eps: float = 1e-5

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        if self.width % self.num_heads:
            raise InputError(f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}")
        for name in ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"model.{name} {getattr(self, name)}: a number from 0 up to, not including, 1")
        for name in ("num_positions", "num_layers", "width", "num_heads", "feed_forward_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} {getattr(self, name)}: a number above 0")


# Section 4.1; the published vocabulary has 40,478 entries (40,000 merges), to which fine-tuning adds three.
GPT1 = GPTConfig(vocab_size=40_478)


def model_flops_per_token(config: GPTConfig, length: int) -> float:
    """FLOPs of a training step per token, forward and backward; causal attention sees half of the keys."""
    per_layer = 4 * config.width**2 + 2 * config.width * config.feed_forward_width
    matrices = config.num_layers * per_layer + config.vocab_size * config.width
    return 6 * matrices + 12 * config.num_layers * config.width * length * 0.5


class Cache(NamedTuple):
    """Keys and values of the positions decoded so far, of all layers: (N, B, H, S, K) each."""

    k_NBHSK: jax.Array
    v_NBHSK: jax.Array


def empty_cache(config: GPTConfig, batch_size: int, length: int, dtype: jnp.dtype) -> Cache:
    """A cache with room for `length` positions."""
    head_width = config.width // config.num_heads
    shape = (config.num_layers, batch_size, config.num_heads, length, head_width)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class GPT(nn.Module):
    """The decoder. States come out, and the table that ties the output."""

    config: GPTConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self,
        ids_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        *,
        train: bool = False,
        cache: Cache | None = None,
        cache_index: jax.Array | int = 0,
    ):
        """States h_BLD in the compute dtype, and the token table (V, D) that scores the next token.

        segments_BL: documents of a packed row (0 is padding); None is one document a row. With a cache the ids stand at
        cache_index, cache_index + 1, … of each row, and the result is (h_BLD, table, the cache with them added).
        """
        config, dtype = self.config, self.execution.compute_dtype()
        key = self.make_rng("dropout") if train else None
        tokens_VD, positions_PD = Embeddings(config, name="embeddings")()
        if config.embedding_dropout == "table":
            tokens_VD = dropout(tokens_VD, config.embedding_dropout_rate, fold(key, 0))
            positions_PD = dropout(positions_PD, config.embedding_dropout_rate, fold(key, 1))
        table_VD = gathered(tokens_VD, dtype, ("vocabulary", "width"))
        positions_PD = gathered(positions_PD, dtype, ("positions", "width"))
        x_BLD = jnp.take(table_VD, ids_BL, axis=0) + jnp.take(positions_PD, positions_BL, axis=0)
        if config.embedding_dropout == "sum":
            x_BLD = dropout(x_BLD, config.embedding_dropout_rate, fold(key, 2))
        x_BLD = constrain(x_BLD, ("batch", "length", "gathered"))
        in_axes = (nn.broadcast, 0, nn.broadcast, nn.broadcast)
        blocks = stacked(Block, config.num_layers, self.execution, in_axes=in_axes, static=(5,))
        blocks = blocks(config, self.execution, name="blocks")
        x_BLD, new_cache = blocks(x_BLD, segments_BL, cache, cache_index, train)
        return (x_BLD, table_VD) if cache is None else (x_BLD, table_VD, new_cache)


class Embeddings(nn.Module):
    """The two tables: tokens (V, D), special ones included, and positions (P, D)."""

    config: GPTConfig

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        config, init = self.config, nn.initializers.normal(self.config.init_std)
        tokens = with_axes(init, ("vocabulary", "width"))
        positions = with_axes(init, ("positions", "width"))
        return (
            self.param("tokens", tokens, (config.vocab_size, config.width)),
            self.param("positions", positions, (config.num_positions, config.width)),
        )


class Block(nn.Module):
    """Attention and feed-forward, each followed by residual sum and norm: n = norm(x + a(x)), norm(n + m(n))."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, cache_index, train: bool):
        config = self.config
        key = self.make_rng("dropout") if train else None
        a_BLD, cache = Attention(config, self.execution, name="attention")(
            x_BLD, segments_BL, cache, cache_index, fold(key, 0)
        )
        x_BLD = LayerNorm(config.norm_eps, name="attention_norm")(
            x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        )
        m_BLD = FeedForward(config, self.execution, name="feed_forward")(x_BLD)
        x_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(
            x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        )
        return constrain(x_BLD, ("batch", "length", "gathered")), cache


class Attention(nn.Module):
    """Causal self-attention. One kernel (D, 3, H, K) makes queries, keys and values, as the original's c_attn."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, cache_index, key):
        config, dtype = self.config, self.execution.compute_dtype()
        d, h = config.width, config.num_heads
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        names_in, names_out = ("width", "qkv", "heads", "head_width"), ("heads", "head_width", "width")
        kernel_in = self.param("qkv_kernel", with_axes(init, names_in), (d, 3, h, d // h))
        bias_in = self.param("qkv_bias", with_axes(zeros, names_in[1:]), (3, h, d // h))
        kernel_out = self.param("out_kernel", with_axes(init, names_out), (h, d // h, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))

        qkv = project(x_BLD, gathered(kernel_in, dtype, names_in), bias_in)  # (B, L, 3, H, K)
        q_BHLK, k_BHLK, v_BHLK = jnp.moveaxis(qkv, (2, 3), (0, 2))
        if cache is not None:
            at = (0, 0, cache_index, 0)
            cache = Cache(
                jax.lax.dynamic_update_slice(cache.k_NBHSK, k_BHLK.astype(cache.k_NBHSK.dtype), at),
                jax.lax.dynamic_update_slice(cache.v_NBHSK, v_BHLK.astype(cache.v_NBHSK.dtype), at),
            )
            k_BHLK, v_BHLK = cache.k_NBHSK, cache.v_NBHSK
        a_BHLK = attend(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            causal=True,
            segments_BL=segments_BL,
            query_offset=cache_index,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=key,
            backend=self.execution.attention,
        )
        a_BLD = jnp.swapaxes(a_BHLK, 1, 2).reshape(*x_BLD.shape)
        return project(a_BLD, gathered(kernel_out, dtype, names_out).reshape(d, d), bias_out), cache


class FeedForward(nn.Module):
    """Two layers with GELU in its tanh form between them (Hendrycks and Gimpel, 2016; original train.py:22)."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD):
        config, dtype = self.config, self.execution.compute_dtype()
        d, f = config.width, config.feed_forward_width
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        kernel_in = self.param("in_kernel", with_axes(init, ("width", "feed_forward")), (d, f))
        bias_in = self.param("in_bias", with_axes(zeros, ("feed_forward",)), (f,))
        kernel_out = self.param("out_kernel", with_axes(init, ("feed_forward", "width")), (f, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))
        h_BLF = project(x_BLD, gathered(kernel_in, dtype, ("width", "feed_forward")), bias_in)
        # Barriers keep XLA from fusing the GELU into the operands of the products, where it is made again and again.
        h_BLF = jax.lax.optimization_barrier(jax.nn.gelu(jax.lax.optimization_barrier(h_BLF), approximate=True))
        return project(h_BLF, gathered(kernel_out, dtype, ("feed_forward", "width")), bias_out)
