"""AWD-LSTM: an LSTM language model regularized by dropout alone, ULMFiT's body.

Merity, Keskar and Socher, 2018, and their code, salesforce/awd-lstm-lm (model.py, weight_drop.py, embed_regularize.py,
locked_dropout.py). The sizes are 400, 1150, 1150, 400: the last layer has the width of the embedding, as the output
layer is tied to it. Every dropout mask is sampled once per pass, before the recurrence:

- whole words: (V, 1), the same for all rows; not in the output layer;
- recurrent kernels: each element, the same for all rows and positions;
- the embedding, and the output of each layer: (B, 1, D), the same at all positions of a row.

The regularization of activations, the rows of varied lengths and the average of the iterates belong to the training:
`objective.activation_regularization`, `data.windows varied`, `average_iterates`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, dropout, fold, gathered, project
from jaxlm.nn.output import AdaptiveOutput, Embeddings, vocabulary_matrices
from jaxlm.nn.recurrence import LSTMState, boundaries, lstm, stacked_layers, uniform

State = tuple[LSTMState, ...]  # of each layer, (1, B, U)


def flops_per_token(config: AWDLSTMConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward: six per parameter of a matrix."""
    total, before = vocabulary_matrices(config), config.width
    for layer in range(config.num_layers):
        units = config.units_of(layer)
        total, before = total + (before + units) * 4 * units, units
    return 6.0 * total


def empty_state(config: AWDLSTMConfig, rows: int) -> State:
    """Return the state before the first token of `rows` rows, zeros."""
    zeros = (jnp.zeros((1, rows, config.units_of(layer)), jnp.float32) for layer in range(config.num_layers))
    return tuple(LSTMState(zero, zero) for zero in zeros)


class AWDLSTM(nn.Module):
    """An AWD-LSTM language model: embedding, layers, and the token table as output layer."""

    config: AWDLSTMConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self, inputs: Inputs, carry: State | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states, the carry after the last token of each row, and as `output` the tables of its ids.

        The state is set to zero where a new segment of a packed row begins; padding leaves it unchanged. Positions are
        not used. carry: see `empty_state`; None: zero, and no carry is returned. layers: narrower ones are padded with
        zeros.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        init = uniform(config.init_range)
        x_BLD, output = Embeddings(config, self.execution, init, config.output_bias, name="embeddings")(inputs.ids)
        if key is not None and config.word_dropout_rate:
            kept_V1 = dropout(
                jnp.ones((config.vocab_size, 1), x_BLD.dtype), config.word_dropout_rate, fold(key, 0), of_rows=False
            )
            x_BLD = x_BLD * jnp.take(kept_V1, inputs.ids, axis=0)
        x_BLD = constrain(_locked(x_BLD, config.embedding_dropout_rate, fold(key, 1)), STATES)
        real_LB, reset_LB = boundaries(inputs.ids, inputs.segments)
        start = empty_state(config, inputs.ids.shape[0]) if carry is None else carry
        hidden, ends, raw_BLD = [x_BLD], [], x_BLD
        for number in range(config.num_layers):
            layer = Layer(config, self.execution, config.units_of(number), name=f"layer_{number}")
            raw_BLD, end = layer(hidden[-1], start[number], real_LB, reset_LB, fold(key, 2 * number + 2))
            last = number == config.num_layers - 1
            rate = config.output_dropout_rate if last else config.dropout_rate
            hidden.append(constrain(_locked(raw_BLD, rate, fold(key, 2 * number + 3)), STATES))
            ends.append(end)
        after = None if carry is None else tuple(ends)
        return Outputs(hidden[-1], stacked_layers(hidden) if layers else None, after, output, raw_BLD)


class Layer(nn.Module):
    """An LSTM layer with the two biases of torch.nn.LSTM, each of which is trained."""

    config: AWDLSTMConfig
    execution: Execution
    units: int

    @nn.compact
    def __call__(
        self, x_BLD: jax.Array, start: LSTMState, real_LB: jax.Array, reset_LB: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, LSTMState]:
        """Return the outputs (B, L, U) and the state after the last token, (1, B, U). key: of the weight drop."""
        dtype, u = self.execution.compute_dtype(), self.units
        init, names_in, names_state = uniform(u**-0.5), ("width", "gates"), ("whole_width", "gates")
        kernel_in = self.param("in_kernel", with_axes(init, names_in), (x_BLD.shape[-1], 4 * u))
        kernel_state = self.param("state_kernel", with_axes(init, names_state), (u, 4 * u))
        bias = self.param("in_bias", with_axes(init, ("gates",)), (4 * u,))
        bias = bias + self.param("state_bias", with_axes(init, ("gates",)), (4 * u,))
        x_BLG = project(x_BLD, kernel_in, bias, names_in, self.execution)  # for all positions at once
        kernel_state = dropout(kernel_state, self.config.recurrent_dropout_rate, key, of_rows=False)
        kernel_UG = gathered(kernel_state, dtype, names_state)
        of_layer = LSTMState(start.h[0], start.c[0])
        h_LBU, end = lstm(jnp.swapaxes(x_BLG, 0, 1), kernel_UG, of_layer, real_LB, reset_LB)
        return jnp.swapaxes(h_LBU, 0, 1).astype(dtype), LSTMState(end.h[None], end.c[None])


def _locked(x_BLD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Return `x` after a dropout whose mask is the same at all positions of a row (Gal and Ghahramani, 2016)."""
    return dropout(x_BLD, rate, key, shared_axes=(1,))


ARITHMETIC = Arithmetic(
    module=AWDLSTM,
    output_layer=lambda config: AdaptiveOutput(config.adaptive),
    flops_per_token=flops_per_token,
    initial_carry=lambda config, rows, dtype: empty_state(config, rows),
    decoding_carry=lambda config, rows, length, dtype: empty_state(config, rows),
)
