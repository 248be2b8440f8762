"""GPT-1 and GPT-2, decoders of Transformer blocks with learned positions and a tied output.

Radford, Narasimhan, Salimans and Sutskever, "Improving Language Understanding by Generative Pre-Training", 2018
(openai/finetune-transformer-lm): a norm after each residual sum, and none at the end. Radford, Wu, Child, Luan, Amodei
and Sutskever, "Language Models are Unsupervised Multitask Learners", 2019 (openai/gpt-2): a norm before each branch,
and one more at the end. Unlike BERT both are causal and have neither a segment embedding nor a norm after the
embedding.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import constrain, with_axes
from jaxlm.errors import InputError
from jaxlm.models.family import Family, Inputs, Outputs
from jaxlm.nn.attention import attend
from jaxlm.nn.cross_entropy import TiedOutput
from jaxlm.nn.execution import Execution, stacked
from jaxlm.nn.linear import embed, project, project_heads, project_to_heads
from jaxlm.nn.pointwise import ActivationName, LayerNorm, activate, check_rate, dropout, fold


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a GPT: sizes, dropout rates, norms and initialization."""

    kind: Literal["gpt"] = "gpt"
    vocab_size: int = 0
    """Rows of the token table, special tokens included. Default 0: taken from the store's tokenizer."""
    num_positions: int = 512
    """Rows of the position table, the length of the longest sequence."""
    num_layers: int = 12
    """Number of Transformer blocks."""
    width: int = 768
    """Width of the states and the embeddings, D. It must be divisible by num_heads."""
    num_heads: int = 12
    """Attention heads per block."""
    feed_forward_width: int = 3072
    """Width of the hidden layer of each feed-forward."""
    dropout_rate: float = 0.1
    """Dropout rate of each residual branch."""
    embedding_dropout_rate: float = 0.1
    """Dropout rate of the sum of the embeddings."""
    attention_dropout_rate: float = 0.1
    """Dropout rate of the attention weights."""
    norm: Literal["post", "pre"] = "post"
    """Position of the norms. post: after each residual sum (GPT-1). pre: before each branch and at the end (GPT-2)."""
    activation: ActivationName = "gelu_tanh"
    """Activation of the feed-forward. gelu_tanh: the tanh approximation. gelu_erf: exact."""
    tables: Literal["two", "one"] = "two"
    """two: separate token and position tables, as in the paper. one: a joint table, as in GPT-1's original code. Its
    dropout is applied to the table, and the softmax includes the rows of the positions (train.py:149-178)."""
    init_std: float = 0.02
    """Standard deviation of all initial weights. 0.02 is the papers' for width 768. Use 0.02 sqrt(768 / D) for a
    narrow model."""
    residual_init: Literal["plain", "scaled"] = "plain"
    """Initialization of residual output projections. scaled: std init_std / sqrt(2 N) (GPT-2, section 2.3). plain:
    std init_std, as in both original codes."""
    norm_eps: float = 1e-5
    """Constant added to the variance in norms."""

    def check(self) -> None:
        """Raise InputError for sizes and rates that no model can have."""
        for name in ("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"):
            check_rate(f"model.{name}", getattr(self, name))
        for name in ("num_positions", "num_layers", "width", "num_heads", "feed_forward_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} must be above 0, got {getattr(self, name)}; give at least 1")
        if self.width % self.num_heads:
            raise InputError(
                f"model.width must be divisible by model.num_heads {self.num_heads}, got {self.width}; change one"
            )


# Section 4.1. The published vocabulary has 40,478 entries (40,000 merges); fine-tuning adds three.
GPT1 = GPTConfig(vocab_size=40_478)

# GPT-2's table 2, smallest to largest (its counts, 117M and 345M, are of the models with 124M and 355M parameters).
GPT2 = GPTConfig(vocab_size=50_257, num_positions=1024, norm="pre", residual_init="scaled")
GPT2_MEDIUM = replace(GPT2, num_layers=24, width=1024, num_heads=16, feed_forward_width=4096)
GPT2_LARGE = replace(GPT2, num_layers=36, width=1280, num_heads=20, feed_forward_width=5120)
GPT2_XL = replace(GPT2, num_layers=48, width=1600, num_heads=25, feed_forward_width=6400)


def flops_per_token(config: GPTConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward; causal attention sees half of the keys."""
    per_layer = 4 * config.width**2 + 2 * config.width * config.feed_forward_width
    matrices = config.num_layers * per_layer + config.vocab_size * config.width
    return 6 * matrices + 12 * config.num_layers * config.width * length * 0.5


class Cache(NamedTuple):
    """Keys and values of the positions decoded so far, for all layers: (N, B, H, S, K) each."""

    k_NBHSK: jax.Array
    v_NBHSK: jax.Array


def empty_cache(config: GPTConfig, batch_size: int, length: int, dtype: jnp.dtype) -> Cache:
    """Return a cache with room for `length` positions."""
    head_width = config.width // config.num_heads
    shape = (config.num_layers, batch_size, config.num_heads, length, head_width)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class GPT(nn.Module):
    """The decoder of GPT-1 and GPT-2."""

    config: GPTConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution = self.config, self.execution
        self.embeddings = Embeddings(config, execution)
        block = PreNormBlock if config.norm == "pre" else Block
        in_axes = (nn.broadcast, 0, nn.broadcast, nn.broadcast, nn.broadcast)
        self.blocks = stacked(block, config.num_layers, execution, in_axes=in_axes, static=(5, 6))(config, execution)
        if config.norm == "pre":
            self.final_norm = LayerNorm(config.norm_eps)

    def __call__(
        self, inputs: Inputs, carry: Cache | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states, and as `output` the float32 table (V, D) that scores the next token.

        The table has the tokens' rows; with config.tables `one` the positions' rows follow, (V + P, D). carry: keys and
        values of the preceding tokens, for decoding: each row is one sequence, for any segments, and its tokens are at
        consecutive positions from the row's first one on.
        """
        x_BLD, table_VD = self.embeddings(inputs.ids, inputs.positions, train)
        segments_BL, first_B = (inputs.segments, None) if carry is None else (None, inputs.positions[:, 0])
        h_BLD, (carry, layers_NBLD) = self.blocks(x_BLD, segments_BL, carry, first_B, train, layers)
        if self.config.norm == "pre":
            h_BLD = self.final_norm(h_BLD)
        hidden = jnp.concatenate([x_BLD[None], layers_NBLD[:-1], h_BLD[None]]) if layers else None
        return Outputs(h_BLD, hidden, carry, table_VD)


class Embeddings(nn.Module):
    """The two tables, tokens (V, D), special ones included, and positions (P, D), summed, with dropout."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL, positions_BL, train: bool) -> tuple[jax.Array, jax.Array]:
        config = self.config
        key, rate = self.make_rng("dropout") if train else None, config.embedding_dropout_rate
        # GPT-2's code initializes positions with half the deviation (model.py:152-155).
        spread = config.init_std / 2 if config.norm == "pre" else config.init_std
        init, narrow = nn.initializers.normal(config.init_std), nn.initializers.normal(spread)
        names_V, names_P = ("vocabulary", "width"), ("positions", "width")
        tokens_VD = self.param("tokens", with_axes(init, names_V), (config.vocab_size, config.width))
        positions_PD = self.param("positions", with_axes(narrow, names_P), (config.num_positions, config.width))
        if config.tables == "one":
            tokens_VD, positions_PD = dropout(tokens_VD, rate, fold(key, 0)), dropout(positions_PD, rate, fold(key, 1))
        x_BLD = embed(tokens_VD, ids_BL, names_V, self.execution)
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names_P, self.execution)
        if config.tables == "one":
            tokens_VD = jnp.concatenate([tokens_VD, positions_PD])
        else:
            x_BLD = dropout(x_BLD, rate, fold(key, 2))
        return constrain(x_BLD, ("batch", "length", "whole_width")), tokens_VD


class Block(nn.Module):
    """Attention and feed-forward, each followed by residual sum and norm: n = norm(x + a(x)), norm(n + m(n))."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, train: bool, keep: bool):
        config = self.config
        key = self.make_rng("dropout") if train else None
        a_BLD, cache = Attention(config, self.execution, name="attention")(
            x_BLD, segments_BL, cache, first_B, fold(key, 0)
        )
        x_BLD = LayerNorm(config.norm_eps, name="attention_norm")(
            x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        )
        m_BLD = FeedForward(config, self.execution, name="feed_forward")(x_BLD)
        x_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(
            x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        )
        x_BLD = constrain(x_BLD, ("batch", "length", "whole_width"))
        return x_BLD, (cache, x_BLD if keep else None)


class PreNormBlock(nn.Module):
    """Attention and feed-forward of the normed states, each with a residual sum: x + a(norm(x)), x + m(norm(x))."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, train: bool, keep: bool):
        config = self.config
        key = self.make_rng("dropout") if train else None
        n_BLD = LayerNorm(config.norm_eps, name="attention_norm")(x_BLD)
        a_BLD, cache = Attention(config, self.execution, name="attention")(
            n_BLD, segments_BL, cache, first_B, fold(key, 0)
        )
        x_BLD = x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        n_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(x_BLD)
        m_BLD = FeedForward(config, self.execution, name="feed_forward")(n_BLD)
        x_BLD = x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        x_BLD = constrain(x_BLD, ("batch", "length", "whole_width"))
        return x_BLD, (cache, x_BLD if keep else None)


class Attention(nn.Module):
    """Causal self-attention. One kernel (D, 3, H, K) computes queries, keys and values, as the original's c_attn."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, key):
        config = self.config
        d, h = config.width, config.num_heads
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        names_in, names_out = ("width", "qkv", "heads", "head_width"), ("heads", "head_width_in", "whole_width")
        kernel_in = self.param("qkv_kernel", with_axes(init, names_in), (d, 3, h, d // h))
        bias_in = self.param("qkv_bias", with_axes(zeros, names_in[1:]), (3, h, d // h))
        kernel_out = self.param("out_kernel", with_axes(_branch_end(config), names_out), (h, d // h, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))

        q_BHLK, k_BHLK, v_BHLK = (
            project_to_heads(x_BLD, kernel_in[:, part], bias_in[part], names_in[:1] + names_in[2:], self.execution)
            for part in range(3)
        )
        if cache is not None:
            cache = Cache(_put(cache.k_NBHSK, k_BHLK, first_B), _put(cache.v_NBHSK, v_BHLK, first_B))
            k_BHLK, v_BHLK = cache.k_NBHSK, cache.v_NBHSK
        a_BHLK = attend(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            causal=True,
            segments_BL=segments_BL,
            query_offset=0 if cache is None else first_B,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=key,
            backend=self.execution.attention,
        )
        return project_heads(a_BHLK, kernel_out, bias_out, names_out, self.execution), cache


def _put(kept_BHSK: jax.Array, new_BHLK: jax.Array, first_B: jax.Array) -> jax.Array:
    """Return the cache of a layer with new keys or values from position first_B of each row on."""

    def put(kept_HSK, new_HLK, first):
        return jax.lax.dynamic_update_slice(kept_HSK, new_HLK.astype(kept_HSK.dtype), (0, first, 0))

    return jax.vmap(put)(kept_BHSK, new_BHLK, first_B)


class FeedForward(nn.Module):
    """Two layers with the config's activation between them."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD):
        config = self.config
        d, f = config.width, config.feed_forward_width
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        names_in, names_out = ("width", "feed_forward"), ("feed_forward_in", "whole_width")
        kernel_in = self.param("in_kernel", with_axes(init, names_in), (d, f))
        bias_in = self.param("in_bias", with_axes(zeros, ("feed_forward",)), (f,))
        kernel_out = self.param("out_kernel", with_axes(_branch_end(config), names_out), (f, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))
        h_BLF = activate(project(x_BLD, kernel_in, bias_in, names_in, self.execution), config.activation)
        return project(h_BLF, kernel_out, bias_out, names_out, self.execution)


def _branch_end(config: GPTConfig) -> Any:
    """Return the initializer of a residual branch's output projection."""
    scale = (2 * config.num_layers) ** -0.5 if config.residual_init == "scaled" else 1.0
    return nn.initializers.normal(config.init_std * scale)


FAMILY = Family(
    name="gpt",
    title="a decoder (gpt)",
    config=GPTConfig,
    module=GPT,
    output_layer=lambda config: TiedOutput(),
    context="causal",
    input_format="gpt1",
    flops_per_token=flops_per_token,
    max_length=lambda config: config.num_positions,
    sizes={"gpt1": GPT1, "gpt2": GPT2},
    vocab_size=GPT1.vocab_size,
    finetuning_rate=6.25e-5,  # section 4.1
    decoding_carry=empty_cache,
)
