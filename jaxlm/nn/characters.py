"""Vectors of tokens from their characters: convolutions, highways and a projection.

Kim, Jernite, Sontag and Rush, "Character-aware neural language models", 2016; Srivastava, Greff and Schmidhuber,
"Highway networks", 2015; in the form of ELMo's language model (allenai/bilm-tf, bilm/training.py:105-323). The ids of
the characters are those of `jaxlm/text/characters.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import embed, gathered, project
from jaxlm.nn.recurrence import uniform

NUM_IDS = 261  # bytes, two marks of sentences, two of words, padding
TABLE_BOUND, FILTER_BOUND, CARRY_BIAS = 1.0, 0.05, -2.0  # of initial values (training.py:161, 190, 279)

_TABLE, _FILTERS = ("characters", "whole_width"), ("window", "whole_width", "filters")
_HIGHWAY, _PROJECTION = ("width", "filters"), ("width", "whole_width")


class CharacterEncoder(nn.Module):
    """Vectors of tokens from the ids of their characters.

    filters: (width, number) of each convolution over vectors of `character_width`; a filter's largest value over a
    token, then the ReLU, is a feature. With the features x, each of `num_highways` highways is
    x <- g relu(x T + b) + (1 - g) x with g = sigmoid(x C + c), and a linear layer gives `width` numbers; with width 0
    the numbers are x.
    """

    filters: tuple[tuple[int, int], ...]
    character_width: int
    num_highways: int
    width: int
    execution: Execution

    @nn.compact
    def __call__(self, ids_BLC: jax.Array) -> jax.Array:
        """Return (B, L, width), or (B, L, features), in the compute dtype."""
        table = self.param("table", with_axes(uniform(TABLE_BOUND), _TABLE), (NUM_IDS, self.character_width))
        ids_TC = ids_BLC.reshape(-1, ids_BLC.shape[-1])
        x_TCK = embed(table, ids_TC, _TABLE, self.execution)
        x_TF = jnp.concatenate([self._features(x_TCK, number) for number in range(len(self.filters))], axis=-1)
        size, zeros, carry = x_TF.shape[-1], nn.initializers.zeros_init(), nn.initializers.constant(CARRY_BIAS)
        for number in range(self.num_highways):
            gate_TF = jax.nn.sigmoid(self._linear(f"highway_{number}_carry", x_TF, size, carry, _HIGHWAY))
            new_TF = jax.nn.relu(self._linear(f"highway_{number}_transform", x_TF, size, zeros, _HIGHWAY))
            x_TF = gate_TF * new_TF + (1.0 - gate_TF) * x_TF
        if self.width:
            x_TF = self._linear("projection", x_TF, self.width, zeros, _PROJECTION)
        return x_TF.reshape(*ids_BLC.shape[:-1], -1)

    def _features(self, x_TCK: jax.Array, number: int) -> jax.Array:
        """Return the features of one convolution, (T, filters)."""
        width, count = self.filters[number]
        init, zeros = with_axes(uniform(FILTER_BOUND), _FILTERS), nn.initializers.zeros_init()
        kernel = self.param(f"filters_{number}_kernel", init, (width, self.character_width, count))
        bias = self.param(f"filters_{number}_bias", with_axes(zeros, ("norm",)), (count,))
        kernel = gathered(kernel, x_TCK.dtype, _FILTERS)
        y_TCF = jax.lax.conv_general_dilated(x_TCK, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        # The bias is the same at all places, so it is added once, to the largest value.
        return jax.nn.relu(jnp.max(y_TCF, axis=1) + bias.astype(y_TCF.dtype))

    def _linear(self, name: str, x_TF: jax.Array, outputs: int, bias_init: Any, names: tuple[str, str]) -> jax.Array:
        normal = nn.initializers.normal(1 / math.sqrt(x_TF.shape[-1]))
        kernel = self.param(f"{name}_kernel", with_axes(normal, names), (x_TF.shape[-1], outputs))
        bias = self.param(f"{name}_bias", with_axes(bias_init, ("norm",)), (outputs,))
        return project(x_TF, kernel, bias, names, self.execution)
