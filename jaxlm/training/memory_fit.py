"""Device memory of a compiled step, and `--micro-batches auto`, the smallest number that fits."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxlm.compiler.estimate import memory_of
from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import use_mesh
from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError
from jaxlm.training.config import PretrainConfig
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.program import abstract_batch, make_program

MEMORY_FRACTION = 0.9  # usable fraction of a device's allocator; the rest is lost to fragmentation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledTraining:
    """A training step, None if it does not fit. peak_gib: memory per device, None if unknown."""

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
                raise  # the memory of a kernel does not depend on the size of the step
            return CompiledTraining(None, _named_gib(str(error)), time.perf_counter() - started)
    return CompiledTraining(step, memory_of(step).peak, time.perf_counter() - started)


def micro_batch_counts(batch_size: int, mesh: Mesh) -> list[int]:
    """Return the numbers of micro-batches that fit `mesh`, ascending. InputError without any."""
    check_batch(batch_size, 1, mesh)
    rows = batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    return [count for count in range(1, rows + 1) if rows % count == 0]


def smallest_that_fits(
    config: PretrainConfig, mesh: Mesh, fits: Callable[[PretrainConfig], bool]
) -> PretrainConfig | None:
    """Return `config` with the smallest number of micro-batches that fits, or None."""
    counts = micro_batch_counts(config.batch_size, mesh)
    return next(filter(fits, (replace(config, micro_batches=count) for count in counts)), None)


def fitted_to_devices(
    config: PretrainConfig, pretraining: Pretraining, lengths: Sequence[int], mesh: Mesh
) -> PretrainConfig:
    """Return `config` with `micro_batches auto` resolved for this machine's devices, the same on every process.

    It is 1 if the backend does not report its memory, as on a CPU. InputError if no number fits.
    """
    if config.micro_batches != "auto":
        return config
    limit = first_process_decides(memory_limit_gib)
    if limit is None:
        log.info("micro_batches auto: these devices do not report their memory; 1 is used")
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
            f"micro_batches auto: no number of them fits {limit:.2f} GiB per device; set execution.remat full, or "
            "spread the model with a larger mesh.fsdp"
        )
    return chosen


def memory_limit_gib() -> float | None:
    """Return the usable memory of a device of this machine in GiB, or None if the backend does not report it."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else MEMORY_FRACTION * limit / 2**30


def _named_gib(error: str) -> float | None:
    """Return the largest size in the compiler's error, which is the memory that the program needs."""
    sizes = [float(number) * (1 if unit == "G" else 2**-10) for number, unit in re.findall(r"([\d.]+)([GM])\b", error)]
    return max(sizes, default=None)
