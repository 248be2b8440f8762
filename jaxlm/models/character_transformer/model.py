"""The character Transformer, T12 and T64: a deep decoder with learned positions before every layer.

Al-Rfou, Choe, Constant, Guo and Jones, "Character-level language modeling with deeper self-attention", 2019 (no code
was released). It differs from GPT in three ways: every layer adds a position table of its own to its input (section
3.2), the feed-forward has a ReLU, and the output layer is not tied to the token table. Dropout is applied to the
attention weights and after the ReLU. The paper does not state where the norms are; here they are before each branch and
at the end, as in GPT-2.

The losses of intermediate layers and of a second target belong to the training: `objective.intermediate_coefficient`
and `objective.second_target_coefficient`. Their classifiers are no part of the model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import constrain, with_axes
from jaxlm.models.character_transformer import CharacterTransformerConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.attention import attend
from jaxlm.nn.cross_entropy import UntiedOutput
from jaxlm.nn.execution import Execution, stacked
from jaxlm.nn.linear import embed, project, project_heads, project_to_heads
from jaxlm.nn.pointwise import LayerNorm, dropout, fold


def flops_per_token(config: CharacterTransformerConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward; causal attention sees half of the keys.

    The classifiers of auxiliary losses are not included.
    """
    per_layer = 4 * config.width**2 + 2 * config.width * config.feed_forward_width
    matrices = config.num_layers * per_layer + config.vocab_size * config.width
    return 6 * matrices + 12 * config.num_layers * config.width * length * 0.5


class Cache(NamedTuple):
    """Keys and values of the positions decoded so far, for all layers: (N, B, H, S, K) each."""

    k_NBHSK: jax.Array
    v_NBHSK: jax.Array


def empty_cache(config: CharacterTransformerConfig, rows: int, length: int, dtype: jnp.dtype) -> Cache:
    """Return a cache with room for `length` positions."""
    shape = (config.num_layers, rows, config.num_heads, length, config.width // config.num_heads)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class CharacterTransformer(nn.Module):
    """The decoder of T12 and T64."""

    config: CharacterTransformerConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules."""
        config, execution = self.config, self.execution
        self.embeddings = Embeddings(config, execution)
        in_axes = (nn.broadcast, nn.broadcast, 0, nn.broadcast, nn.broadcast)
        self.blocks = stacked(Block, config.num_layers, execution, in_axes=in_axes, static=(5, 6))(config, execution)
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
        return constrain(embed(tokens_VD, ids_BL, names, self.execution), _STATES)


class Block(nn.Module):
    """Positions, attention and feed-forward: x + p, then x + a(norm(x)), then x + m(norm(x))."""

    config: CharacterTransformerConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, positions_BL, segments_BL, cache, train: bool, keep: bool):
        config, names = self.config, ("positions", "width")
        key = self.make_rng("dropout") if train else None
        init = with_axes(nn.initializers.normal(config.init_std), names)
        positions_PD = self.param("positions", init, (config.num_positions, config.width))
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names, self.execution)
        n_BLD = LayerNorm(config.norm_eps, name="attention_norm")(x_BLD)
        a_BLD, cache = Attention(config, self.execution, name="attention")(
            n_BLD, segments_BL, cache, positions_BL[:, 0], fold(key, 0)
        )
        x_BLD = x_BLD + a_BLD
        n_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(x_BLD)
        x_BLD = x_BLD + FeedForward(config, self.execution, name="feed_forward")(n_BLD, fold(key, 1))
        x_BLD = constrain(x_BLD, _STATES)
        return x_BLD, (cache, x_BLD if keep else None)


class Attention(nn.Module):
    """Causal self-attention. One kernel (D, 3, H, K) computes queries, keys and values."""

    config: CharacterTransformerConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, cache, first_B, key):
        config = self.config
        d, h = config.width, config.num_heads
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        names_in, names_out = ("width", "qkv", "heads", "head_width"), ("heads", "head_width_in", "whole_width")
        kernel_in = self.param("qkv_kernel", with_axes(init, names_in), (d, 3, h, d // h))
        bias_in = self.param("qkv_bias", with_axes(zeros, names_in[1:]), (3, h, d // h))
        kernel_out = self.param("out_kernel", with_axes(init, names_out), (h, d // h, d))
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
    """Two layers with a ReLU and dropout between them."""

    config: CharacterTransformerConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, key):
        config = self.config
        d, f = config.width, config.feed_forward_width
        init, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        names_in, names_out = ("width", "feed_forward"), ("feed_forward_in", "whole_width")
        kernel_in = self.param("in_kernel", with_axes(init, names_in), (d, f))
        bias_in = self.param("in_bias", with_axes(zeros, ("feed_forward",)), (f,))
        kernel_out = self.param("out_kernel", with_axes(init, names_out), (f, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))
        h_BLF = jax.nn.relu(project(x_BLD, kernel_in, bias_in, names_in, self.execution))
        h_BLF = dropout(h_BLF, config.relu_dropout_rate, key)
        return project(h_BLF, kernel_out, bias_out, names_out, self.execution)


_STATES = ("batch", "length", "whole_width")


def output_layer(config: CharacterTransformerConfig) -> UntiedOutput:
    """Return the classifier of the last layer's states."""
    return UntiedOutput(config.vocab_size, config.width, config.init_std)


ARITHMETIC = Arithmetic(
    module=CharacterTransformer,
    output_layer=output_layer,
    flops_per_token=flops_per_token,
    decoding_carry=empty_cache,
)
