"""Heads of dropout and one linear layer: on the state of each sequence, or on every token for spans and tags."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.models.heads.head import Head, by_sequence, of_choices, take_states
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.layers import dropout, linear_head


class _OfSequences(Head):
    """The fields of a linear head on one state of each sequence."""

    kind: Literal["classification", "multilabel", "regression", "choice"]
    outputs: int
    dropout_rate: float
    init_std: float


class SequenceHead(_OfSequences):
    """Dropout and one linear layer on the state of each sequence's extract token (GPT-1, section 3.2 and 3.3).

    kind `classification`, `multilabel`: the states of an example's C sequences are summed (one sequence, or both orders
    of a pair) and give one score per class or label, (E, outputs). `regression`: likewise one number, (E, 1).
    `choice`: one score per sequence, (E, C); `outputs` is 1. The choices share one dropout mask, as in the original
    (train.py:185).
    """

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

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the states at `batch.extract`, (E, C, D)."""
        return (take_states(by_sequence(outputs, batch), batch.extract),)


class PooledHead(_OfSequences):
    """Dropout and one linear layer on the pooled state of each sequence (run_classifier.py:592-609).

    kind `classification`, `multilabel`: (E, 1, D) gives one score per class or label, (E, outputs); `regression`: one
    number, (E, 1). `choice`: (E, C, D) gives one score per sequence, (E, C); `outputs` is 1 (section 4.4, SWAG).
    """

    @nn.compact
    def __call__(self, pooled_ECD: jax.Array, *, train: bool) -> jax.Array:
        key = self.make_rng("dropout") if train else None
        pooled_ECD = dropout(pooled_ECD.astype(jnp.float32), self.dropout_rate, key)
        scores = linear_head(self, pooled_ECD, self.outputs, self.init_std)
        return scores[..., 0] if of_choices(self) else scores[:, 0]

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the pooled states at `batch.extract`, (E, C, D).

        An encoder with a causal mask pools the state of the last token, since the first token does not depend on the
        others.
        """
        where = jnp.maximum(batch.lengths - 1, 0) if model.is_causal else jnp.asarray(batch.extract)
        return (model.pool(params, take_states(by_sequence(outputs, batch), where)),)


class SpanHead(Head):
    """Scores of an answer's beginning and end: (B, L, D) gives float32 (B, L, 2), no dropout (run_squad.py:568)."""

    init_std: float
    kind: Literal["span"] = "span"

    @nn.compact
    def __call__(self, h_BLD: jax.Array, *, train: bool) -> jax.Array:
        return linear_head(self, h_BLD, 2, self.init_std)


class TaggingHead(Head):
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


def make(task: Any, config: Any, *, pooled: bool) -> SequenceHead | EncoderHead:
    """Return the head for a task: on every token for spans and tags, else on one of a sequence. See `make_head`."""
    init_std = config.model.init_std
    if task.kind == "span":
        return SpanHead(init_std)
    if task.kind == "tagging":
        return TaggingHead(task.num_outputs, config.head_dropout_rate, init_std)
    of_sequence = PooledHead if pooled else SequenceHead
    return of_sequence(task.kind, task.num_outputs, config.head_dropout_rate, init_std)
