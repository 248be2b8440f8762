"""Estimated cost of a compiled step on its chips: memory, milliseconds as a sum of parts, and collectives.

The parts are the compiler's cycles with loops multiplied out, custom kernels by their bundles, and collectives by their
bytes over the networks. The sum assumes no overlap. The compiler's cycles are near the peak for matrix products and up
to four times too many for memory-bound operations (`jaxlm.compiler.calibration`).
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from jaxlm.compiler.chips import Topology
from jaxlm.compiler.collectives import Collective, collectives, milliseconds
from jaxlm.compiler.flops import matmul_flops
from jaxlm.compiler.hlo import Module, Operation, parse
from jaxlm.compiler.kernels import call_of, is_kernel, measure

RUNTIME_GIB = 0.5  # memory of a chip that the runtime reserves


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
class Estimate:
    """parts: milliseconds by kind, including `kernels` and `collectives`; `collectives` lists each one separately.

    matmul_flops: of the matrix products outside kernels on one chip, loops multiplied out.
    """

    memory: Memory
    parts: Mapping[str, float]
    kernels: tuple[Kernel, ...]
    collectives: tuple[tuple[Collective, float], ...]
    matmul_flops: int

    @property
    def milliseconds(self) -> float:
        """Milliseconds of a step; a lower bound if a kernel could not be measured."""
        return sum(self.parts.values())

    @property
    def is_lower_bound(self) -> bool:
        """Return whether `milliseconds` leaves out a kernel."""
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
    return Estimate(memory_of(compiled), parts, kernels, found, matmul_flops(module))


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
