"""The device mesh, the one table from logical axis names to mesh axes, and the PartitionSpecs that follow from it.

A dimension that its mesh axes do not divide (40,478 words by 4) is replicated: GSPMD would reject or pad it. Linen's
own logical constraints lack this rule, so its context of rules stays empty and the one here is used.
"""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.config import MeshConfig
from jaxlm.distributed.devices import capability_of, compiling_for
from jaxlm.errors import InputError
from jaxlm.wording import counted

_rules: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("rules", default=None)


@contextlib.contextmanager
def use_rules(rules: Mapping[str, Any] | None) -> Iterator[None]:
    """Make `constrain` map logical axes by `rules` while a step is traced; None makes it a no-op."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def with_axes(init: Callable[..., jax.Array], names: Sequence[str | None]) -> Callable[..., jax.Array]:
    """Return `init` with logical axes for its result: a box, which `Module.param` stores and unboxes on access."""
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init, tuple(names))
    return boxed


def partition_spec(
    names: Sequence[str | None], shape: Sequence[int], rules: Mapping[str, Any], mesh_shape: Mapping[str, int]
) -> tuple[PartitionSpec, list[str]]:
    """Return the spec of an array with these axes, and a note for each dimension that is not divisible."""
    spec, kept_whole = [], []
    for name, size in zip(names, shape, strict=True):
        target = rules.get(name) if name is not None else None
        axes = (target,) if isinstance(target, str) else tuple(target or ())
        shards = 1
        for axis in axes:
            shards *= mesh_shape[axis]
        if size % shards:
            kept_whole.append(f"{name} ({size}) by {' x '.join(axes)} ({shards})")
            axes = ()
        spec.append((axes if len(axes) > 1 else axes[0]) if axes else None)
    return PartitionSpec(*spec), kept_whole


def current_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """Return the spec of an array with these logical axes under `jax.set_mesh` and `use_rules`; None without them."""
    mesh, rules = jax.sharding.get_abstract_mesh(), _rules.get()
    if rules is None or mesh.empty or mesh.size == 1:
        return None
    return partition_spec(names, shape, rules, mesh.shape)[0]


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Return `x` sharded by its logical axes under `jax.set_mesh` and `use_rules`; unchanged without them."""
    spec = current_spec(names, x.shape)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axis. Axes without an entry are replicated.
RULES = {
    "batch": ("data", "fsdp"),
    "rows": "data",  # rows of activations whose width is sharded over fsdp
    "width": "fsdp",
    "vocabulary": "tensor",
    "heads": "tensor",
    "feed_forward": "tensor",
    # Inputs of a kernel whose output is the width. fsdp shards kernels along their inputs, into whole rows: a TPU
    # copies the result of an all-gather along the last axis once more, into its layout.
    "feed_forward_in": ("tensor", "fsdp"),
    "head_width_in": "fsdp",
}

# Chips that hold one copy of a model under mesh.fsdp auto: the fastest of the compiler's estimates for GPT-1 and
# BERT-Large on v5e, v5p and v6e (launch/README.md). More shards send more bytes; fewer update more parameters each.
CHIPS_PER_COPY = 16

log = logging.getLogger(__name__)


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
        raise InputError(
            f"mesh must have positive sizes, with at most one -1, got {asked}; change --mesh.data, "
            "--mesh.fsdp or --mesh.tensor"
        )
    known = int(np.prod([size for size in sizes if size != -1]))
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise InputError(
            f"mesh ({asked}) does not fit {counted(len(devices), 'device')}: the product must be {len(devices)}; "
            "change one of --mesh.data, --mesh.fsdp and --mesh.tensor"
        )
    auto = (AxisType.Auto,) * len(AXES)  # explicit axes, make_mesh's default, break Linen's logical constraints
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    if sizes[0] % len(slices):
        raise InputError(
            f"mesh ({asked}): data must be a multiple of the {len(slices)} slices, got {sizes[0]}; only replicas of "
            f"the model may span them: give a multiple of {len(slices)}"
        )
    within = (sizes[0] // len(slices), *sizes[1:])
    # An axis of 8 on a torus of 4 x 4 x 4 uses one side and half of another.
    split = {"allow_split_physical_axes": True}
    arrays = [mesh_utils.create_device_mesh(within, slices[number], **split) for number in sorted(slices)]
    return Mesh(np.concatenate(arrays), AXES, axis_types=auto)


def slice_of(device: jax.Device) -> int:
    """Return the number of the TPU slice of a device, 0 on other platforms; the data center network connects slices."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Trace and run under `mesh` with RULES; outside this context constraints on logical axes have no effect."""
    device = mesh.devices.flat[0]
    traced_for = compiling_for(device.platform, capability_of(device), device.device_kind)
    with jax.set_mesh(mesh), use_rules(RULES), traced_for:
        yield


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of batches: rows over data and fsdp, other axes replicated."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Return the leaves of `tree`, equal on every process, as arrays that are replicated on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree)


def abstract_leaf(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and the dtype of an array with a sharding."""
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)


def abstract_replicated(tree: Any, mesh: Mesh) -> Any:
    """Return the result of `replicated` as jax.ShapeDtypeStruct."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: abstract_leaf(leaf, sharding), tree)


def state_shardings(abstract_boxed: Any, mesh: Mesh) -> Any:
    """Return a NamedSharding for each leaf of a tree of boxed shapes; a dimension that its axis does not divide is
    whole.

    `abstract_boxed` is the result of `jax.eval_shape` for an initializer with logical axis names; optimizer moments
    carry the boxes of their parameters. Leaves without a box are replicated.
    """
    whole: set[str] = set()

    def place(leaf):
        if not isinstance(leaf, nn.LogicallyPartitioned):
            return NamedSharding(mesh, PartitionSpec())
        spec, kept_whole = partition_spec(leaf.names, leaf.value.shape, RULES, mesh.shape)
        whole.update(kept_whole)
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(place, abstract_boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    for dimension in sorted(whole):
        log.info("not divisible, so replicated on every device: %s", dimension)
    return shardings


def host_rows(batch_size: int, mesh: Mesh) -> np.ndarray:
    """Return the rows of a global batch that this process feeds, ascending."""
    rows: set[int] = set()
    for index in batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values():
        if index is not None:  # None stands for a device of another process
            rows.update(range(batch_size)[index[0]])
    return np.array(sorted(rows))


def to_devices(batch: Any, mesh: Mesh, batch_size: int) -> Any:
    """Return a batch of this process's rows as global arrays with sharded rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x), (batch_size, *x.shape[1:])), batch
    )


def whole_to_devices(batch: Any, mesh: Mesh) -> Any:
    """Return a whole batch, arrays (B, …) equal on every process, as global arrays with sharded rows."""
    batch_size = len(jax.tree.leaves(batch)[0])
    own = host_rows(batch_size, mesh)
    return to_devices(jax.tree.map(lambda x: x[own], batch), mesh, batch_size)
