"""GPT-1 and GPT-2, decoders of Transformer blocks with learned positions and a tied output.

Radford, Narasimhan, Salimans and Sutskever, "Improving Language Understanding by Generative Pre-Training", 2018
(openai/finetune-transformer-lm): a norm after each residual sum, and none at the end. Radford, Wu, Child, Luan, Amodei
and Sutskever, "Language Models are Unsupervised Multitask Learners", 2019 (openai/gpt-2): a norm before each branch,
and one more at the end. Unlike BERT both are causal and have neither a segment embedding nor a norm after the
embedding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.adaptive_softmax import AdaptiveOutput, Tables, embed_tokens, make_tables
from jaxlm.nn.adaptive_softmax import matrices as vocabulary_matrices
from jaxlm.nn.config import Execution
from jaxlm.nn.linear import embed
from jaxlm.nn.pointwise import LayerNorm, dropout, fold
from jaxlm.nn.transformer import Cache, FeedForward, SelfAttention, empty_cache, stacked


def flops_per_token(config: GPTConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward; causal attention sees half of the keys."""
    per_layer = 4 * config.width**2 + 2 * config.width * config.feed_forward_width
    matrices = config.num_layers * per_layer + vocabulary_matrices(config.vocab_size, config.width, config.adaptive)
    return 6 * matrices + 12 * config.num_layers * config.width * length * 0.5


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
        """Return states, and as `output` the tables that score the next token.

        With config.tables `one` they are one table (V + P, D): rows of tokens, then rows of positions.
        carry: keys and values of the preceding tokens, for decoding: each row is one sequence, for any segments, and
        its tokens are at consecutive positions from the row's first one on.
        """
        x_BLD, output = self.embeddings(inputs.ids, inputs.positions, train)
        segments_BL, first_B = (inputs.segments, None) if carry is None else (None, inputs.positions[:, 0])
        h_BLD, (carry, layers_NBLD) = self.blocks(x_BLD, segments_BL, carry, first_B, train, layers)
        if self.config.norm == "pre":
            h_BLD = self.final_norm(h_BLD)
        hidden = jnp.concatenate([x_BLD[None], layers_NBLD[:-1], h_BLD[None]]) if layers else None
        return Outputs(h_BLD, hidden, carry, output)


class Embeddings(nn.Module):
    """The table of tokens (V, D), special ones included, or tables of its clusters, and that of positions (P, D)."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL, positions_BL, train: bool) -> tuple[jax.Array, Tables]:
        """Return the sum of both embeddings with dropout, (B, L, D), and the inputs of `AdaptiveOutput`."""
        config = self.config
        key, rate = self.make_rng("dropout") if train else None, config.embedding_dropout_rate
        # GPT-2's code initializes positions with half the deviation (model.py:152-155).
        spread = config.init_std / 2 if config.norm == "pre" else config.init_std
        init, narrow = nn.initializers.normal(config.init_std), nn.initializers.normal(spread)
        names_P = ("positions", "width")
        tables = make_tables(self, config.vocab_size, config.width, config.adaptive, init, bias=False)
        positions_PD = self.param("positions", with_axes(narrow, names_P), (config.num_positions, config.width))
        if config.tables == "one":  # and one cluster
            tables = tables._replace(tokens=(dropout(tables.tokens[0], rate, fold(key, 0)),))
            positions_PD = dropout(positions_PD, rate, fold(key, 1))
        x_BLD = embed_tokens(tables, ids_BL, self.execution)
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names_P, self.execution)
        if config.tables == "one":
            tables = tables._replace(tokens=(jnp.concatenate([tables.tokens[0], positions_PD]),))
        else:
            x_BLD = dropout(x_BLD, rate, fold(key, 2))
        return constrain(x_BLD, ("batch", "length", "whole_width")), tables


class Block(nn.Module):
    """Attention and feed-forward, each followed by residual sum and norm: n = norm(x + a(x)), norm(n + m(n))."""

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, train: bool, keep: bool):
        config = self.config
        key = self.make_rng("dropout") if train else None
        a_BLD, cache = _attention(config, self.execution)(x_BLD, segments_BL, fold(key, 0), cache, first_B)
        x_BLD = LayerNorm(config.norm_eps, name="attention_norm")(
            x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        )
        m_BLD = _feed_forward(config, self.execution)(x_BLD)
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
        a_BLD, cache = _attention(config, self.execution)(n_BLD, segments_BL, fold(key, 0), cache, first_B)
        x_BLD = x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        n_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(x_BLD)
        m_BLD = _feed_forward(config, self.execution)(n_BLD)
        x_BLD = x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        x_BLD = constrain(x_BLD, ("batch", "length", "whole_width"))
        return x_BLD, (cache, x_BLD if keep else None)


def _attention(config: GPTConfig, execution: Execution) -> SelfAttention:
    init = nn.initializers.normal(config.init_std)
    return SelfAttention(config, execution, init, _branch_end(config), name="attention")


def _feed_forward(config: GPTConfig, execution: Execution) -> FeedForward:
    init = nn.initializers.normal(config.init_std)
    return FeedForward(config, execution, config.activation, init, _branch_end(config), name="feed_forward")


def _branch_end(config: GPTConfig) -> Any:
    """Return the initializer of a residual branch's output projection."""
    scale = (2 * config.num_layers) ** -0.5 if config.residual_init == "scaled" else 1.0
    return nn.initializers.normal(config.init_std * scale)


ARITHMETIC = Arithmetic(
    module=GPT,
    output_layer=lambda config: AdaptiveOutput(config.adaptive),
    flops_per_token=flops_per_token,
    decoding_carry=empty_cache,
)
