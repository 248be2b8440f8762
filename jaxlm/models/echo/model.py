"""A bag of the words so far: each layer adds a function of the mean of the states up to and including its own.

A toy model that no paper has. x <- x + tanh(mean(x) W + b), with the mean over the tokens of the same segment that a
position has seen; the token table is also the output layer. The carry is the sum and the number of these tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.partition import constrain, with_axes
from jaxlm.models.echo import EchoConfig
from jaxlm.models.model import Arithmetic, Inputs, Outputs
from jaxlm.nn.adaptive_softmax import AdaptiveOutput, Tables, embed_tokens, make_tables
from jaxlm.nn.config import Adaptive, Execution
from jaxlm.nn.linear import project
from jaxlm.nn.pointwise import dropout, fold
from jaxlm.nn.recurrence import boundaries

_ONE_CLUSTER = Adaptive()
_STATES = ("batch", "length", "whole_width")
_KERNEL = ("width", "whole_width")


class Seen(NamedTuple):
    """The tokens of a row so far: the sums of their states in each layer, (N, B, D), and their number, (N, B)."""

    total: jax.Array
    count: jax.Array


def nothing_seen(config: EchoConfig, rows: int) -> Seen:
    """Return the carry before the first token of `rows` rows: zeros."""
    shape = (config.num_layers, rows)
    return Seen(jnp.zeros((*shape, config.width), jnp.float32), jnp.zeros(shape, jnp.float32))


def flops_per_token(config: EchoConfig, length: int, predicted: float | None = None) -> float:
    """Return the FLOPs of a training step per token: six per parameter of a matrix, and those of the means."""
    return 6.0 * (config.num_layers * config.width * (config.width + length) + config.vocab_size * config.width)


class Echo(nn.Module):
    """An echo language model: embedding, layers, and the token table as output layer."""

    config: EchoConfig
    execution: Execution = Execution()

    @nn.compact
    def __call__(
        self, inputs: Inputs, carry: Seen | None = None, *, train: bool = False, layers: bool = False
    ) -> Outputs:
        """Return states, the carry after the last token of each row, and as `output` the token table.

        The means begin again where a new segment of a packed row begins; padding leaves them unchanged. Positions are
        not used. carry: see `Seen`; None: nothing was seen, and no carry is returned.
        """
        config = self.config
        key = self.make_rng("dropout") if train else None
        x_BLD, output = Embeddings(config, self.execution, name="embeddings")(inputs.ids)
        x_BLD = constrain(dropout(x_BLD, config.dropout_rate, fold(key, 0)), _STATES)
        real_LB, reset_LB = boundaries(inputs.ids, inputs.segments)
        segment_BL = jnp.cumsum(reset_LB.T, axis=1)  # 0: a continuation of the carry; padding belongs to the last one
        before_LL = jnp.tri(inputs.ids.shape[1], dtype=bool)
        seen_BLS = (segment_BL[:, :, None] == segment_BL[:, None]) & real_LB.T[:, None] & before_LL
        seen_BLS, continued_BL = seen_BLS.astype(jnp.float32), segment_BL == 0
        start = nothing_seen(config, inputs.ids.shape[0]) if carry is None else carry
        hidden, ends = [x_BLD], []
        for number in range(config.num_layers):
            x_BLD = hidden[-1]
            total_BLD = jnp.einsum("BLS,BSD->BLD", seen_BLS, x_BLD.astype(jnp.float32))
            total_BLD = total_BLD + jnp.where(continued_BL[..., None], start.total[number][:, None], 0)
            count_BL = seen_BLS.sum(-1) + jnp.where(continued_BL, start.count[number][:, None], 0)
            mean_BLD = (total_BLD / jnp.maximum(count_BL, 1)[..., None]).astype(x_BLD.dtype)
            branch_BLD = Layer(config, self.execution, name=f"layer_{number}")(mean_BLD)
            hidden.append(x_BLD + dropout(branch_BLD, config.dropout_rate, fold(key, number + 1)))
            ends.append(Seen(total_BLD[:, -1], count_BL[:, -1]))
        after = None if carry is None else Seen(*(jnp.stack(parts) for parts in zip(*ends, strict=True)))
        return Outputs(hidden[-1], jnp.stack(hidden) if layers else None, after, output)


class Embeddings(nn.Module):
    """The token table (V, D)."""

    config: EchoConfig
    execution: Execution

    @nn.compact
    def __call__(self, ids_BL: jax.Array) -> tuple[jax.Array, Tables]:
        config, init = self.config, nn.initializers.normal(self.config.init_std)
        tables = make_tables(self, config.vocab_size, config.width, _ONE_CLUSTER, init, bias=False)
        return embed_tokens(tables, ids_BL, self.execution), tables


class Layer(nn.Module):
    """A linear layer of the means, and tanh."""

    config: EchoConfig
    execution: Execution

    @nn.compact
    def __call__(self, mean_BLD: jax.Array) -> jax.Array:
        d, init = self.config.width, nn.initializers.normal(self.config.init_std)
        kernel = self.param("kernel", with_axes(init, _KERNEL), (d, d))
        bias = self.param("bias", with_axes(nn.initializers.zeros_init(), ("norm",)), (d,))
        return constrain(jnp.tanh(project(mean_BLD, kernel, bias, _KERNEL, self.execution)), _STATES)


ARITHMETIC = Arithmetic(
    module=Echo,
    output_layer=lambda config: AdaptiveOutput(_ONE_CLUSTER),
    flops_per_token=flops_per_token,
    initial_carry=lambda config, rows, dtype: nothing_seen(config, rows),
    decoding_carry=lambda config, rows, length, dtype: nothing_seen(config, rows),
)
