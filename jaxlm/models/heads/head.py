"""Base of all heads of tasks: how a model reads the sequences of examples, and the states that a head takes."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.models.model import Inputs, Model, Outputs
from jaxlm.nn.layers import gather


class Head(nn.Module):
    """A module with parameters of its own on a model's states. A subclass has `kind`, that of its tasks.

    has_statistics: True if it has the running statistics of batch norms, which no optimizer changes.
    """

    has_statistics: ClassVar[bool] = False

    @property
    def loss(self) -> str:
        """The name of its loss in `jaxlm.objectives.task.LOSSES`."""
        return str(self.kind)

    @property
    def auxiliary(self) -> Mapping[str, int]:
        """The modules that unlabelled batches alone train (`jaxlm/objectives/cross_view.py`).

        By their names, with the word whose tag each predicts, counted from the one that it reads.
        """
        return {}

    @nn.nowrap
    def model_outputs(
        self, model: Model, params: Any, batch: ExampleBatch, key: jax.Array | None, window: int = 0
    ) -> Outputs:
        """Return the model's outputs for the E x C sequences of a batch, as rows. key: for dropout; None: evaluation.

        window: tokens of a window of `Model.windowed_states`, whose outputs are the states alone; 0: all of it.
        """
        inputs = sequence_inputs(model, batch)
        if window:
            return Outputs(model.windowed_states(params, inputs, window, key), None, None, None)
        return model(params, inputs, key=key)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return what the head reads of the model's outputs for a batch. By default: the states (E C, L, D)."""
        return (outputs.states,)

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return inputs of one token of a model with this config, for the initialization."""
        return (jnp.zeros((1, 1, config.width)),)

    @nn.nowrap
    def vectors(self, params: Any, inputs: tuple[Any, ...]) -> jax.Array:
        """Return the vector of each sequence that the last layer reads, (E, C, D). params: {"head": …}."""
        found: jax.Array = inputs[0]
        return found


def sequence_inputs(model: Model, batch: ExampleBatch) -> Inputs:
    """Return the sequences of E x C choices as rows.

    Token types are 0 before `batch.second` and 1 from there. Padding is at the end of a sequence: the states of a
    decoder do not depend on it, and other models get segments.
    """
    length = batch.ids.shape[-1]
    index_L, ids = jnp.arange(length), batch.ids.reshape(-1, length)
    positions = jnp.broadcast_to(index_L, ids.shape)
    if model.family.role == "decoder":
        return Inputs(ids, positions)
    lengths, second = batch.lengths.reshape(-1, 1), batch.second.reshape(-1, 1)
    real = index_L < lengths
    types = (real & (index_L >= second)).astype(jnp.int32)
    characters = None if batch.characters is None else batch.characters.reshape(*ids.shape, -1)
    features = tuple(of.reshape(*ids.shape, *of.shape[-2:]) for of in batch.features)
    return Inputs(ids, positions, real.astype(jnp.int32), types, characters=characters, features=features)


def by_sequence(outputs: Outputs, batch: ExampleBatch) -> jax.Array:
    """Return the states of a batch's sequences, (E, C, L, D)."""
    return outputs.states.reshape(*batch.ids.shape, -1)


def take_states(h_ECLD: jax.Array, where_EC: jax.Array) -> jax.Array:
    """Gather the state at one position of each sequence: (E, C, L, D) and indices (E, C) give (E, C, D)."""
    return gather(h_ECLD, where_EC[:, :, None, None], axis=2)[:, :, 0]


def take_places(h_BLD: jax.Array, where_BM: jax.Array) -> jax.Array:
    """Gather the states at M positions of each row: (B, L, D) and indices (B, M) give (B, M, D)."""
    return gather(h_BLD, where_BM[:, :, None], axis=1)


def of_choices(head: Any) -> bool:
    """Return True if a head scores the sequences of an example, its choices, and not the example."""
    return head.kind == "choice"
