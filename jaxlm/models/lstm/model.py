"""A plain LSTM language model: GPT-1's ablation, "a single layer 2048 unit LSTM using the same framework".

Radford, Narasimhan, Salimans and Sutskever, 2018, section 5 and table 5. The paper gives only this sentence, and its
code has no LSTM. The choices here differ from GPT-1's model in the layers alone: the token embedding and the tied
softmax of width 768, a linear layer from the 2,048 units to that width, dropout at the same places as in GPT-1, no
positions. The state is zero at the beginning of each window (`data.layout windows`, as in the same framework), or is
carried from one batch to the next (`data.layout streams`).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.models.lstm import LSTMConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import STATES, dropout, fold, gathered, project
from jaxlm.nn.output import AdaptiveOutput, Embeddings, vocabulary_matrices
from jaxlm.nn.recurrence import LSTMState, boundaries, lstm, uniform


def flops_per_token(config: LSTMConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token, forward and backward: six per parameter of a matrix."""
    layer = (config.width + config.units) * 4 * config.units + config.units * config.width
    return 6.0 * (config.num_layers * layer + vocabulary_matrices(config))


def empty_state(config: LSTMConfig, rows: int) -> LSTMState:
    """Return the state before the first token of `rows` rows: zeros, (N, B, U)."""
    zeros = jnp.zeros((config.num_layers, rows, config.units), jnp.float32)
    return LSTMState(zeros, zeros)


class LSTM(nn.Module):
    """An LSTM language model: embedding, layers, and the token table as output layer."""

    config: LSTMConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self, inputs: Inputs, carry: LSTMState | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states, the carry after the last token of each row, and as `output` the tables of its ids.

        The state is set to zero where a new segment of a packed row begins; padding leaves it unchanged. Positions are
        not used. carry: (N, B, U); None: zero, and no carry is returned.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        init = nn.initializers.normal(config.init_std)
        x_BLD, output = Embeddings(config, self.execution, init, name="embeddings")(inputs.ids)
        x_BLD = constrain(dropout(x_BLD, config.embedding_dropout_rate, fold(key, 0)), STATES)
        real_LB, reset_LB = boundaries(inputs.ids, inputs.segments)
        start = empty_state(config, inputs.ids.shape[0]) if carry is None else carry
        hidden, ends = [x_BLD], []
        for number in range(config.num_layers):
            of_layer = LSTMState(start.h[number], start.c[number])
            layer = Layer(config, self.execution, name=f"layer_{number}")
            x_BLD, end = layer(hidden[-1], of_layer, real_LB, reset_LB)
            hidden.append(dropout(x_BLD, config.dropout_rate, fold(key, number + 1)))
            ends.append(end)
        after = None if carry is None else LSTMState(*(jnp.stack(parts) for parts in zip(*ends, strict=True)))
        return Outputs(hidden[-1], jnp.stack(hidden) if layers else None, after, output)


class Layer(nn.Module):
    """An LSTM of `units` units and a linear layer to the model's width."""

    config: LSTMConfig
    execution: Execution

    @nn.compact
    def __call__(self, x_BLD, start: LSTMState, real_LB, reset_LB) -> tuple[jax.Array, LSTMState]:
        config, dtype = self.config, self.execution.compute_dtype()
        d, u = config.width, config.units
        init = uniform(u**-0.5)
        names_in, names_state, names_out = ("width", "gates"), ("whole_width", "gates"), ("units", "whole_width")
        kernel_in = self.param("in_kernel", with_axes(init, names_in), (d, 4 * u))
        kernel_state = self.param("state_kernel", with_axes(init, names_state), (u, 4 * u))
        bias = self.param("bias", with_axes(self._bias, ("gates",)), (4 * u,))
        normal, zeros = nn.initializers.normal(config.init_std), nn.initializers.zeros_init()
        kernel_out = self.param("out_kernel", with_axes(normal, names_out), (u, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))
        x_BLG = project(x_BLD, kernel_in, bias, names_in, self.execution)  # for all positions at once
        kernel_UG = gathered(kernel_state, dtype, names_state)
        h_LBU, end = lstm(jnp.swapaxes(x_BLG, 0, 1), kernel_UG, start, real_LB, reset_LB)
        h_BLU = jnp.swapaxes(h_LBU, 0, 1).astype(dtype)
        return constrain(project(h_BLU, kernel_out, bias_out, names_out, self.execution), STATES), end

    def _bias(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        units = self.config.units
        return jnp.zeros(shape).at[units : 2 * units].set(self.config.forget_bias)


ARITHMETIC = Arithmetic(
    module=LSTM,
    output_layer=lambda config: AdaptiveOutput(config.adaptive),
    flops_per_token=flops_per_token,
    initial_carry=lambda config, rows, dtype: empty_state(config, rows),
    decoding_carry=lambda config, rows, length, dtype: empty_state(config, rows),
)
