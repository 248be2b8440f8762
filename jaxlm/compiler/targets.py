"""The devices that `jaxlm.aot` compiles for: TPU topologies and GPUs, by name."""

import difflib
from collections.abc import Mapping
from typing import TypeAlias

from jax.stages import Compiled

from jaxlm.compiler import estimate as tpu_estimate
from jaxlm.compiler import gpu_estimate
from jaxlm.compiler.chips import CHIPS, Topology, topology
from jaxlm.compiler.estimate import Estimate, Rate
from jaxlm.compiler.gpus import GPUS, GpuTopology, gpu_topology
from jaxlm.errors import InputError

Target: TypeAlias = Topology | GpuTopology


def target(name: str, slices: int = 1, memory_gib: float | None = None) -> Target:
    """Return the devices named `v5e:4x4` or `h100:8`. InputError, one line, for other names.

    slices: of a TPU. memory_gib: of each GPU, instead of the table's.
    """
    kind = name.partition(":")[0]
    if kind in GPUS:
        if slices != 1:
            raise InputError(f"--slices must be 1 for GPUs, got {slices}; give hosts as {kind}:{slices}x8")
        return gpu_topology(name, memory_gib)
    if kind in CHIPS:
        if memory_gib is not None:
            raise InputError(f"--memory must not be given for TPUs, got {memory_gib:g}; leave it out")
        return topology(name, slices)
    known = (*CHIPS, *GPUS)
    close = difflib.get_close_matches(kind.lower(), known, 1)
    meant = f"did you mean {close[0]}?" if close else "give v5e:4x4 or h100, for example"
    raise InputError(f"--topology must name one of {', '.join(known)}, got {name}; {meant}")


def estimate(compiled: Compiled, where: Target, mesh: Mapping[str, int]) -> Estimate:
    """Return the estimated cost of a program that was compiled for these devices, in a mesh of these sizes."""
    if isinstance(where, GpuTopology):
        return gpu_estimate.estimate(compiled, where, mesh)
    return tpu_estimate.estimate(compiled, where, mesh)


def calibration(where: Target) -> tuple[Rate, ...]:
    """Return the rates that the estimates imply for three small programs, and the peaks; nothing for GPUs.

    The estimates for GPUs are not cycles of the compiler.
    """
    return () if isinstance(where, GpuTopology) else tpu_estimate.calibration(where)
