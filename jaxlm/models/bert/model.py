"""BERT, an encoder of post-norm Transformer blocks over pairs of segments.

Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
2019 (google-research/bert, modeling.py). Unlike GPT-1 it attends to both sides, adds a segment-type embedding, norms
the embeddings' sum, initializes from a truncated normal, and has a pooler over the first token. `attention="causal"` is
the paper's left-to-right ablation: the same encoder with a causal mask (section 5.1).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.bert import BertConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, LayerNorm, activate, dropout, embed, fold, gathered, linear, linear_head, project
from jaxlm.nn.output import Penalty, num_loss_chunks, projected_cross_entropy
from jaxlm.nn.transformer import FeedForward, SelfAttention, stacked, transformer_flops


def flops_per_token(config: BertConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward.

    predicted: the fraction of positions that the output layer scores; None: the original's, 15 % of `length` in whole
    tokens, or all of them with a causal mask, under which attention uses half of the keys.
    """
    causal = config.attention == "causal"
    if predicted is None:
        predicted = 1.0 if causal else max(1, round(0.15 * length)) / length
    vocabulary = predicted * config.vocab_size * config.width
    return transformer_flops(config, length, vocabulary, seen=0.5 if causal else 1.0)


class Bert(nn.Module):
    """The encoder of BERT."""

    config: BertConfig
    execution: Execution = Execution()

    def setup(self) -> None:
        """Create the submodules; `pool` and the full pass share the pooler."""
        config = self.config
        self.embeddings = Embeddings(config, self.execution)
        in_axes = (nn.broadcast, nn.broadcast, nn.broadcast)
        self.blocks = stacked(Block, config, self.execution, in_axes=in_axes, static=(3, 4))
        self.pooler = Pooler(config, self.execution)

    def __call__(self, inputs: Inputs, carry: None = None, *, train: bool = False, layers: bool = False) -> Outputs:
        """Return states, and as `output` the float32 token table (V, D) that scores masked tokens."""
        x_BLD, table_VD = self.embeddings(inputs.ids, inputs.positions, inputs.token_type_ids, train)
        h_BLD, layers_NBLD = self.blocks(x_BLD, inputs.segments, train, layers)
        if self.is_initializing():
            self.pooler(h_BLD[:, 0])
        hidden = jnp.concatenate([x_BLD[None], layers_NBLD]) if layers else None
        return Outputs(h_BLD, hidden, None, table_VD)

    def pool(self, first_BD: jax.Array) -> jax.Array:
        """Return the pooled representation of sequences (…, D) from the states of their first tokens (…, D)."""
        return self.pooler(first_BD)


class Embeddings(nn.Module):
    """Token, position and type tables, summed, normed, with dropout (modeling.py:428-521)."""

    config: BertConfig
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL, positions_BL, types_BL, train: bool) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, self.execution.compute_dtype()
        init, d = nn.initializers.truncated_normal(config.init_std), config.width
        names_V, names_P, names_Y = ("vocabulary", "width"), ("positions", "width"), ("types", "width")
        tokens_VD = self.param("tokens", with_axes(init, names_V), (config.vocab_size, d))
        positions_PD = self.param("positions", with_axes(init, names_P), (config.num_positions, d))
        types_YD = gathered(self.param("types", with_axes(init, names_Y), (config.num_types, d)), dtype, names_Y)
        x_BLD = embed(tokens_VD, ids_BL, names_V, self.execution)
        x_BLD = x_BLD + embed(positions_PD, positions_BL, names_P, self.execution)
        if types_BL is None:
            x_BLD = x_BLD + types_YD[0]
        else:  # a product, because the gradient of a gather would add all tokens to two rows sequentially
            one_hot_BLY = jax.nn.one_hot(types_BL, config.num_types, dtype=dtype)
            x_BLD = x_BLD + jnp.einsum("bly,yd->bld", one_hot_BLY, types_YD, precision="highest")
        x_BLD = LayerNorm(config.norm_eps, name="norm")(x_BLD)
        x_BLD = dropout(x_BLD, config.embedding_dropout_rate, self.make_rng("dropout") if train else None)
        return constrain(x_BLD, STATES), tokens_VD


class Block(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual sum and norm (modeling.py:857-881)."""

    config: BertConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, segments_BL, train: bool, keep: bool):
        config, execution = self.config, self.execution
        key = self.make_rng("dropout") if train else None
        init = nn.initializers.truncated_normal(config.init_std)
        attention = SelfAttention(config, execution, init, init, config.attention == "causal", name="attention")
        a_BLD, _ = attention(x_BLD, segments_BL, fold(key, 0))
        x_BLD = LayerNorm(config.norm_eps, name="attention_norm")(
            x_BLD + dropout(a_BLD, config.dropout_rate, fold(key, 1))
        )
        m_BLD = FeedForward(config, execution, config.activation, init, init, name="feed_forward")(x_BLD)
        x_BLD = LayerNorm(config.norm_eps, name="feed_forward_norm")(
            x_BLD + dropout(m_BLD, config.dropout_rate, fold(key, 2))
        )
        x_BLD = constrain(x_BLD, STATES)
        return x_BLD, x_BLD if keep else None


class Pooler(nn.Module):
    """A dense layer with tanh over the state of the first token (modeling.py:224-232)."""

    config: BertConfig
    execution: Execution

    @nn.compact
    def __call__(self, first_BD: jax.Array) -> jax.Array:
        config, dtype, names = self.config, self.execution.compute_dtype(), ("width", "pooled")
        init, zeros = nn.initializers.truncated_normal(config.init_std), nn.initializers.zeros_init()
        kernel = self.param("kernel", with_axes(init, names), (config.width, config.width))
        bias = self.param("bias", with_axes(zeros, ("pooled",)), (config.width,))
        return jnp.tanh(project(first_BD.astype(dtype), kernel, bias, names, self.execution))


class MaskedLMHead(nn.Module):
    """The transformation of the states of masked tokens before the tied table (run_pretraining.py:240-282).

    A dense layer, the model's activation and a norm; the logits h table^T + bias are computed within the loss.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, states_BMD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map gathered states (B, M, D) to (B, M, D) in the same dtype and the output's bias (V,)."""
        config, names = self.config, ("width", "transform")
        init, zeros = nn.initializers.truncated_normal(config.init_std), nn.initializers.zeros_init()
        kernel = self.param("kernel", with_axes(init, names), (config.width, config.width))
        bias = self.param("bias", with_axes(zeros, ("transform",)), (config.width,))
        output_bias = self.param("output_bias", with_axes(zeros, ("vocabulary",)), (config.vocab_size,))
        h_BMD = activate(linear(states_BMD, gathered(kernel, states_BMD.dtype, names), bias), config.activation)
        return LayerNorm(config.norm_eps, name="norm")(h_BMD), output_bias


class NextSentenceHead(nn.Module):
    """Next-sentence scores of pooled states (…, D): float32 (…, 2), 0 is IsNext (run_pretraining.py:285-305)."""

    init_std: float

    @nn.compact
    def __call__(self, pooled_BPD: jax.Array) -> jax.Array:
        return linear_head(self, pooled_BPD, 2, self.init_std)


class MaskedLMOutput:
    """The output layer of the masked language model: `MaskedLMHead`, then the tied table and a bias."""

    def __init__(self, config: BertConfig) -> None:
        self.head, self.width = MaskedLMHead(config), config.width

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return the head's parameters, as {"masked_lm": …}."""
        return {"masked_lm": self.head.init(key, jnp.zeros((1, 1, self.width)))["params"]}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True if the head is there; fine-tuned models have a different one."""
        return "masked_lm" in params.get("head", {})

    def logits(self, params: Any, states: jax.Array, output: jax.Array) -> jax.Array:
        h, bias_V = self._transformed(params, states)
        return jnp.dot(h, output.T.astype(h.dtype), preferred_element_type=jnp.float32) + bias_V

    def loss(
        self,
        params: Any,
        states: Any,
        output: Any,
        targets: Any,
        weights: Any,
        chunks: int = 0,
        penalty: Penalty | None = None,
    ):
        """Return the sums of `projected_cross_entropy`.

        If `chunks` does not divide the number of positions M, positions of weight 0 are added.
        """
        h_BMD, bias_V = self._transformed(params, states)
        rows, length, _ = h_BMD.shape
        chunks = min(num_loss_chunks(chunks, rows, length, output), length)
        if extra := -length % chunks:
            h_BMD = jnp.pad(h_BMD, ((0, 0), (0, extra), (0, 0)))
            targets, weights = (jnp.pad(x, ((0, 0), (0, extra))) for x in (targets, weights))
        return projected_cross_entropy(h_BMD, output, targets, weights, chunks, bias_V, penalty)

    def _transformed(self, params: Any, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        found: Any = self.head.apply({"params": params["head"]["masked_lm"]}, states)
        return found


ARITHMETIC = Arithmetic(
    module=Bert,
    output_layer=MaskedLMOutput,
    flops_per_token=flops_per_token,
    next_sentence_head=lambda config: NextSentenceHead(config.init_std),
)
