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
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, LayerNorm, dropout, embed, fold
from jaxlm.nn.output import AdaptiveOutput, Tables, embed_tokens, make_tables, vocabulary_matrices
from jaxlm.nn.transformer import Cache, FeedForward, SelfAttention, empty_cache, stacked, transformer_flops


class GPT(nn.Module):
    """The decoder of GPT-1 and GPT-2."""

    config: GPTConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution = self.config, self.execution
        self.embeddings = Embeddings(config, execution)
        in_axes = (nn.broadcast, 0, nn.broadcast, nn.broadcast, nn.broadcast)
        self.blocks = stacked(Block, config, execution, in_axes=in_axes, static=(5, 6))
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
        tables = make_tables(self, config, init)
        positions_PD = self.param("positions", with_axes(narrow, names_P), (config.num_positions, config.width))
        if config.tables == "one":  # and one cluster
            tables = tables._replace(tokens=(dropout(tables.tokens[0], rate, fold(key, 0), of_rows=False),))
            positions_PD = dropout(positions_PD, rate, fold(key, 1), of_rows=False)
        x_BLD = embed_tokens(tables, ids_BL, self.execution)
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names_P, self.execution)
        if config.tables == "one":
            tables = tables._replace(tokens=(jnp.concatenate([tables.tokens[0], positions_PD]),))
        else:
            x_BLD = dropout(x_BLD, rate, fold(key, 2))
        return constrain(x_BLD, STATES), tables


class Block(nn.Module):
    """Attention and feed-forward, each with a residual sum and a norm.

    norm post: n = norm(x + a(x)), norm(n + m(n)). pre: x + a(norm(x)), x + m(norm(x)).
    """

    config: GPTConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, train: bool, keep: bool):
        config, pre = self.config, self.config.norm == "pre"
        key = self.make_rng("dropout") if train else None
        init, end = nn.initializers.normal(config.init_std), _branch_end(config)
        attention_norm = LayerNorm(config.norm_eps, name="attention_norm")
        feed_forward_norm = LayerNorm(config.norm_eps, name="feed_forward_norm")
        attention = SelfAttention(config, self.execution, init, end, name="attention")
        feed_forward = FeedForward(config, self.execution, config.activation, init, end, name="feed_forward")

        n_BLD = attention_norm(x_BLD) if pre else x_BLD
        a_BLD, cache = attention(n_BLD, segments_BL, fold(key, 0), cache, first_B)
        x_BLD = x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        x_BLD = x_BLD if pre else attention_norm(x_BLD)
        m_BLD = feed_forward(feed_forward_norm(x_BLD) if pre else x_BLD)
        x_BLD = x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        x_BLD = constrain(x_BLD if pre else feed_forward_norm(x_BLD), STATES)
        return x_BLD, (cache, x_BLD if keep else None)


def _branch_end(config: GPTConfig) -> Any:
    """Return the initializer of a residual branch's output projection."""
    scale = (2 * config.num_layers) ** -0.5 if config.residual_init == "scaled" else 1.0
    return nn.initializers.normal(config.init_std * scale)


ARITHMETIC = Arithmetic(
    module=GPT,
    output_layer=lambda config: AdaptiveOutput(config.adaptive),
    flops_per_token=lambda config, length, predicted: transformer_flops(config, length, vocabulary_matrices(config)),
    decoding_carry=empty_cache,
)
