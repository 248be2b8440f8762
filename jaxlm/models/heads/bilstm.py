"""A BiLSTM between an encoder's layers and a head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.models.heads import Features, linear
from jaxlm.models.heads.head import Head, sequence_inputs, take_places
from jaxlm.models.heads.linear import EncoderHead, PooledHead
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.recurrence import BiLSTM
from jaxlm.nn.scalar_mix import scalar_mix


class LSTMHead(Head):
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

    @nn.nowrap
    def model_outputs(
        self, model: Model, params: Any, batch: ExampleBatch, key: jax.Array | None, window: int = 0
    ) -> Outputs:
        """Return the model's outputs with all layers; without dropout if it is frozen."""
        return model(params, sequence_inputs(model, batch), key=None if self.frozen else key, layers=True)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return all layers (N + 1, E C, L, D) and the lengths (E, C)."""
        return outputs.layers, batch.lengths

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return all layers of one token, and its length."""
        return jnp.zeros((config.num_layers + 1, 1, 1, config.width)), jnp.ones((1, 1), jnp.int32)

    @nn.nowrap
    def vectors(self, params: Any, inputs: tuple[Any, ...]) -> jax.Array:
        """Return the last states of both directions, (E, C, 2 width)."""
        found: Any = self.apply({"params": params["head"]}, *inputs, method="states")
        return found


class ChosenLayers(nn.Module):
    """Combine (N + 1, B, L, D), the embeddings first, to float32 (B, L, D or 4 D): the rows of the paper's table 7.

    The weighted sums are those of `scalar_mix`; `weighted_all` leaves the embeddings out.
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
        return scalar_mix(self, layers)


def make(task: Any, config: Any, *, pooled: bool) -> LSTMHead:
    """Return the head of a task in a run. See `make_head`."""
    inner: Any = linear.make(task, config, pooled=pooled)
    return LSTMHead(inner, features=config.features, frozen=config.frozen)
