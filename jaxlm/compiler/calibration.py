"""Calibration of the compiler's cycles: those of three small programs against the chip's peaks."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxlm.compiler.chips import Topology
from jaxlm.compiler.estimate import cycles_of
from jaxlm.compiler.hlo import parse

_SIDE = 8192


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


def _seconds(topology: Topology, dtype: jnp.dtype, program: Callable[[jax.Array], jax.Array]) -> float:
    place = jax.sharding.SingleDeviceSharding(topology.devices()[0])
    x = jax.ShapeDtypeStruct((_SIDE, _SIDE), dtype, sharding=place)
    module = parse(jax.jit(program).lower(x).compile().as_text() or "")
    return cycles_of(module).total() / topology.chip.clock_hz
