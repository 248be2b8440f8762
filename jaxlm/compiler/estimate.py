"""What a compiled step costs on its chips: memory, milliseconds as a sum of lines, collectives. All of it is estimated.

The lines: the compiler's cycles, loops multiplied out; collectives by their bytes over the interconnect. Nothing is
taken to overlap. The compiler's cycles are near the peak for matrix products and up to four times too many for
operations that memory bounds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled

from jaxlm.compiler.chips import Topology
from jaxlm.compiler.hlo import Module, Operation, parse

# Of a ring of n: how many times (n - 1) / n of the larger side of a collective goes out of each chip.
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}
RUNTIME_GIB = 0.5  # of a chip's memory, which the runtime keeps for itself


@dataclass(frozen=True)
class Collective:
    """A kind of collective over groups of `size` chips: how many run in a step, their bytes a chip, the time."""

    kind: str
    size: int
    count: int
    bytes: int
    milliseconds: float


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
class Estimate:
    """parts: milliseconds by line. uncounted: custom kernels, which carry no cycles, by name and how often they run."""

    memory: Memory
    parts: Mapping[str, float]
    collectives: tuple[Collective, ...]
    uncounted: Mapping[str, int]

    @property
    def milliseconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())


def estimate(compiled: Compiled, topology: Topology) -> Estimate:
    """The estimate for a program that was compiled for `topology`."""
    module = parse(compiled.as_text() or "")
    collectives = _collectives(module, topology)
    parts = {kind: cycles / topology.chip.clock_hz * 1e3 for kind, cycles in sorted(_cycles(module).items()) if cycles}
    parts["collectives"] = sum(one.milliseconds for one in collectives)
    kernels: Counter[str] = Counter()
    for operation, times in module.runs():
        if "tpu_custom_call" in operation.rest:
            kernels[operation.source.rsplit("/", 1)[-1] or operation.name] += times
    return Estimate(_memory(compiled), parts, collectives, kernels)


def _memory(compiled: Compiled) -> Memory:
    stats: Any = compiled.memory_analysis()
    gib = 2.0**30
    return Memory(
        stats.argument_size_in_bytes / gib,
        stats.temp_size_in_bytes / gib,
        (stats.output_size_in_bytes - stats.alias_size_in_bytes) / gib,
        stats.generated_code_size_in_bytes / gib,
    )


def _cycles(module: Module) -> Counter[str]:
    """Cycles by what is done: matrix products, and the rest by the compiler's own kinds."""
    found: Counter[str] = Counter()
    for operation, times in module.runs():
        if operation.cycles:
            found[_line(module, operation)] += operation.cycles * times
    return found


def _line(module: Module, operation: Operation) -> str:
    if operation.kind != "fusion":
        return "copies" if operation.kind.startswith(("copy", "slice")) else "other operations"
    kinds = module.kinds(operation)
    if "convolution" in kinds or "dot" in kinds:
        return "matrix products"
    if "reduce" in kinds or "reduce-window" in kinds:
        return "reductions"
    return "other fusions"


def _collectives(module: Module, topology: Topology) -> tuple[Collective, ...]:
    counts: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    for operation, times in module.runs():
        if kind := operation.collective:
            size = operation.group_size(topology.num_chips)
            # A gather's result is whole, a scatter's is a piece of what goes in.
            whole = operation.bytes * (size if kind == "reduce-scatter" else 1)
            counts[kind, size] += times
            sizes[kind, size] += whole * times
    return tuple(
        Collective(
            kind, size, counts[kind, size], sizes[kind, size], _milliseconds(kind, size, sizes[kind, size], topology)
        )
        for kind, size in sorted(counts)
    )


def _milliseconds(kind: str, size: int, whole: int, topology: Topology) -> float:
    """All links one way for a group of all chips of a slice; those of one side for a smaller one."""
    out = topology.chip.interconnect_gbps / 2 * 1e9
    if size < topology.num_chips // topology.slices:
        out /= topology.chip.dimensions
    if kind == "collective-permute":
        return whole / (out / topology.chip.dimensions / 2) * 1e3
    return _PASSES[kind] * whole * (size - 1) / size / out * 1e3
