"""How a model runs, never what it computes: these choices may change when a run resumes."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxlm import devices
from jaxlm.errors import InputError


@dataclass(frozen=True)
class Execution:
    """Run fields of a model: dtype, attention backend, what the backward pass recomputes, how the layer loop is cut."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic. auto: bfloat16 on accelerators, float32 on the CPU. Parameters, norms and losses stay float32."""
    attention: Literal["xla"] = "xla"
    """Attention backend."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or each whole layer."""
    unroll: int = 0
    """Layers per iteration of the layer loop; 0: all of them on the CPU, one elsewhere."""
    loss_chunks: int = 0
    """Pieces of the length in which the vocabulary projection and its loss are made; more pieces need less memory.
    0: one piece, and on the CPU as many as let the logits of one fit its cache."""

    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations and of the weights inside a step."""
        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if devices.platform() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)

    def layers_per_iteration(self, num_layers: int) -> int:
        """The `unroll` of the layer loop. On a CPU the loop itself costs 10 to 18 % of a step."""
        if self.unroll < 0 or self.unroll > num_layers:
            raise InputError(f"execution.unroll {self.unroll}: a number from 0 to the model's {num_layers} layers")
        return self.unroll or (num_layers if devices.platform() == "cpu" else 1)
