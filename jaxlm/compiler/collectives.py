"""The collectives of a compiled step: kind, mesh axis, network, count, bytes, and their time on a TPU.

The TPU compiler hides some of them: in fusions, where one that spans several (an asynchronous gather next to matrix
products) appears in each, with one channel; and, across slices, as a transfer to the host, which reduces over the data
center network.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxlm.compiler.chips import Topology
from jaxlm.compiler.hlo import Module, Operation, shape_bytes, tuple_parts

# For a ring of n: how often (n - 1) / n of the larger side of a collective is sent by each chip.
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}
_CHANNEL = re.compile(r"channel_id=(\d+)")
_PAIR = re.compile(r"async-collective-(start|done)(\.\d+)?$")  # fusions between which a collective runs
_ACROSS_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

CHIPS, SLICES = "interconnect", "data center"


@dataclass(frozen=True)
class Collective:
    """A kind of collective over groups of `size` devices along mesh axes, `data` or `data+fsdp`.

    network: between the chips of a slice, or between slices. count: how many run in a step; bytes: of all of them, per
    device, of the input or of the output, whichever is larger.
    """

    kind: str
    axis: str
    network: str
    size: int
    count: int
    bytes: int


def collectives(
    module: Module, mesh: Mapping[str, int], slices: int = 1, per_host: int | None = None
) -> tuple[Collective, ...]:
    """Return the collectives of a module compiled for a mesh of these sizes, with `data` outermost across slices.

    per_host: GPUs per host; groups that span hosts use the network of the data center.
    """
    counts: Counter[tuple[str, str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, str, int]] = Counter()
    for operation, kind, times in _found(module):
        if (one := _described(operation, kind, mesh, slices, per_host)) is not None:
            key = (one.kind, one.axis, one.network, one.size)
            counts[key] += times
            sizes[key] += one.bytes * times
    return tuple(Collective(*key, counts[key], sizes[key]) for key in sorted(counts))


def _described(
    operation: Operation, kind: str, mesh: Mapping[str, int], slices: int, per_host: int | None = None
) -> Collective | None:
    """Return a single collective, None for one of groups of a single device."""
    if across := _ACROSS_SLICES.search(operation.rest):
        size = shape_bytes(tuple_parts(operation.shape)[0])
        return Collective(across.group(1).lower().replace("_", "-"), "data", SLICES, slices, 1, size)
    groups = operation.groups(math.prod(mesh.values()) // slices)
    axis = _axis(groups, mesh)
    # A permute's groups are its pairs: it goes around all devices of the axis.
    length = math.prod(mesh[name] for name in axis.split("+") if name) if "permute" in kind else groups.shape[1]
    if length == 1:
        return None
    spans_hosts = per_host is not None and bool((groups // per_host != groups[:, :1] // per_host).any())
    # A gather's result is whole, a scatter's is a shard of its input; a fused scatter appears as a reduction.
    size = operation.bytes * (length if operation.kind == "reduce-scatter" else 1)
    return Collective(kind, axis, SLICES if spans_hosts else CHIPS, length, 1, size)


def hidden_milliseconds(module: Module, mesh: Mapping[str, int], topology: Topology) -> float:
    """Return the time of a step's collectives that the operations beside them hide.

    Some collectives have two halves, between which the schedule has other operations: fusions that are called
    `async-collective-start` and `-done`, and the two halves of a gather or permute. Operations in between hide as much
    of it as they have cycles; each hides one collective at a time, first the one that began first. Custom kernels,
    which have no cycles in the text, hide nothing here.
    """
    hidden, left = 0.0, dict[str, float]()  # left: milliseconds of the collectives that are on their way
    for operation, times in module.runs():
        halves = _PAIR.match(operation.name)
        if operation.kind.endswith("-done") or (halves and halves.group(1) == "done"):
            started = operation.operands[0] if halves is None else halves.group(2) or ""
            left.pop(started, None)
        elif halves or (operation.collective and operation.kind.endswith("-start")):
            inner = [operation] if halves is None else [one for one, _ in module.within(operation)]
            found = (_described(one, one.collective, mesh, topology.slices) for one in inner if one.collective)
            time = sum(milliseconds(one, topology) for one in found if one is not None)
            left[operation.name if halves is None else halves.group(2) or ""] = time
        else:
            time = operation.cycles / topology.chip.clock_hz * 1e3
            for name, rest in left.items():
                beside = min(rest, time)
                left[name], time = rest - beside, time - beside
                hidden += beside * times
    return hidden


def milliseconds(one: Collective, topology: Topology) -> float:
    """Return the time of `one` in a step, from its bytes alone.

    Within a slice a group of all chips uses all links in one direction, a smaller group those of one side of the torus.
    Between slices each chip has its share of its host's network.
    """
    if one.network == SLICES:
        return passes(one) * one.bytes / (topology.chip.data_center_gbps * 1e9) * 1e3
    out = topology.chip.interconnect_gbps / 2 * 1e9
    if one.kind == "collective-permute":  # to one neighbour, over one link
        return one.bytes / (out / topology.chip.dimensions / 2) * 1e3
    if one.size < topology.num_chips // topology.slices:
        out /= topology.chip.dimensions
    return passes(one) * one.bytes / out * 1e3


def passes(one: Collective) -> float:
    """Return how often each device of a ring sends the bytes of a collective."""
    return _PASSES.get(one.kind, 1) * (one.size - 1) / one.size


def _found(module: Module) -> Iterator[tuple[Operation, str, int]]:
    """Yield each collective once: the operation, its kind, and how often it runs."""
    seen: set[tuple[str, str]] = set()
    for operation, times in module.runs():
        if operation.collective:
            yield operation, operation.collective, times
        elif operation.kind == "send" and _ACROSS_SLICES.search(operation.rest):
            yield operation, "send", times
        for inner, home in module.within(operation):
            if kind := inner.collective:
                channel = _CHANNEL.search(inner.rest)
                key = (kind, channel.group(1) if channel else inner.name)
                if key not in seen:
                    seen.add(key)
                    yield inner, "reduce-scatter" if home.name.startswith("all-reduce-scatter") else kind, times


def _axis(groups: np.ndarray, mesh: Mapping[str, int]) -> str:
    """Return the axes along which the members of a group differ; devices are numbered by their position in the mesh."""
    positions = np.stack(np.unravel_index(groups, tuple(mesh.values())))  # (axes, groups, members)
    differ = (positions != positions[:, :, :1]).any(axis=(1, 2))
    return "+".join(name for name, varies in zip(mesh, differ, strict=True) if varies)
