"""The character Transformer, T12 and T64: a deep decoder with learned positions before every layer.

Al-Rfou, Choe, Constant, Guo and Jones, "Character-level language modeling with deeper self-attention", 2019 (no code
was released). It differs from GPT in three ways: every layer adds a position table of its own to its input (section
3.2), the feed-forward has a ReLU, and the output layer is not tied to the token table. Dropout is applied to the
attention weights and after the ReLU. The paper does not state where the norms are; here they are before each branch and
at the end, as in GPT-2.

The losses of intermediate layers and of a second target belong to the training: `objective.intermediate_coefficient`
and `objective.second_target_coefficient`. Their classifiers are no part of the model.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.character_transformer import CharacterTransformerConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, LayerNorm, embed, fold
from jaxlm.nn.output import UntiedOutput
from jaxlm.nn.transformer import Cache, FeedForward, SelfAttention, empty_cache, stacked, transformer_flops


class CharacterTransformer(nn.Module):
    """The decoder of T12 and T64."""

    config: CharacterTransformerConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution = self.config, self.execution
        self.embeddings = Embeddings(config, execution)
        in_axes = (nn.broadcast, nn.broadcast, 0, nn.broadcast, nn.broadcast)
        self.blocks = stacked(Block, config, execution, in_axes=in_axes, static=(5, 6))
        self.final_norm = LayerNorm(config.norm_eps)

    def __call__(
        self, inputs: Inputs, carry: Cache | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states. The output layer needs no arrays of the pass, and `output` is None.

        carry: keys and values of the preceding tokens, for decoding: each row is one sequence, for any segments, and
        its tokens are at consecutive positions from the row's first one on.
        """
        x_BLD = self.embeddings(inputs.ids)
        segments_BL = inputs.segments if carry is None else None
        h_BLD, (carry, layers_NBLD) = self.blocks(x_BLD, inputs.positions, segments_BL, carry, train, layers)
        h_BLD = self.final_norm(h_BLD)
        hidden = jnp.concatenate([x_BLD[None], layers_NBLD[:-1], h_BLD[None]]) if layers else None
        return Outputs(h_BLD, hidden, carry, None)


class Embeddings(nn.Module):
    """The token table (V, D). Positions are added by the blocks."""

    config: CharacterTransformerConfig
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL: jax.Array) -> jax.Array:
        config, names = self.config, ("vocabulary", "width")
        init = with_axes(nn.initializers.normal(config.init_std), names)
        tokens_VD = self.param("tokens", init, (config.vocab_size, config.width))
        return constrain(embed(tokens_VD, ids_BL, names, self.execution), STATES)


class Block(nn.Module):
    """Positions, attention and feed-forward: x + p, then x + a(norm(x)), then x + m(norm(x))."""

    config: CharacterTransformerConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, positions_BL, segments_BL, cache, train: bool, keep: bool):
        config, execution, names = self.config, self.execution, ("positions", "width")
        key = self.make_rng("dropout") if train else None
        init = nn.initializers.normal(config.init_std)
        positions_PD = self.param("positions", with_axes(init, names), (config.num_positions, config.width))
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names, execution)
        n_BLD = LayerNorm(config.norm_eps, name="attention_norm")(x_BLD)
        attention = SelfAttention(config, execution, init, init, name="attention")
        a_BLD, cache = attention(n_BLD, segments_BL, fold(key, 0), cache, positions_BL[:, 0])
        x_BLD = x_BLD + a_BLD
        n_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(x_BLD)
        rate = config.relu_dropout_rate
        feed_forward = FeedForward(config, execution, "relu", init, init, rate, name="feed_forward")
        x_BLD = x_BLD + feed_forward(n_BLD, fold(key, 1))
        x_BLD = constrain(x_BLD, STATES)
        return x_BLD, (cache, x_BLD if keep else None)


def flops_per_token(config: CharacterTransformerConfig, length: int, predicted: float | None) -> float:
    """Return the FLOPs of a training step per token, without the classifiers of auxiliary losses."""
    return transformer_flops(config, length, config.vocab_size * config.width)


ARITHMETIC = Arithmetic(
    module=CharacterTransformer,
    output_layer=lambda config: UntiedOutput(config.vocab_size, config.width, config.init_std),
    flops_per_token=flops_per_token,
    decoding_carry=empty_cache,
)
