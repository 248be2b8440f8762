"""The state of a training run: what a step takes and gives, and what a checkpoint holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from jaxlm.distributed.mesh import state_shardings
from jaxlm.training.optimizer import Optimizer


@struct.dataclass
class TrainState:
    """step: int32, updates done. halted: bool, set for good by the first loss or gradient that is not finite.

    seed: uint32, the run's; all keys are derived from it and the step. Neither it nor the flag is in a checkpoint.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    seed: jax.Array
    halted: jax.Array


InitParams = Callable[[jax.Array], Any]  # a key -> parameters boxed with their logical axes


def new_state(params: Any, optimizer: Optimizer, seed: jax.Array) -> TrainState:
    """The state before the first update."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.transformation.init(params),
        seed=jnp.asarray(seed, jnp.uint32),
        halted=jnp.zeros((), jnp.bool_),
    )


def abstract_state(init_params: InitParams, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state whose parameters `init_params` makes, with nothing allocated.

    The moments take the boxes of their parameters, so the shardings, along.
    """
    boxed = jax.eval_shape(lambda: new_state(init_params(jax.random.key(0)), optimizer, jnp.uint32(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        state_shardings(boxed, mesh),
    )


def fresh_state(init_params: InitParams, optimizer: Optimizer, abstract: TrainState, seed: int) -> TrainState:
    """The state made on the devices, each shard where it belongs."""
    make = lambda seed: nn.unbox(new_state(init_params(jax.random.key(seed)), optimizer, seed))  # noqa: E731
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(make, out_shardings=shardings)(jnp.uint32(seed))


def saved_part(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


def from_saved(saved: dict[str, Any], abstract: TrainState, seed: int) -> TrainState:
    """The state from what `saved_part` gave; a run that was halted is taken up again."""
    return TrainState(
        step=saved["step"],
        params=saved["params"],
        opt_state=saved["opt_state"],
        seed=jax.device_put(jnp.uint32(seed), abstract.seed.sharding),
        halted=jax.device_put(jnp.zeros((), jnp.bool_), abstract.halted.sharding),
    )
