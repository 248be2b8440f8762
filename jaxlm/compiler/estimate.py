"""Estimated cost of a compiled step on its chips: memory, milliseconds as a sum of parts, and collectives.

The parts are the compiler's cycles with loops multiplied out, custom kernels by their bundles, and collectives by their
bytes over the networks. The sum assumes no overlap; `overlapped_milliseconds` lets the collectives run beside other
operations where the program starts them early. The compiler's cycles are near the peak for matrix products and up
to four times too many for memory-bound operations: `calibration` compares those of three small programs with the chip's
peaks.

The TPU compiler writes a matrix product as a convolution, with batch dimensions as dilated spatial ones. As in XLA's
own cost analysis, only the window positions that meet an element of the input are counted for its FLOPs.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from jaxlm.compiler.chips import Topology
from jaxlm.compiler.collectives import Collective, collectives, hidden_milliseconds, milliseconds
from jaxlm.compiler.hlo import Computation, Module, Operation, parse, sides
from jaxlm.compiler.kernels import call_of, is_kernel, measure

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{(.*?)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_SIDE = 8192


def matmul_flops(module: Module) -> int:
    """Return the FLOPs of one device in one call: 2 per multiply-add. Custom kernels are not in the module's text."""
    total = 0
    for operation, times in module.runs():
        total += times * flops_of(operation, module.homes[id(operation)])
        total += times * sum(flops_of(inner, home) for inner, home in module.within(operation))
    return total


@dataclass(frozen=True)
class Memory:
    """GiB on a chip. arguments: the state and the batch; temporaries: activations and other intermediate values."""

    arguments: float
    temporaries: float
    outputs: float
    program: float

    @property
    def peak(self) -> float:
        """Peak memory; outputs that alias an argument are not counted."""
        return self.arguments + self.temporaries + self.outputs + self.program


@dataclass(frozen=True)
class Kernel:
    """A custom kernel: its runs per step, and the milliseconds of all runs; None: not measured."""

    name: str
    count: int
    milliseconds: float | None


@dataclass(frozen=True)
class CostlyOperation:
    """An operation: its line in the report, its runs per step, the milliseconds of all runs, and its origin.

    bound: the milliseconds by FLOPs and bytes alone. source: its name in the program. line: `jaxlm/nn/layers.py:120`.
    """

    name: str
    part: str
    count: int
    milliseconds: float
    bound: float
    source: str
    line: str


@dataclass(frozen=True)
class Estimate:
    """parts: milliseconds by kind, including `kernels` and `collectives`; `collectives` lists each one separately.

    matmul_flops: of the matrix products outside kernels on one chip, loops multiplied out. bound_milliseconds: the sum
    of the least time of each operation, by its FLOPs and bytes. costliest: the operations that take longest. GPUs have
    these two. hidden_milliseconds: of the collectives, beside other operations; TPUs have it.
    """

    memory: Memory
    parts: Mapping[str, float]
    kernels: tuple[Kernel, ...]
    collectives: tuple[tuple[Collective, float], ...]
    matmul_flops: int
    bound_milliseconds: float | None = None
    costliest: tuple[CostlyOperation, ...] = ()
    hidden_milliseconds: float | None = None

    @property
    def milliseconds(self) -> float:
        """Milliseconds of a step, nothing overlapped; a lower bound if a kernel could not be measured."""
        return sum(self.parts.values())

    @property
    def overlapped_milliseconds(self) -> float | None:
        """The same with collectives beside other operations, where the program has it so; None if not known."""
        return None if self.hidden_milliseconds is None else self.milliseconds - self.hidden_milliseconds

    @property
    def is_lower_bound(self) -> bool:
        """Return True if `milliseconds` leaves out a kernel."""
        return any(kernel.milliseconds is None for kernel in self.kernels)


def estimate(compiled: Compiled, topology: Topology, mesh: Mapping[str, int]) -> Estimate:
    """Return the estimate for a program compiled for `topology`, with its devices in a mesh of these sizes."""
    module = parse(compiled.as_text() or "")
    found = tuple((one, milliseconds(one, topology)) for one in collectives(module, mesh, topology.slices))
    kernels = _kernels(module, topology)
    cycles = sorted(cycles_of(module).items())
    parts = {kind: count / topology.chip.clock_hz * 1e3 for kind, count in cycles if count}
    if kernels:
        parts["kernels"] = sum(kernel.milliseconds or 0.0 for kernel in kernels)
    parts["collectives"] = sum(time for _, time in found)
    hidden = hidden_milliseconds(module, mesh, topology)
    return Estimate(memory_of(compiled), parts, kernels, found, matmul_flops(module), hidden_milliseconds=hidden)


def memory_of(compiled: Compiled) -> Memory:
    """Return the memory of a program on each device."""
    stats: Any = compiled.memory_analysis()
    gib = 2.0**30
    return Memory(
        stats.argument_size_in_bytes / gib,
        stats.temp_size_in_bytes / gib,
        (stats.output_size_in_bytes - stats.alias_size_in_bytes) / gib,
        stats.generated_code_size_in_bytes / gib,
    )


def cycles_of(module: Module) -> Counter[str]:
    """Return the compiler's cycles by kind: matrix products, and the rest by the compiler's own kinds."""
    found: Counter[str] = Counter()
    for operation, times in module.runs():
        if operation.cycles:
            found[_line(module, operation)] += operation.cycles * times
    return found


@dataclass(frozen=True)
class Rate:
    """The rate that the estimated cycles of a program imply, and the chip's peak, in `unit`."""

    program: str
    unit: str
    estimated: float
    peak: float


@functools.cache
def calibration(topology: Topology) -> tuple[Rate, ...]:
    """Return the rates of a bfloat16 matrix product and of float32 elementwise operations and row sums, 8192 x 8192."""
    wide = _SIDE * _SIDE * 4
    matmul = _seconds(topology, jnp.bfloat16, lambda x: x @ x)
    elementwise = _seconds(topology, jnp.float32, lambda x: x * x + 1.0)
    row_sums = _seconds(topology, jnp.float32, lambda x: x.sum(axis=1))
    return (
        Rate("matrix product", "TFLOP/s", 2 * _SIDE**3 / matmul / 1e12, topology.chip.peak_tflops),
        Rate("elementwise", "GB/s", 2 * wide / elementwise / 1e9, topology.chip.hbm_gbps),
        Rate("row sums", "GB/s", wide / row_sums / 1e9, topology.chip.hbm_gbps),
    )


def flops_of(operation: Operation, computation: Computation) -> int:
    """Return the FLOPs of a matrix product, 2 per multiply-add; 0 for other operations."""
    if operation.kind not in ("convolution", "dot"):
        return 0
    left, right = (sides(computation.by_name[name].shape) for name in operation.operands[:2])
    out = sides(operation.shape)
    if operation.kind == "dot":
        contracted = _CONTRACTED.search(operation.rest)
        axes = [int(axis) for axis in contracted.group(1).split(",") if axis] if contracted else []
        return 2 * math.prod(out) * math.prod(left[axis] for axis in axes)
    labels = _LABELS.search(operation.rest)
    assert labels is not None, operation.rest[:200]
    inputs, kernel, outputs = labels.groups()
    window = _WINDOW.search(operation.rest)
    settings = dict(part.split("=") for part in window.group(1).split()) if window else {}
    flops = 2 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernel.index("i")]
    for axis in sorted(set(inputs) - set("bf")):
        of_axis = left[inputs.index(axis)], right[kernel.index(axis)], out[outputs.index(axis)]
        flops *= _meetings(*of_axis, _of_axis(settings, int(axis)))
    return flops


def _of_axis(settings: dict[str, str], axis: int) -> tuple[int, int, int, int]:
    """Return stride, padding before, and dilation of the input and of the kernel along a spatial axis."""

    def value(name: str) -> str | None:
        return settings[name].split("x")[axis] if name in settings else None

    before = int((value("pad") or "0").split("_")[0])
    return int(value("stride") or 1), before, int(value("lhs_dilate") or 1), int(value("rhs_dilate") or 1)


def _meetings(size: int, kernel: int, out: int, window: tuple[int, int, int, int]) -> int:
    """Return how often an element of the kernel meets one of the input along a spatial axis, over all outputs."""
    stride, before, dilated, kernel_dilated = window
    reached = (i * stride + j * kernel_dilated - before for i in range(out) for j in range(kernel))
    return sum(0 <= position <= (size - 1) * dilated and position % dilated == 0 for position in reached)


def _line(module: Module, operation: Operation) -> str:
    if operation.kind != "fusion":
        return "copies" if operation.kind.startswith(("copy", "slice")) else "other operations"
    kinds = {inner.kind for inner, _ in module.within(operation)}
    if "convolution" in kinds or "dot" in kinds:
        return "matrix products"
    if "reduce" in kinds or "reduce-window" in kinds:
        return "reductions"
    return "other fusions"


def _kernels(module: Module, topology: Topology) -> tuple[Kernel, ...]:
    """Return the kernels by name; kernels of one name that differ in shape are combined."""
    counts: Counter[tuple[str, str]] = Counter()
    for operation, times in module.runs():
        for inner in (operation, *(inner for inner, _ in module.within(operation))):
            if is_kernel(inner):
                counts[re.sub(r"[.\d]+$", "", inner.name), call_of(inner)] += times
    cycles = measure([call for _, call in counts], topology.name)
    found = []
    for name in sorted({name for name, _ in counts}):
        calls = {call: times for (other, call), times in counts.items() if other == name}
        for measured in (True, False):
            of = {call: times for call, times in calls.items() if (cycles[call] is not None) == measured}
            total = sum(times * (cycles[call] or 0) for call, times in of.items()) / topology.chip.clock_hz * 1e3
            if of:
                found.append(Kernel(name, sum(of.values()), total if measured else None))
    return tuple(found)


def _seconds(topology: Topology, dtype: jnp.dtype, program: Callable[[jax.Array], jax.Array]) -> float:
    place = jax.sharding.SingleDeviceSharding(topology.devices()[0])
    x = jax.ShapeDtypeStruct((_SIDE, _SIDE), dtype, sharding=place)
    module = parse(jax.jit(program).lower(x).compile().as_text() or "")
    return cycles_of(module).total() / topology.chip.clock_hz
