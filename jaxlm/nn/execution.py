"""The execution of a model, which does not affect its results: dtype, kernels, rematerialization, the layer loop."""

from typing import Any

import jax
from flax import linen as nn

from jaxlm.nn.attention import SAVED
from jaxlm.nn.config import Execution

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
