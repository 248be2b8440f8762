"""What a compiled step costs on its chips: memory, milliseconds as a sum of lines, collectives. All of it is estimated.

The lines: the compiler's cycles, loops multiplied out; custom kernels by their bundles; collectives by their bytes over
the networks. Nothing is taken to overlap. The compiler's cycles are near the peak for matrix products and up to four
times too many for operations that memory bounds (`jaxlm.compiler.calibration`).
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

RUNTIME_GIB = 0.5  # of a chip's memory, which the runtime keeps for itself


@dataclass(frozen=True)
class Memory:
    """GiB on a chip. arguments: the state and the batch; temporaries: activations and all else a step makes."""

    arguments: float
    temporaries: float
    outputs: float
    program: float

    @property
    def peak(self) -> float:
        """The most at a time; outputs that take an argument's place are not counted."""
        return self.arguments + self.temporaries + self.outputs + self.program


@dataclass(frozen=True)
class Kernel:
    """A custom kernel: how often it runs in a step, and the milliseconds of all runs; None: not measured."""

    name: str
    count: int
    milliseconds: float | None


@dataclass(frozen=True)
class Estimate:
    """parts: milliseconds by line, `kernels` and `collectives` among them; those of the collectives one by one beside.

    matmul_flops: of the matrix products outside kernels on one chip, loops multiplied out.
    """

    memory: Memory
    parts: Mapping[str, float]
    kernels: tuple[Kernel, ...]
    collectives: tuple[tuple[Collective, float], ...]
    matmul_flops: int

    @property
    def milliseconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())


def estimate(compiled: Compiled, topology: Topology, mesh: Mapping[str, int]) -> Estimate:
    """The estimate for a program that was compiled for `topology`, its devices in a mesh of these sizes."""
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
    """What a program takes on each device."""
    stats: Any = compiled.memory_analysis()
    gib = 2.0**30
    return Memory(
        stats.argument_size_in_bytes / gib,
        stats.temp_size_in_bytes / gib,
        (stats.output_size_in_bytes - stats.alias_size_in_bytes) / gib,
        stats.generated_code_size_in_bytes / gib,
    )


def cycles_of(module: Module) -> Counter[str]:
    """The compiler's cycles by what is done: matrix products, and the rest by the compiler's own kinds."""
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
    """Kernels by name, each name once; kernels of a name that differ in shape are taken together."""
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
