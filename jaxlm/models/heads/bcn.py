"""The biattentive classification network (BCN): texts that attend to each other, four pools, and maxout layers.

McCann, Bradbury, Xiong and Socher, "Learned in Translation: Contextualized Word Vectors", 2017, section 5, and the form
of ELMo's authors (allennlp 0.9.0, allennlp/models/biattentive_classification_network.py). The shared input layer and
the encoder are those of the model (`jaxlm/models/bilstm`).
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import InputError
from jaxlm.models.heads.head import Head, by_sequence
from jaxlm.models.model import Model, Outputs
from jaxlm.nn.layers import MASKED, BatchNorm, dropout, fold
from jaxlm.nn.recurrence import BiLSTM, uniform

POOL = 4  # numbers of which a maxout layer keeps the largest


class BCNHead(Head):
    """The paper's form: each text of a pair is one side, and a single text is both sides.

    kind `classification`, `multilabel`: one score per class or label, (E, outputs); `regression`: one number, (E, 1).
    dropout_rates: before each maxout layer. reduction: of the width in the first maxout layer; 2 in the second.
    sides: the names of the modules that attend and pool.
    """

    kind: Literal["classification", "multilabel", "regression"]
    outputs: int
    dropout_rates: tuple[float, float, float]
    reduction: int = 2

    has_statistics: ClassVar[bool] = True
    sides: ClassVar[tuple[str, ...]] = ("first", "second")

    def setup(self) -> None:
        for name in self.sides:
            setattr(self, name, Side())
        self.maxout = Maxout(self.outputs, self.dropout_rates, self.reduction, self.has_statistics)

    def __call__(self, states_ECLD: jax.Array, lengths_EC: jax.Array, real_E: jax.Array, *, train: bool) -> jax.Array:
        """Return scores, float32, from the states of C texts, 1 or 2, that end in zeros.

        lengths_EC: int32, words of each text. real_E: bool, False for padding rows.
        """
        key = self.make_rng("dropout") if train else None
        scores: jax.Array = self.maxout(self.pooled(states_ECLD, lengths_EC), real_E, key)
        return scores

    def pooled(self, states_ECLD: jax.Array, lengths_EC: jax.Array) -> jax.Array:
        """Return the pools of all sides, float32 (E, 4 D sides). D: the width of the states, an even number."""
        states_ECLD = states_ECLD.astype(jnp.float32)
        real_ECL = jnp.arange(states_ECLD.shape[2]) < lengths_EC[..., None]
        texts = [(states_ECLD[:, c], real_ECL[:, c]) for c in (0, -1)]
        found = [getattr(self, name)(*texts[side], *texts[1 - side]) for side, name in enumerate(self.sides)]
        return jnp.concatenate(found, axis=-1)

    @nn.nowrap
    def read(self, model: Model, params: Any, batch: ExampleBatch, outputs: Outputs) -> tuple[Any, ...]:
        """Return the states (E, C, L, D), the lengths (E, C), and which rows are real (E,)."""
        return by_sequence(outputs, batch), batch.lengths, batch.weights > 0

    @nn.nowrap
    def example_inputs(self, config: Any) -> tuple[jax.Array, ...]:
        """Return the state of a text of one word."""
        return jnp.zeros((1, 1, 1, config.width)), jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.bool_)

    @nn.nowrap
    def vectors(self, params: Any, inputs: tuple[Any, ...]) -> jax.Array:
        """Return the pools as one vector of each example, (E, 1, 4 D sides)."""
        found: Any = self.apply({"params": params["head"]}, *inputs[:2], method="pooled")
        return found[:, None]


class SelfBCNHead(BCNHead):
    """The form of ELMo's authors: one text attends to itself, with one side and without batch norm."""

    has_statistics: ClassVar[bool] = False
    sides: ClassVar[tuple[str, ...]] = ("only",)


class Side(nn.Module):
    """A text that attends to another one, a BiLSTM that integrates both, and the pools of its states; in float32."""

    @nn.compact
    def __call__(self, own_BLD: jax.Array, real_BL: jax.Array, other_BMD: jax.Array, real_BM: jax.Array) -> jax.Array:
        """Return the maximum, the minimum, the mean and the self-attentive pool of a text, (B, 4 D); of none, zeros.

        real: bool, False for padding.
        """
        width = own_BLD.shape[-1]
        scores_BLM = jnp.einsum("bld,bmd->blm", own_BLD, other_BMD)
        # Over the words of the other text: the columns of the transposed scores in the paper.
        summary_BLD = jnp.einsum("blm,bmd->bld", _softmax(scores_BLM, real_BM[:, None]), other_BMD)
        joined = jnp.concatenate([own_BLD, own_BLD - summary_BLD, own_BLD * summary_BLD], axis=-1)
        h_BLD = BiLSTM(width // 2, 1, name="integrator")(joined, real_BL)
        # The bias of these scores in both forms changes no softmax.
        vector = self.param("pool_kernel", with_axes(uniform(width**-0.5), ("width",)), (width,))
        attended = jnp.einsum("bl,bld->bd", _softmax(h_BLD @ vector, real_BL), h_BLD)
        real_BL1 = real_BL[..., None]
        mean = jnp.sum(h_BLD, axis=1) / jnp.maximum(jnp.sum(real_BL1, axis=1), 1)
        greatest = jnp.max(jnp.where(real_BL1, h_BLD, -jnp.inf), axis=1)
        least = jnp.min(jnp.where(real_BL1, h_BLD, jnp.inf), axis=1)
        pools = jnp.concatenate([greatest, least, mean, attended], axis=-1)
        return jnp.where(jnp.any(real_BL, axis=1, keepdims=True), pools, 0.0)


def _softmax(scores: jax.Array, real: jax.Array) -> jax.Array:
    """Return the softmax over the last axis, with 0 where `real` is False."""
    return jax.nn.softmax(jnp.where(real, scores, MASKED), axis=-1)


class Maxout(nn.Module):
    """Three layers of dropout, a linear map to POOL times the width, and the largest of each POOL (Goodfellow, 2013).

    normed: batch norm of what the linear map gives (Ioffe and Szegedy, 2015, section 3.2), whose shift is the bias.
    """

    outputs: int
    dropout_rates: tuple[float, float, float]
    reduction: int
    normed: bool

    @nn.compact
    def __call__(self, x_BD: jax.Array, real_B: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return (B, outputs). real_B: bool, False for padding rows. key: of dropout; None: evaluation."""
        first = max(x_BD.shape[-1] // self.reduction, 1)
        for number, size in enumerate((first, max(first // 2, 1), self.outputs)):
            x_BD = dropout(x_BD, self.dropout_rates[number], fold(key, number))
            names, shape = ("width", "hidden"), (x_BD.shape[-1], POOL * size)
            init, zeros = uniform(shape[0] ** -0.5), nn.initializers.zeros_init()
            y_BF = x_BD @ self.param(f"kernel_{number}", with_axes(init, names), shape)
            if self.normed:
                y_BF = BatchNorm(name=f"norm_{number}")(y_BF, real_B, train=key is not None)
            else:
                y_BF = y_BF + self.param(f"bias_{number}", with_axes(zeros, names[1:]), shape[1:])
            y_BFP = y_BF.reshape(-1, size, POOL)
            # By index: the gradient of jnp.max compares values that XLA may compute twice, with two roundings.
            x_BD = jnp.sum(y_BFP * jax.nn.one_hot(jnp.argmax(y_BFP, axis=-1), POOL), axis=-1)
        return x_BD


def make(task: Any, config: Any, *, pooled: bool) -> BCNHead:
    """Return the head of a task in a run, see `make_head`. InputError for two texts with biattention self.

    The dropout rate of the config is that before each maxout layer. With biattention self it is that before the first
    one, and 0.2 and 0.3 follow (allennlp 0.9.0, training_config/biattentive_classification_network.jsonnet).
    """
    rate = config.head_dropout_rate
    if config.biattention == "pair":
        return BCNHead(task.kind, task.num_outputs, (rate,) * 3, config.maxout_reduction)
    if len(task.columns.texts) > 1:
        raise InputError("biattention must be pair for a task of two texts, got self; leave it out")
    return SelfBCNHead(task.kind, task.num_outputs, (rate, 0.2, 0.3), config.maxout_reduction)
