"""The execution of a model, which does not affect its results: dtype, kernels, rematerialization, the layer loop."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.errors import InputError
from jaxlm.nn.attention import Backend
from jaxlm.nn.attention_kernels import SAVED


@dataclass(frozen=True)
class Execution:
    """Run fields of a model: dtype, attention backend, rematerialization, unrolling of the layer loop."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on accelerators, float32 on the CPU. Parameters, norms and losses stay float32."""
    attention: Backend = "auto"
    """Attention backend. auto: splash on TPUs, xla elsewhere. cudnn: a kernel for GPUs. Cases that a kernel does not
    support, for example attention dropout, fall back to xla, and the log says so."""
    remat: Literal["none", "dots", "full"] = "none"
    """Recomputation in the backward pass. none: nothing. dots: all but matrix products. full: each whole layer."""
    unroll: int = 0
    """Layers per iteration of the layer loop. 0: one on a GPU, all of them elsewhere. More layers compile longer."""
    loss_chunks: int = 0
    """Chunks of the length in which the vocabulary projection and its loss are computed. More chunks need less memory.
    0: one chunk, and on the CPU as many as let the logits of one fit its cache."""

    dropout_bits: Literal["threefry", "rbg"] = "threefry"
    """PRNG for dropout. threefry: the masks are the same on every mesh. rbg: hardware generator, faster, but the masks
    depend on the mesh and on training several trials at once."""
    gradient_sums: Literal["arithmetic", "float32"] = "arithmetic"
    """dtype in which the gradients of the blocks' weights are all-reduced. arithmetic: the compute dtype. float32:
    twice the traffic. The biases of queries, keys and values follow their weights. All other gradients are float32."""

    def says(self) -> tuple[str, ...]:
        """Return sentences about the reproducibility that these choices give up."""
        if self.dropout_bits == "threefry":
            return ()
        return ("dropout bits by rbg: they depend on the mesh, and on training several trials at once",)

    def gradient_dtype(self) -> jnp.dtype:
        """Return the dtype of a weight's gradient before it is all-reduced."""
        return jnp.dtype(jnp.float32) if self.gradient_sums == "float32" else self.compute_dtype()

    def compute_dtype(self) -> jnp.dtype:
        """Return the dtype of activations and of the weights inside a step."""
        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if devices.platform() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)

    def layers_per_iteration(self, num_layers: int) -> int:
        """Return the `unroll` of the layer loop. The loop itself costs a CPU 10 to 18 % of a step, a TPU a third."""
        if self.unroll < 0 or self.unroll > num_layers:
            raise InputError(f"execution.unroll must be from 0 to the model's {num_layers} layers, got {self.unroll}")
        return self.unroll or (1 if devices.platform() == "gpu" else num_layers)


_POLICIES = jax.checkpoint_policies
_SAVED = {
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(SAVED)
    ),
    "full": None,
}


def stacked(
    block: type[nn.Module], num_layers: int, execution: Execution, *, in_axes: tuple[Any, ...], static: tuple[int, ...]
) -> Any:
    """Return the module class of `num_layers` blocks, unrolled and rematerialized as `execution` selects.

    The block takes the states first and returns (states, outputs that are stacked over the layers). in_axes: for each
    further argument, 0 if every layer has its own and nn.broadcast if all share it. static: the arguments, counted with
    the module as 0, that are Python values.
    """
    if execution.remat != "none":
        block = nn.remat(block, prevent_cse=False, policy=_SAVED[execution.remat], static_argnums=static)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=in_axes,
        length=num_layers,
        unroll=execution.layers_per_iteration(num_layers),
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
