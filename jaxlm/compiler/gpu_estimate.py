"""Estimated cost of a compiled step on GPUs: each operation by its FLOPs and bytes, and XLA's cost of its fusions.

Two times are stated. The bound gives each operation the larger of its FLOPs at the peak and its bytes at the bandwidth
of the memory. The estimate gives matrix products and cuDNN's attention a share of the peak that large ones reach, and
other fusions the time of XLA's cost model, which knows the instructions of Hopper only; on other GPUs they take their
bytes. XLA's costs of products, of softmax fusions and of library calls are off by orders of magnitude and are not used,
nor are those of tanh and erf, which are four times as long as moving the bytes takes.

Neither time counts the launch of kernels, overlap, or autotuning, which needs the device.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.stages import Compiled

from jaxlm.compiler.collectives import SLICES, Collective, collectives, passes
from jaxlm.compiler.estimate import CostlyOperation, Estimate, flops_of, memory_of
from jaxlm.compiler.gpus import GpuTopology
from jaxlm.compiler.hlo import Computation, Module, Operation, parse, shape_bytes, sides

PRODUCT_SHARE = 0.75  # of the peak, for matrix products
ATTENTION_SHARE = 0.45  # of the peak, for cuDNN's attention
COSTLIEST = 10  # operations listed
PRODUCTS, ATTENTION = "matrix products", "attention kernels"  # parts of a report

_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_FUSION = re.compile(r"kind=k(\w+)")
_COST = re.compile(r'"reification_cost":\[\{[^}]*"exec_time_us":([-+\d.e]+)[^}]*"name":""\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"CAUSAL"')
_APPROXIMATED = ("tanh", "erf")
_SLICES = ("slice", "dynamic-slice", "gather")


@dataclass(frozen=True)
class Cost:
    """An operation of a step, its runs (count) and its line of the report (part); the other numbers are of all runs."""

    operation: Operation
    count: int
    part: str
    flops: int
    milliseconds: float
    bound: float


def estimate(compiled: Compiled, topology: GpuTopology, mesh: Mapping[str, int]) -> Estimate:
    """Return the estimate for a program compiled for `topology`, with its devices in a mesh of these sizes."""
    module = parse(compiled.as_text() or "")
    found = tuple((one, milliseconds(one, topology)) for one in collectives(module, mesh, per_host=topology.per_host))
    costs = list(costs_of(module, topology))
    parts: dict[str, float] = {}
    for cost in costs:
        parts[cost.part] = parts.get(cost.part, 0.0) + cost.milliseconds
    sent = sum(time for _, time in found)
    costly = sorted(costs, key=lambda cost: -cost.milliseconds)[:COSTLIEST]
    return Estimate(
        memory_of(compiled),
        dict(sorted(parts.items(), key=lambda part: -part[1]))
        | ({"collectives": sent} if topology.num_chips > 1 else {}),
        (),
        found,
        sum(cost.flops for cost in costs if cost.part == PRODUCTS),
        bound_milliseconds=sum(cost.bound for cost in costs) + sent,
        costliest=tuple(
            CostlyOperation(
                cost.operation.name,
                cost.part,
                cost.count,
                cost.milliseconds,
                cost.bound,
                cost.operation.source,
                module.source_line(cost.operation),
            )
            for cost in costly
        ),
    )


def milliseconds(one: Collective, topology: GpuTopology) -> float:
    """Return the time of a collective in a step, from its bytes alone."""
    return passes(one) * one.bytes / topology.link_bytes(one.network == SLICES) * 1e3


def costs_of(module: Module, topology: GpuTopology) -> Iterator[Cost]:
    """Yield the operations of a step that take time; collectives are not among them."""
    gpu = topology.chip
    for operation, count in module.runs():
        kind = operation.kind
        if kind in _FREE or kind.endswith("-done") or operation.collective:
            continue
        home = module.homes[id(operation)]
        flops, dtype = _flops(module, operation, home)
        moved = _bytes(module, operation, home) / (gpu.memory_gbps * 1e9) * 1e3
        computed = flops / (gpu.peak(dtype) * 1e12) * 1e3 if flops else 0.0
        part = _part(module, operation, flops)
        time = max(moved, computed / (ATTENTION_SHARE if part == ATTENTION else PRODUCT_SHARE))
        if not flops and (cost := _COST.search(operation.rest)) and _kind(operation) != "Custom":
            approximated = any(inner.kind in _APPROXIMATED for inner, _ in module.within(operation))
            time = moved if approximated else float(cost.group(1)) / 1e3
        yield Cost(operation, count, part, count * flops, count * time, count * max(moved, computed))


def _kind(operation: Operation) -> str:
    found = _FUSION.search(operation.rest)
    return found.group(1) if found else ""


def _part(module: Module, operation: Operation, flops: int) -> str:
    target = _TARGET.search(operation.rest) if operation.kind == "custom-call" else None
    if flops:
        return ATTENTION if target and "fmha" in target.group(1) else PRODUCTS
    if operation.kind.startswith(("copy", "slice", "dynamic-slice", "dynamic-update-slice")):
        return "copies"
    kinds = {inner.kind for inner, _ in module.within(operation)} | {operation.kind}
    if "scatter" in kinds or "gather" in kinds or "sort" in kinds or (target and "Sort" in target.group(1)):
        return "gathers, scatters and sorts"
    if "reduce" in kinds:
        return "reductions"
    return "other fusions" if _kind(operation) else "other operations"


def _flops(module: Module, operation: Operation, home: Computation) -> tuple[int, str]:
    """Return the FLOPs of the matrix products of one run, 2 per multiply-add, and their dtype."""
    if operation.kind == "custom-call":
        return _library_flops(operation, home)
    found = [(operation, home), *module.within(operation)]
    total = sum(flops_of(inner, where) for inner, where in found)
    types = [where.by_name[inner.operands[0]].shape for inner, where in found if inner.kind in ("dot", "convolution")]
    return total, _dtype(types[0]) if types else "float32"


def _library_flops(operation: Operation, home: Computation) -> tuple[int, str]:
    """Return the FLOPs of a call of cuBLAS or of cuDNN's attention, and their dtype."""
    target = _TARGET.search(operation.rest)
    name = target.group(1) if target else ""
    if not operation.operands:
        return 0, "float32"
    left = home.by_name[operation.operands[0]].shape
    if "cublas" in name and (found := _CONTRACTED.search(operation.rest)):
        axes = [int(axis) for axis in re.findall(r"\d+", found.group(1))]
        out = sides(operation.shape)
        return 2 * math.prod(out) * math.prod(sides(left)[axis] for axis in axes), _dtype(left)
    if "fmha" in name and (found := _SCORES.search(operation.rest)):
        products = 5 if "Backward" in name else 2
        scores = math.prod(int(side) for side in re.findall(r"\d+", found.group(1)))
        seen = 0.5 if _CAUSAL.search(operation.rest) else 1.0
        return int(2 * products * seen * scores * sides(left)[-1]), _dtype(left)
    return 0, "float32"


def _bytes(module: Module, operation: Operation, home: Computation) -> int:
    """Return the bytes that one run reads and writes: of slices and updated slices, not of the arrays around them."""
    if operation.kind in ("fusion", "fusion-start"):
        body = module.computations[operation.called]
        read = sum(
            _read(body, number, shape_bytes(home.by_name[name].shape)) for number, name in enumerate(operation.operands)
        )
        return read + sum(_written(body, name) for name in _results(body))
    if operation.kind == "dynamic-update-slice":
        return 2 * shape_bytes(home.by_name[operation.operands[1]].shape)
    result = shape_bytes(operation.shape)
    if operation.kind in _SLICES:
        return 2 * result
    return result + sum(shape_bytes(home.by_name[name].shape) for name in operation.operands)


def _read(body: Computation, number: int, whole: int) -> int:
    """Return the bytes that a fusion reads of its parameter `number`, which has `whole`."""
    parameter = body.parameters.get(number)
    if parameter is None:
        return whole
    total, names = 0, [parameter.name]
    while names:
        name = names.pop()
        for user in body.users.get(name, ()):
            if user.kind == "bitcast":
                names.append(user.name)
            elif user.kind in _SLICES and user.operands[0] == name:
                total += shape_bytes(user.shape)
            elif not (user.kind == "dynamic-update-slice" and user.operands[0] == name):
                return whole
    return min(total, whole)


def _results(body: Computation) -> tuple[str, ...]:
    root = body.operations[-1]
    return root.operands if root.kind == "tuple" else (root.name,)


def _written(body: Computation, name: str) -> int:
    """Return the bytes of a result of a fusion; of an array that is updated in place only those of the update."""
    operation = body.by_name[name]
    while operation.kind == "bitcast":
        operation = body.by_name[operation.operands[0]]
    if operation.kind == "dynamic-update-slice":
        return shape_bytes(body.by_name[operation.operands[1]].shape)
    return shape_bytes(operation.shape)


def _dtype(shape: str) -> str:
    names = {"bf16": "bfloat16", "f16": "float16"}
    return names.get(shape.lstrip("(").partition("[")[0], "float32")
