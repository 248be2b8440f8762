"""How a model runs, never what it computes: these choices may change when a run resumes."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.nn.attention import Backend


@dataclass(frozen=True)
class Execution:
    """Run fields of a model: dtype, attention backend, what the backward pass recomputes, how the layer loop is cut."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic. auto: bfloat16 on accelerators, float32 on the CPU. Parameters, norms and losses stay float32."""
    attention: Backend = "auto"
    """Attention backend. auto: splash on TPUs, xla elsewhere; what a kernel cannot do, as dropping weights, xla does
    in its place, and the log says so. cudnn: a GPU's kernel."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or each whole layer."""
    unroll: int = 0
    """Layers per iteration of the layer loop; 0: one on a GPU, all of them elsewhere, which takes longer to compile."""
    loss_chunks: int = 0
    """Pieces of the length in which the vocabulary projection and its loss are made; more pieces need less memory.
    0: one piece, and on the CPU as many as let the logits of one fit its cache."""

    dropout_bits: Literal["threefry", "rbg"] = "threefry"
    """What draws dropout's bits. rbg: the accelerator's own generator, faster; its bits are others on another mesh, and
    for members that are trained side by side. threefry's are the same everywhere."""
    gradient_sums: Literal["arithmetic", "float32"] = "arithmetic"
    """In what the gradients of the blocks' weights are added up over devices: the dtype of the arithmetic, or float32,
    which sends twice as much. The biases of queries, keys and values go with their weights; all other gradients are
    float32."""

    def says(self) -> tuple[str, ...]:
        """What a run gives up by these choices, for people."""
        if self.dropout_bits == "threefry":
            return ()
        return ("dropout bits by rbg: others on another mesh, and for members that are trained side by side",)

    def gradient_dtype(self) -> jnp.dtype:
        """The dtype of a weight's gradient before it is added up over devices."""
        return jnp.dtype(jnp.float32) if self.gradient_sums == "float32" else self.compute_dtype()

    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations and of the weights inside a step."""
        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if devices.platform() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)

    def layers_per_iteration(self, num_layers: int) -> int:
        """The `unroll` of the layer loop. The loop itself costs a CPU 10 to 18 % of a step, and a TPU a third."""
        if self.unroll < 0 or self.unroll > num_layers:
            raise InputError(f"execution.unroll {self.unroll}: a number from 0 to the model's {num_layers} layers")
        return self.unroll or (1 if devices.platform() == "gpu" else num_layers)
