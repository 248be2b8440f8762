"""An optimized HLO module of the TPU compiler as text: its operations, and how often each runs in a step.

The compiler writes `estimated_cycles` beside its fusions. Collectives and custom kernels carry none, and the body of a
loop stands there once: here loops are multiplied out, nested ones too, by the constant that their condition compares
with, and what carries no cycles is listed with its bytes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"(?:^|[\s)\]}])([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_INTEGER = re.compile(r"^[su]\d+\[\]\S* constant\((-?\d+)\)")
_GROUPS = re.compile(r"replica_groups=(.*?), (?:use_global|channel|dimensions|to_apply|metadata|backend)")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Operation:
    """An instruction. shape: the text of its type. cycles: the compiler's estimate of one run, 0 where it has none."""

    name: str
    kind: str
    shape: str
    rest: str
    cycles: int

    @property
    def bytes(self) -> int:
        """Of the result."""
        return shape_bytes(self.shape)

    @property
    def source(self) -> str:
        """What it was in the program: `jit(train_step)/…/dot_general`, or nothing."""
        found = _NAME.search(self.rest)
        return found.group(1) if found else ""

    @property
    def collective(self) -> str | None:
        """Which of COLLECTIVES it starts; None for others and for the second half of an asynchronous one."""
        kind = self.kind.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def group_size(self, num_devices: int) -> int:
        """Devices that take part with one another."""
        found = _GROUPS.search(self.rest)
        text = found.group(1) if found else ""
        if axes := re.match(r"mesh\[(.*?)\] \{(.*?)\}", text):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes.group(1)))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes.group(2)))
        if iota := re.match(r"\[(\d+),(\d+)\]", text):
            return int(iota.group(2))
        if listed := re.match(r"\{\{([\d,]*)\}", text):
            return listed.group(1).count(",") + 1
        return num_devices


@dataclass
class Computation:
    """A function of the module."""

    name: str
    operations: list[Operation] = field(default_factory=list)


@dataclass(frozen=True)
class Module:
    """All functions by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: str

    def runs(self) -> Iterator[tuple[Operation, int]]:
        """Each operation that takes time, and how often it runs in one call of the module.

        Operations within a fusion are part of it. Of the branches of a condition the dearest counts.
        """
        yield from self._runs(self.entry, 1)

    def _runs(self, name: str, times: int) -> Iterator[tuple[Operation, int]]:
        for operation in self.computations[name].operations:
            if operation.kind == "while":
                called = dict(re.findall(r"(body|condition)=%?([\w.\-]+)", operation.rest))
                yield from self._runs(called["body"], times * self.trips(called["condition"]))
            elif operation.kind == "conditional":
                branches = [
                    branch.strip().lstrip("%")
                    for listed, one in _BRANCHES.findall(operation.rest)
                    for branch in (listed.split(",") if listed else [one])
                ]
                yield from self._runs(max(branches, key=self._cycles), times)
            elif operation.kind in ("call", "async-start"):
                for called in _CALLED.findall(operation.rest):
                    yield from self._runs(called, times)
            else:
                yield operation, times

    def kinds(self, operation: Operation) -> set[str]:
        """The kinds of operations within a fusion, fusions in it included."""
        found: set[str] = set()
        for name in _CALLED.findall(operation.rest):
            for inner in self.computations[name].operations:
                found |= {inner.kind} | (self.kinds(inner) if inner.kind == "fusion" else set())
        return found

    def _cycles(self, name: str) -> int:
        return sum(operation.cycles * times for operation, times in self._runs(name, 1))

    def trips(self, condition: str) -> int:
        """How often a loop runs: the integer constant of its condition, which the counter, from 0 on, stays below."""
        constants = []
        for operation in self.computations[condition].operations:
            if found := _INTEGER.match(f"{operation.shape} {operation.kind}{operation.rest}"):
                constants.append(int(found.group(1)))
        return max(constants, default=1)


def parse(text: str) -> Module:
    """The module in `text`, as `Compiled.as_text()` gives it."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header.group(2)] = Computation(header.group(2))
                if header.group(1):
                    entry = header.group(2)
        elif line == "}":  # a kernel's own description has lines that begin so
            current = None
        elif instruction := _INSTRUCTION.match(line):
            name, body = instruction.groups()
            if found := _OPERATION.search(body):
                cycles = _CYCLES.search(body)
                current.operations.append(
                    Operation(
                        name,
                        found.group(1),
                        body[: found.start(1)].strip(),
                        body[found.end(1) :],
                        int(cycles.group(1)) if cycles else 0,
                    )
                )
    if not entry:
        raise ValueError("no ENTRY in the text: it is not an HLO module")
    return Module(computations, entry)


def shape_bytes(shape: str) -> int:
    """The bytes of a type, `bf16[16,512]{1,0}` or a tuple of such, without the padding of its layout."""
    total = 0
    for kind, sides in _SHAPE.findall(shape):
        bits = _BITS.get(kind)
        if bits is None:
            digits = re.search(r"\d+", kind)
            bits = int(digits.group(0)) if digits else 0
        total += math.prod(int(side) for side in sides.split(",") if side) * bits // 8
    return total
