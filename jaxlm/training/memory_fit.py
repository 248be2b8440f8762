"""Whether a step fits a device, asked of the compiler; and `--micro-batches auto`, the smallest number that does."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxlm.compiler.estimate import memory_of
from jaxlm.distributed.agreement import first_process_decides
from jaxlm.distributed.mesh import check_batch, use_mesh
from jaxlm.errors import InputError
from jaxlm.training.abstract_inputs import abstract_batch
from jaxlm.training.config import PretrainConfig
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.program import make_program

MEMORY_SHARE = 0.9  # of what a device's allocator has; the rest is lost between its blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledTraining:
    """A training step; None where the compiler found that it does not fit. peak_gib: on a device, None if unknown."""

    step: Compiled | None
    peak_gib: float | None
    seconds: float


def compile_training(pretraining: Pretraining, config: PretrainConfig, length: int, mesh: Mesh) -> CompiledTraining:
    """Compile the step of a run for rows of `length`, for the devices of `mesh`. Nothing is allocated."""
    started = time.perf_counter()
    with use_mesh(mesh):
        lowered = make_program(pretraining, config, mesh).lowered(abstract_batch(config, length, mesh))
        try:
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or re.search(r"memory space (?!hbm)", str(error)):
                raise  # a kernel's own memory is no matter of the step's size
            return CompiledTraining(None, _named_gib(str(error)), time.perf_counter() - started)
    return CompiledTraining(step, memory_of(step).peak, time.perf_counter() - started)


def micro_batch_counts(batch_size: int, mesh: Mesh) -> list[int]:
    """The numbers of micro-batches that `mesh` can deal out, ascending. InputError where there is none."""
    check_batch(batch_size, 1, mesh)
    rows = batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    return [count for count in range(1, rows + 1) if rows % count == 0]


def smallest_that_fits(
    config: PretrainConfig, mesh: Mesh, fits: Callable[[PretrainConfig], bool]
) -> PretrainConfig | None:
    """`config` with the smallest number of micro-batches that fits; None where none does."""
    counts = micro_batch_counts(config.batch_size, mesh)
    return next(filter(fits, (replace(config, micro_batches=count) for count in counts)), None)


def fitted_to_devices(
    config: PretrainConfig, pretraining: Pretraining, lengths: Sequence[int], mesh: Mesh
) -> PretrainConfig:
    """`config` with `micro_batches auto` resolved for this machine's devices, the same on every process.

    1 where the backend does not say how much memory it has, as on a CPU. InputError where no number fits.
    """
    if config.micro_batches != "auto":
        return config
    limit = first_process_decides(memory_limit_gib)
    if limit is None:
        log.info("micro_batches auto: these devices do not say how much memory they have; 1")
        return replace(config, micro_batches=1)

    def fits(candidate: PretrainConfig) -> bool:
        for length in lengths:
            found = compile_training(pretraining, candidate, length, mesh)
            over = found.step is None or found.peak_gib is None or found.peak_gib > limit
            said = "out of memory" if found.peak_gib is None else f"{found.peak_gib:.2f} GiB"
            log.info("micro_batches %s, length %d: %s of %.2f GiB", candidate.micro_batches, length, said, limit)
            if over:
                return False
        return True

    chosen = smallest_that_fits(config, mesh, fits)
    if chosen is None:
        raise InputError(
            f"micro_batches auto: no number of them fits {limit:.2f} GiB a device; set execution.remat full, or spread "
            "the model with a larger mesh.fsdp"
        )
    return chosen


def memory_limit_gib() -> float | None:
    """What a step may take on a device of this machine, in GiB; None where the backend does not say."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else MEMORY_SHARE * limit / 2**30


def _named_gib(error: str) -> float | None:
    """The largest size that the compiler names when memory does not suffice: what it needs."""
    sizes = [float(number) * (1 if unit == "G" else 2**-10) for number, unit in re.findall(r"([\d.]+)([GM])\b", error)]
    return max(sizes, default=None)
