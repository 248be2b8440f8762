"""What stands on a model's states for one task: small modules with parameters of their own."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import with_axes
from jaxlm.models.bert import BertConfig
from jaxlm.nn.activation import activate
from jaxlm.nn.dropout import dropout
from jaxlm.nn.linear import gathered, linear
from jaxlm.nn.lstm import BiLSTM
from jaxlm.nn.norm import LayerNorm


def take_states(h_ECLD: jax.Array, where_EC: jax.Array) -> jax.Array:
    """The state at one position of each sequence: (E, C, L, D) and indices (E, C) give (E, C, D)."""
    return jnp.take_along_axis(h_ECLD, where_EC[:, :, None, None], axis=2)[:, :, 0]


def take_places(h_BLD: jax.Array, where_BM: jax.Array) -> jax.Array:
    """The states at M places of each row: (B, L, D) and indices (B, M) give (B, M, D)."""
    return jnp.take_along_axis(h_BLD, where_BM[:, :, None], axis=1)


class SequenceHead(nn.Module):
    """Dropout and one linear layer on the state of each sequence's extract token (GPT-1, section 3.2 and 3.3).

    kind `classification`: the states of an example's C sequences are added (one sequence, or both orders of a pair)
    and give one score a class, (E, outputs). `regression`: likewise one number, (E, 1). `choice`: each sequence gives
    one score, (E, C); `outputs` is 1. The choices share one dropout mask, as in the original (train.py:185).
    """

    kind: Literal["classification", "regression", "choice"]
    outputs: int
    dropout_rate: float
    init_std: float

    @nn.compact
    def __call__(self, states_ECD: jax.Array, *, train: bool) -> jax.Array:
        init, zeros = nn.initializers.normal(self.init_std), nn.initializers.zeros_init()
        d = states_ECD.shape[-1]
        kernel = self.param("kernel", with_axes(init, ("width", "classes")), (d, self.outputs))
        bias = self.param("bias", with_axes(zeros, ("classes",)), (self.outputs,))
        key = self.make_rng("dropout") if train else None
        states_ECD = dropout(states_ECD.astype(jnp.float32), self.dropout_rate, key, shared_axes=(1,))
        if self.kind == "choice":
            return (states_ECD @ kernel + bias)[..., 0]
        return jnp.sum(states_ECD, axis=1) @ kernel + bias


# BERT's pretraining


class MaskedLMHead(nn.Module):
    """What stands between the states of masked tokens and the tied table (run_pretraining.py:240-282).

    A dense layer, the model's activation, a norm; then the logits are h table^T + bias, which the loss makes itself.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, states_BMD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(B, M, D), gathered already, to (B, M, D) in the same dtype and the output's bias (V,)."""
        config, names = self.config, ("width", "transform")
        init, zeros = nn.initializers.truncated_normal(config.init_std), nn.initializers.zeros_init()
        kernel = self.param("kernel", with_axes(init, names), (config.width, config.width))
        bias = self.param("bias", with_axes(zeros, ("transform",)), (config.width,))
        output_bias = self.param("output_bias", with_axes(zeros, ("vocabulary",)), (config.vocab_size,))
        h_BMD = activate(linear(states_BMD, gathered(kernel, states_BMD.dtype, names), bias), config.activation)
        return LayerNorm(config.norm_eps, name="norm")(h_BMD), output_bias


class NextSentenceHead(nn.Module):
    """Whether B follows A, from pooled states (…, D): float32 scores (…, 2), 0 IsNext (run_pretraining.py:285-305)."""

    init_std: float

    @nn.compact
    def __call__(self, pooled_BPD: jax.Array) -> jax.Array:
        return _linear(self, pooled_BPD, 2, self.init_std)


# BERT's fine-tuning


class PooledHead(nn.Module):
    """Dropout and one linear layer on the pooled state of each sequence (run_classifier.py:592-609).

    kind `classification`: (E, 1, D) gives one score a class, (E, outputs); `regression`: one number, (E, 1). `choice`:
    (E, C, D) gives one score a sequence, (E, C); `outputs` is 1 (section 4.4, SWAG).
    """

    kind: Literal["classification", "regression", "choice"]
    outputs: int
    dropout_rate: float
    init_std: float

    @nn.compact
    def __call__(self, pooled_ECD: jax.Array, *, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        pooled_ECD = dropout(pooled_ECD.astype(jnp.float32), self.dropout_rate, key)
        scores = _linear(self, pooled_ECD, self.outputs, self.init_std)
        return scores[..., 0] if self.kind == "choice" else scores[:, 0]


class SpanHead(nn.Module):
    """Where an answer begins and ends: (B, L, D) gives float32 (B, L, 2), without dropout (run_squad.py:568)."""

    init_std: float
    kind: Literal["span"] = "span"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, *, train: bool) -> jax.Array:
        return _linear(self, h_BLD, 2, self.init_std)


class TaggingHead(nn.Module):
    """Dropout and one linear layer on every state: (B, L, D) gives float32 (B, L, outputs) (section 5.3)."""

    outputs: int
    dropout_rate: float
    init_std: float
    kind: Literal["tagging"] = "tagging"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, *, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        return _linear(self, dropout(h_BLD.astype(jnp.float32), self.dropout_rate, key), self.outputs, self.init_std)


EncoderHead = PooledHead | SpanHead | TaggingHead

Features = Literal[
    "embeddings",
    "second_to_last",
    "last",
    "sum_last_four",
    "concatenated_last_four",
    "weighted_last_four",
    "weighted_all",
]


class LSTMHead(nn.Module):
    """A BiLSTM between the encoder's layers and a head: the paper's tables 5 and 7.

    Table 7: two layers of 768 units a direction over `features` of a frozen encoder. Table 5: over the `last` layer of
    the left-to-right encoder, which goes on learning; the paper gives no size. A head for sequences takes what each
    direction has read at its end, in place of the pooler's, as the paper says nothing else.
    """

    head: EncoderHead
    features: Features = "last"
    frozen: bool = True
    """Whether the encoder gets no gradient. What its optimizer decays is another matter: leave it out there too."""
    width: int = 768
    num_layers: int = 2

    @property
    def kind(self) -> str:
        """The kind of the head on top."""
        return self.head.kind

    @nn.compact
    def __call__(self, hidden_NBLD: jax.Array, lengths_EC: jax.Array, *, train: bool) -> jax.Array:
        """All layers of E x C sequences (N + 1, E C, L, D) and their lengths; what `head` gives."""
        if self.frozen:
            hidden_NBLD = jax.lax.stop_gradient(hidden_NBLD)
        h_BLD = ChosenLayers(self.features, name="layers")(hidden_NBLD)
        real_BL = jnp.arange(h_BLD.shape[1]) < lengths_EC.reshape(-1)[:, None]
        h_BLD = BiLSTM(self.width, self.num_layers, name="lstm")(h_BLD, real_BL)
        if isinstance(self.head, PooledHead):
            last_B1 = jnp.maximum(lengths_EC.reshape(-1, 1) - 1, 0)
            ends = (take_places(h_BLD[..., : self.width], last_B1)[:, 0], h_BLD[:, 0, self.width :])
            return self.head(jnp.concatenate(ends, axis=-1).reshape(*lengths_EC.shape, -1), train=train)
        return self.head(h_BLD, train=train)


class ChosenLayers(nn.Module):
    """(N + 1, B, L, D), the embeddings first, to float32 (B, L, D or 4 D): the rows of the paper's table 7.

    The weighted sums are gamma sum_j softmax(w)_j h_j with w from 0 and gamma from 1 (Peters et al., 2018, equation 1);
    `weighted_all` leaves the embeddings out.
    """

    features: Features

    @nn.compact
    def __call__(self, hidden_NBLD: jax.Array) -> jax.Array:
        layers = hidden_NBLD.astype(jnp.float32)
        single = {"embeddings": 0, "second_to_last": -2, "last": -1}
        if self.features in single:
            return layers[single[self.features]]
        layers = layers[1:] if self.features == "weighted_all" else layers[max(1, len(layers) - 4) :]
        if self.features == "sum_last_four":
            return jnp.sum(layers, axis=0)
        if self.features == "concatenated_last_four":
            return jnp.concatenate(list(layers), axis=-1)
        weights = self.param("weights", with_axes(nn.initializers.zeros_init(), ("mixed",)), (len(layers),))
        gamma = self.param("gamma", with_axes(nn.initializers.ones_init(), ()), ())
        return gamma * jnp.einsum("n,nbld->bld", jax.nn.softmax(weights), layers)


def _linear(module: nn.Module, x: jax.Array, outputs: int, init_std: float) -> jax.Array:
    """x (…, D) in float32 times a `kernel` (D, outputs) plus a `bias` of `module`, float32."""
    init, zeros = nn.initializers.truncated_normal(init_std), nn.initializers.zeros_init()
    kernel = module.param("kernel", with_axes(init, ("width", "classes")), (x.shape[-1], outputs))
    bias = module.param("bias", with_axes(zeros, ("classes",)), (outputs,))
    return linear(x.astype(jnp.float32), kernel, bias)
