"""Task heads: small modules with parameters of their own on a model's states."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.config import Features
from jaxlm.nn.layers import BatchNorm, dropout, fold, gather, linear_head
from jaxlm.nn.recurrence import BiLSTM


def take_states(h_ECLD: jax.Array, where_EC: jax.Array) -> jax.Array:
    """Gather the state at one position of each sequence: (E, C, L, D) and indices (E, C) give (E, C, D)."""
    return gather(h_ECLD, where_EC[:, :, None, None], axis=2)[:, :, 0]


def take_places(h_BLD: jax.Array, where_BM: jax.Array) -> jax.Array:
    """Gather the states at M positions of each row: (B, L, D) and indices (B, M) give (B, M, D)."""
    return gather(h_BLD, where_BM[:, :, None], axis=1)


def of_choices(head: "Head") -> bool:
    """Return True if a head scores the sequences of an example, its choices, and not the example."""
    return head.kind == "choice"


class SequenceHead(nn.Module):
    """Dropout and one linear layer on the state of each sequence's extract token (GPT-1, section 3.2 and 3.3).

    kind `classification`, `multilabel`: the states of an example's C sequences are summed (one sequence, or both orders
    of a pair) and give one score per class or label, (E, outputs). `regression`: likewise one number, (E, 1).
    `choice`: one score per sequence, (E, C); `outputs` is 1. The choices share one dropout mask, as in the original
    (train.py:185).
    """

    kind: Literal["classification", "multilabel", "regression", "choice"]
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
        if of_choices(self):
            return (states_ECD @ kernel + bias)[..., 0]
        return jnp.sum(states_ECD, axis=1) @ kernel + bias


def concat_pooled(h_ECLD: jax.Array, lengths_EC: jax.Array) -> jax.Array:
    """Return the last state of each sequence, and the maximum and the mean of its states, float32 (E, C, 3 D).

    Padding, at the end of a sequence, is in none of them (ULMFiT's code has it in the maximum and the mean). Zeros for
    an absent sequence.
    """
    h_ECLD = h_ECLD.astype(jnp.float32)
    real_ECL1 = (jnp.arange(h_ECLD.shape[2]) < lengths_EC[..., None])[..., None]
    counts_EC1 = jnp.maximum(lengths_EC, 1)[..., None]
    last = take_states(h_ECLD, jnp.maximum(lengths_EC - 1, 0))
    greatest = jnp.max(jnp.where(real_ECL1, h_ECLD, -jnp.inf), axis=2)
    mean = jnp.sum(jnp.where(real_ECL1, h_ECLD, 0.0), axis=2) / counts_EC1
    return jnp.where(lengths_EC[..., None] > 0, jnp.concatenate([last, greatest, mean], axis=-1), 0.0)


class ConcatPoolingHead(nn.Module):
    """ULMFiT's classifier: two blocks of batch norm, dropout and a linear layer, with a ReLU between them.

    Howard and Ruder, 2018, section 3.3; sizes, dropout and order of old/fastai/lm_rnn.py:165-195. The input is that of
    `concat_pooled`. kind: as for SequenceHead; the vectors of an example's sequences are summed, or each choice has a
    row of its own in the batch norm. Kernels are initialized as in torch.nn.Linear, biases are 0.
    """

    kind: Literal["classification", "multilabel", "regression", "choice"]
    outputs: int
    dropout_rate: float
    hidden: int = 50
    second_dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, pooled_ECD: jax.Array, real_EC: jax.Array, *, train: bool) -> jax.Array:
        """Return scores as SequenceHead does. real_EC: bool, False for padding rows and absent choices."""
        if of_choices(self):
            x_BD, real_B = pooled_ECD.reshape(-1, pooled_ECD.shape[-1]), real_EC.reshape(-1)
        else:
            x_BD, real_B = jnp.sum(pooled_ECD, axis=1), jnp.any(real_EC, axis=1)
        key = self.make_rng("dropout") if train else None
        x_BD = dropout(BatchNorm(name="norm")(x_BD, real_B, train=train), self.dropout_rate, fold(key, 0))
        x_BD = jax.nn.relu(self._linear("hidden_", x_BD, self.hidden, ("width", "hidden")))
        x_BD = BatchNorm(name="hidden_norm")(x_BD, real_B, train=train)
        x_BD = dropout(x_BD, self.second_dropout_rate, fold(key, 1))
        scores = self._linear("", x_BD, self.outputs, ("whole_width", "classes"))
        return scores.reshape(real_EC.shape) if of_choices(self) else scores

    def _linear(self, prefix: str, x_BD: jax.Array, outputs: int, names: tuple[str, str]) -> jax.Array:
        uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # within 1 / sqrt(inputs)
        kernel = self.param(f"{prefix}kernel", with_axes(uniform, names), (x_BD.shape[-1], outputs))
        bias = self.param(f"{prefix}bias", with_axes(nn.initializers.zeros_init(), names[1:]), (outputs,))
        return x_BD @ kernel + bias


class PooledHead(nn.Module):
    """Dropout and one linear layer on the pooled state of each sequence (run_classifier.py:592-609).

    kind `classification`, `multilabel`: (E, 1, D) gives one score per class or label, (E, outputs); `regression`: one
    number, (E, 1). `choice`: (E, C, D) gives one score per sequence, (E, C); `outputs` is 1 (section 4.4, SWAG).
    """

    kind: Literal["classification", "multilabel", "regression", "choice"]
    outputs: int
    dropout_rate: float
    init_std: float

    @nn.compact
    def __call__(self, pooled_ECD: jax.Array, *, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        pooled_ECD = dropout(pooled_ECD.astype(jnp.float32), self.dropout_rate, key)
        scores = linear_head(self, pooled_ECD, self.outputs, self.init_std)
        return scores[..., 0] if of_choices(self) else scores[:, 0]


class SpanHead(nn.Module):
    """Scores of an answer's beginning and end: (B, L, D) gives float32 (B, L, 2), no dropout (run_squad.py:568)."""

    init_std: float
    kind: Literal["span"] = "span"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, *, train: bool) -> jax.Array:
        return linear_head(self, h_BLD, 2, self.init_std)


class TaggingHead(nn.Module):
    """Dropout and one linear layer on every state: (B, L, D) gives float32 (B, L, outputs) (section 5.3)."""

    outputs: int
    dropout_rate: float
    init_std: float
    kind: Literal["tagging"] = "tagging"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, *, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        return linear_head(
            self, dropout(h_BLD.astype(jnp.float32), self.dropout_rate, key), self.outputs, self.init_std
        )


EncoderHead = PooledHead | SpanHead | TaggingHead


class LSTMHead(nn.Module):
    """A BiLSTM between the encoder's layers and a head: the paper's tables 5 and 7.

    Table 7: two layers of 768 units per direction over `features` of a frozen encoder. Table 5: over the `last` layer
    of the left-to-right encoder, which is trained too; the paper gives no size. A head for sequences takes the last
    state of each direction instead of the pooler's, as the paper does not specify it.
    """

    head: EncoderHead
    features: Features = "last"
    frozen: bool = True
    """True stops the gradient to the encoder. Its optimizer may still decay it, which must be disabled separately."""
    width: int = 768
    num_layers: int = 2

    @property
    def kind(self) -> str:
        """The kind of the inner head."""
        return self.head.kind

    def setup(self) -> None:
        self.layers = ChosenLayers(self.features)
        self.lstm = BiLSTM(self.width, self.num_layers)

    def __call__(self, hidden_NBLD: jax.Array, lengths_EC: jax.Array, *, train: bool) -> jax.Array:
        """Apply the LSTM to all layers of E x C sequences (N + 1, E C, L, D), given their lengths, then `head`."""
        return self.head(self.states(hidden_NBLD, lengths_EC), train=train)

    def states(self, hidden_NBLD: jax.Array, lengths_EC: jax.Array) -> jax.Array:
        """Return the states that `head` reads: (E C, L, 2 width), or (E, C, 2 width) for a head for sequences."""
        if self.frozen:
            hidden_NBLD = jax.lax.stop_gradient(hidden_NBLD)
        h_BLD = self.layers(hidden_NBLD)
        real_BL = jnp.arange(h_BLD.shape[1]) < lengths_EC.reshape(-1)[:, None]
        h_BLD = self.lstm(h_BLD, real_BL)
        if not isinstance(self.head, PooledHead):
            return h_BLD
        last_B1 = jnp.maximum(lengths_EC.reshape(-1, 1) - 1, 0)
        ends = (take_places(h_BLD[..., : self.width], last_B1)[:, 0], h_BLD[:, 0, self.width :])
        return jnp.concatenate(ends, axis=-1).reshape(*lengths_EC.shape, -1)


class ChosenLayers(nn.Module):
    """Combine (N + 1, B, L, D), the embeddings first, to float32 (B, L, D or 4 D): the rows of the paper's table 7.

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


Head = SequenceHead | ConcatPoolingHead | EncoderHead | LSTMHead


def task_head(
    kind: str, outputs: int, *, pooled: bool, dropout_rate: float, init_std: float
) -> SequenceHead | EncoderHead:
    """Return the head for a task of a kind: on every token for spans and tags, otherwise on one of a sequence.

    pooled: True if it reads the pooled first token (BERT), not the state of the extract token (GPT-1).
    """
    if kind == "span":
        return SpanHead(init_std)
    if kind == "tagging":
        return TaggingHead(outputs, dropout_rate, init_std)
    of_sequence = PooledHead if pooled else SequenceHead
    return of_sequence(kind, outputs, dropout_rate, init_std)  # type: ignore[arg-type]
