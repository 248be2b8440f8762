"""The state of a training run and its conversion to and from the contents of a checkpoint."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.mesh import batch_sharding, state_shardings
from jaxlm.training.optimizer import Optimizer


@struct.dataclass
class TrainState:
    """The state between two steps. step: int32, the number of updates.

    halted: bool, set for good by the first loss or gradient that is not finite. seed: uint32, the run's; all keys are
    derived from it and the step. A checkpoint holds neither of the two.
    carry: the model's state after the batch before, leaves (layers, rows, …) in the order of the batch's rows; None for
    models without one. A checkpoint holds it if it is not None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    seed: jax.Array
    halted: jax.Array
    carry: Any = None


InitParams = Callable[[jax.Array], Any]  # a key -> parameters boxed with their logical axes


def new_state(params: Any, optimizer: Optimizer, seed: jax.Array, carry: Any = None) -> TrainState:
    """Return the state before the first update."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.transformation.init(params),
        seed=jnp.asarray(seed, jnp.uint32),
        halted=jnp.zeros((), jnp.bool_),
        carry=carry,
    )


def abstract_state(
    init_params: InitParams, optimizer: Optimizer, mesh: Mesh, carry: Callable[[], Any] = lambda: None
) -> TrainState:
    """Return shapes, dtypes and shardings of the state for the parameters of `init_params`; nothing is allocated.

    The moments inherit the boxes of their parameters and so their shardings. carry: makes the carry before the first
    batch; its rows are sharded like those of the batch.
    """
    boxed = jax.eval_shape(lambda: new_state(init_params(jax.random.key(0)), optimizer, jnp.uint32(0), carry()))
    shardings = state_shardings(boxed, mesh)
    shardings = shardings.replace(carry=jax.tree.map(lambda _: carry_sharding(mesh), boxed.carry))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings,
    )


def carry_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a carry, (layers, rows, …): that of the rows of the batch."""
    return NamedSharding(mesh, PartitionSpec(None, *batch_sharding(mesh).spec))


def first_carry(carry: Callable[[int], Any], rows: int, mesh: Mesh) -> Any:
    """Return the carry before the first batch of `rows` rows, on the devices, or None."""
    shapes = jax.eval_shape(lambda: carry(rows))
    return jax.jit(lambda: carry(rows), out_shardings=jax.tree.map(lambda _: carry_sharding(mesh), shapes))()


def fresh_state(
    init_params: InitParams,
    optimizer: Optimizer,
    abstract: TrainState,
    seed: int,
    carry: Callable[[], Any] = lambda: None,
) -> TrainState:
    """Return the state before the first update; each shard is computed on its own device."""

    def make(seed: jax.Array) -> TrainState:
        return nn.unbox(new_state(init_params(jax.random.key(seed)), optimizer, seed, carry()))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(make, out_shardings=shardings)(jnp.uint32(seed))


def saved_part(state: TrainState) -> dict[str, Any]:
    """Return the part of a state that a checkpoint holds."""
    saved = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return saved if state.carry is None else saved | {"carry": state.carry}


def from_saved(saved: dict[str, Any], abstract: TrainState, seed: int) -> TrainState:
    """Return the state from the result of `saved_part`; a halted run starts again."""
    return TrainState(
        step=saved["step"],
        params=saved["params"],
        opt_state=saved["opt_state"],
        seed=jax.device_put(jnp.uint32(seed), abstract.seed.sharding),
        halted=jax.device_put(jnp.zeros((), jnp.bool_), abstract.halted.sharding),
        carry=saved.get("carry"),
    )
