"""ULMFiT's head: the last state of a sequence, the maximum and the mean, and two layers with batch norm."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.models.heads.head import Head, by_sequence, of_choices, take_states
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.layers import BatchNorm, dropout, fold


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


class ConcatPoolingHead(Head):
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

    has_statistics: ClassVar[bool] = True

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

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the pooled states (E, C, 3 D) of `concat_pooled`, and which sequences are real (E, C)."""
        real_EC = (batch.weights[:, None] > 0) & (batch.lengths > 0)
        return concat_pooled(by_sequence(outputs, batch), batch.lengths), real_EC

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return a pooled state, and that it is real."""
        return jnp.zeros((1, 1, 3 * config.width)), jnp.ones((1, 1), jnp.bool_)


def make(task: Any, config: Any, *, pooled: bool) -> ConcatPoolingHead:
    """Return the head of a task in a run. See `make_head`."""
    return ConcatPoolingHead(task.kind, task.num_outputs, config.head_dropout_rate)
