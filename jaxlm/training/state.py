"""The state of a training run: what a step takes and gives, and what a checkpoint holds."""

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
    """step: int32, updates done. halted: bool, set for good by the first loss or gradient that is not finite.

    seed: uint32, the run's; all keys are derived from it and the step. Neither it nor the flag is in a checkpoint.
    carry: what the model remembers from the batch before, leaves (layers, rows, …) in the order of the batch's rows;
    None for models that remember nothing. A checkpoint has it where it is not None.
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
    """Return shapes, dtypes and shardings of the state whose parameters `init_params` makes; nothing is allocated.

    The moments take the boxes of their parameters, so the shardings, along. carry: makes the carry before the first
    batch; its rows are sharded as those of the batch.
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
    """Return the sharding of a carry, (layers, rows, …): its rows lie where those of the batch do."""
    return NamedSharding(mesh, PartitionSpec(None, *batch_sharding(mesh).spec))


def first_carry(carry: Callable[[int], Any], rows: int, mesh: Mesh) -> Any:
    """Return the carry before the first batch of `rows` rows, on the devices; None where there is none."""
    shapes = jax.eval_shape(lambda: carry(rows))
    return jax.jit(lambda: carry(rows), out_shardings=jax.tree.map(lambda _: carry_sharding(mesh), shapes))()


def fresh_state(
    init_params: InitParams,
    optimizer: Optimizer,
    abstract: TrainState,
    seed: int,
    carry: Callable[[], Any] = lambda: None,
) -> TrainState:
    """Return the state before the first update, each shard made on the device where it belongs."""

    def make(seed: jax.Array) -> TrainState:
        return nn.unbox(new_state(init_params(jax.random.key(seed)), optimizer, seed, carry()))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(make, out_shardings=shardings)(jnp.uint32(seed))


def saved_part(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds of a state."""
    saved = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    return saved if state.carry is None else saved | {"carry": state.carry}


def from_saved(saved: dict[str, Any], abstract: TrainState, seed: int) -> TrainState:
    """Return the state from what `saved_part` gave; a run that was halted is taken up again."""
    return TrainState(
        step=saved["step"],
        params=saved["params"],
        opt_state=saved["opt_state"],
        seed=jax.device_put(jnp.uint32(seed), abstract.seed.sharding),
        halted=jax.device_put(jnp.zeros((), jnp.bool_), abstract.halted.sharding),
        carry=saved.get("carry"),
    )
