"""Floating-point operations of the matrix products in a compiled module, loops multiplied out.

The TPU compiler writes a matrix product as a convolution, with batch dimensions as dilated spatial ones. As in XLA's
own cost analysis, only the window positions that meet an element of the input are counted.
"""

import math
import re

from jaxlm.compiler.hlo import Computation, Module, Operation

_SIDES = re.compile(r"\[([\d,]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{(.*?)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def matmul_flops(module: Module) -> int:
    """Return the FLOPs of one device in one call: 2 per multiply-add. Custom kernels are not in the module's text."""
    homes = {id(operation): home for home in module.computations.values() for operation in home.operations}
    total = 0
    for operation, times in module.runs():
        total += times * _flops(operation, homes[id(operation)])
        total += times * sum(_flops(inner, home) for inner, home in module.within(operation))
    return total


def _flops(operation: Operation, computation: Computation) -> int:
    if operation.kind not in ("convolution", "dot"):
        return 0
    left, right = (_sides(computation.by_name[name].shape) for name in operation.operands[:2])
    out = _sides(operation.shape)
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
        sides = left[inputs.index(axis)], right[kernel.index(axis)], out[outputs.index(axis)]
        flops *= _meetings(*sides, _of_axis(settings, int(axis)))
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


def _sides(shape: str) -> list[int]:
    found = _SIDES.search(shape)
    assert found is not None, shape
    return [int(side) for side in found.group(1).split(",") if side]
