"""The mesh, and the one table from logical axis names to mesh axes."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.devices import compiling_for
from jaxlm.distributed.partition import partition_spec, use_rules
from jaxlm.errors import InputError

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axis. What is not named here is whole on every device.
RULES = {
    "batch": ("data", "fsdp"),
    "rows": "data",  # of activations whose width an fsdp group deals out
    "width": "fsdp",
    "vocabulary": "tensor",
    "heads": "tensor",
    "feed_forward": "tensor",
    # Of a kernel that leads back to the width. fsdp cuts kernels along their inputs, into whole rows: a TPU copies what
    # it gathers along the last axis once more, into place.
    "feed_forward_in": ("tensor", "fsdp"),
    "head_width_in": "fsdp",
}

# Chips that hold one copy of a model under mesh.fsdp auto: the fastest of the compiler's estimates for GPT-1 and
# BERT-Large on v5e, v5p and v6e (launch/README.md). More shards send more bytes; fewer update more parameters each.
CHIPS_PER_COPY = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one of them may be -1, which takes the devices that the others leave."""

    data: int = -1
    """Copies of the model, each with its part of the batch."""
    fsdp: int | Literal["auto"] = "auto"
    """Shards of each kernel along its inputs, of each table along its width, and of the batch. auto: 16 on TPU pods, so
    that 16 chips hold one copy of the model; 1 elsewhere."""
    tensor: int = 1
    """Shards of heads, feed-forward and vocabulary."""

    def describe(self, mesh: Mesh) -> str | None:
        """Return the sentence that says which fsdp was chosen; None where it was given."""
        if self.fsdp != "auto" or mesh.size == 1:
            return None
        return f"mesh.fsdp auto: {mesh.shape['fsdp']} on {mesh.size} devices; --mesh.fsdp N chooses another"


def chosen_fsdp(config: MeshConfig, devices: Sequence[jax.Device], num_slices: int) -> int:
    """Return the fsdp of a config: CHIPS_PER_COPY for `auto` on TPU pods that they divide, else 1."""
    if config.fsdp != "auto":
        return config.fsdp
    is_pod = devices[0].platform == "tpu" and config.data == -1
    fits = config.tensor > 0 and len(devices) // num_slices % (CHIPS_PER_COPY * config.tensor) == 0
    return CHIPS_PER_COPY if is_pod and fits else 1


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh `data x fsdp x tensor` over all devices, or the given ones; `data` is outermost across slices."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = [config.data, chosen_fsdp(config, devices, len({slice_of(device) for device in devices})), config.tensor]
    asked = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise InputError(f"mesh ({asked}): sizes above 0, and at most one -1")
    known = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise InputError(f"mesh ({asked}) does not fit {len(devices)} devices: the product must be {len(devices)}")
    auto = (AxisType.Auto,) * len(AXES)  # explicit axes, make_mesh's default, break Linen's logical constraints
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    if sizes[0] % len(slices):
        raise InputError(
            f"mesh ({asked}): data, here {sizes[0]}, is not divisible by the {len(slices)} slices, and only copies of "
            f"the model may lie across them: give a multiple of {len(slices)}"
        )
    within = (sizes[0] // len(slices), *sizes[1:])
    # An axis of 8 on a torus of 4 x 4 x 4 takes a side and half of another.
    split = {"allow_split_physical_axes": True}
    arrays = [mesh_utils.create_device_mesh(within, slices[number], **split) for number in sorted(slices)]
    return Mesh(np.concatenate(arrays), AXES, axis_types=auto)


def slice_of(device: jax.Device) -> int:
    """The number of the TPU slice that a device is in; slices are joined by the data center's network. Elsewhere 0."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def check_batch(batch_size: int, micro_batches: int, mesh: Mesh) -> None:
    """The rows of a micro-batch are dealt evenly to data x fsdp devices; refuse a batch that cannot be."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    if micro_batches < 1 or batch_size < 1 or batch_size % (micro_batches * data * fsdp):
        raise InputError(
            f"batch_size {batch_size} is not divisible by micro_batches {micro_batches} x mesh data {data} x fsdp "
            f"{fsdp} = {micro_batches * data * fsdp}: change one of them"
        )


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Trace and run under `mesh` with RULES; a constraint on a logical axis does nothing outside of it."""
    with jax.set_mesh(mesh), use_rules(RULES), compiling_for(mesh.devices.flat[0].platform):
        yield


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp, all else whole."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Return the leaves of `tree`, equal on every process, as arrays that are whole on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree)


def abstract_replicated(tree: Any, mesh: Mesh) -> Any:
    """Return what `replicated` would, as jax.ShapeDtypeStruct."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding), tree)


def state_shardings(abstract_boxed: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each leaf of a tree of boxed shapes; a dimension its axis does not divide stays whole.

    `abstract_boxed` is what `jax.eval_shape` gives for an initialiser with logical axis names; optimizer moments carry
    the boxes of their parameters. Leaves without a box are whole on every device.
    """
    whole: set[str] = set()

    def place(leaf):
        if not isinstance(leaf, nn.LogicallyPartitioned):
            return NamedSharding(mesh, PartitionSpec())
        spec, kept_whole = partition_spec(leaf.names, leaf.value.shape, RULES, mesh.shape)
        whole.update(kept_whole)
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(place, abstract_boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    for what in sorted(whole):
        log.info("not divisible, so kept whole on every device: %s", what)
    return shardings


def host_rows(batch_size: int, mesh: Mesh) -> np.ndarray:
    """The rows of a global batch that this process feeds, ascending."""
    rows: set[int] = set()
    for index in batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values():
        if index is not None:  # None would be a device of another process
            rows.update(range(batch_size)[index[0]])
    return np.array(sorted(rows))


def to_devices(batch: Any, mesh: Mesh, batch_size: int) -> Any:
    """A batch of this process's rows as global arrays with the rows sharded."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x), (batch_size, *x.shape[1:])), batch
    )
