"""What stands on a model's states for one task: small modules with parameters of their own."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.nn.dropout import dropout
from jaxlm.nn.partition import with_axes


def take_states(h_ECLD: jax.Array, where_EC: jax.Array) -> jax.Array:
    """The state at one position of each sequence: (E, C, L, D) and indices (E, C) give (E, C, D)."""
    return jnp.take_along_axis(h_ECLD, where_EC[:, :, None, None], axis=2)[:, :, 0]


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
