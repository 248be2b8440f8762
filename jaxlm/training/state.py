"""The state of a training run: what a step takes and gives, and what a checkpoint holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from jaxlm.optim import Optimizer
from jaxlm.sharding import state_shardings


@struct.dataclass
class TrainState:
    """step: int32, updates done. halted: bool, set for good by the first loss or gradient that is not finite."""

    step: jax.Array
    params: Any
    opt_state: Any
    halted: jax.Array


def new_state(params: Any, optimizer: Optimizer) -> TrainState:
    """The state before the first update."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        halted=jnp.zeros((), jnp.bool_),
    )


def abstract_state(init_params: Callable[[], Any], optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state whose parameters `init_params` makes, with nothing allocated.

    `init_params` returns parameters boxed with their logical axes; the moments take the boxes, so the shardings, along.
    """
    boxed = jax.eval_shape(lambda: new_state(init_params(), optimizer))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        state_shardings(boxed, mesh),
    )


def fresh_state(init_params: Callable[[], Any], optimizer: Optimizer, abstract: TrainState) -> TrainState:
    """The state made on the devices, each shard where it belongs."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda: nn.unbox(new_state(init_params(), optimizer)), out_shardings=shardings)()


def state_of(params: Any, optimizer: Optimizer, abstract: TrainState) -> TrainState:
    """The state before the first update, with parameters from elsewhere."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda p: new_state(p, optimizer), out_shardings=shardings)(params)
