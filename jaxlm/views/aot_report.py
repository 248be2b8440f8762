"""Estimated cost of a pretraining step on TPUs or GPUs, and changes to try if it does not fit."""

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from jaxlm.compiler.gpus import smallest_that_holds
from jaxlm.compiler.targets import Target, calibration, estimate
from jaxlm.config import with_fields
from jaxlm.data.loader import Phase, phases
from jaxlm.distributed.mesh import make_mesh
from jaxlm.host import compilers
from jaxlm.training.config import PretrainConfig, check_batches
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import REMATS, choices, compile_training, first_that_fits, micro_batch_counts

STEPS = 1_000_000  # assumed for a run in epochs, as the number of steps depends on the store

log = logging.getLogger(__name__)


def check(config: PretrainConfig, where: Target) -> Mesh:
    """Return the mesh. Raises InputError, before compiling, for a config that cannot run on the topology."""
    config.check()
    mesh = make_mesh(config.mesh, where.devices())
    check_batches(config, mesh)
    _phases(config)
    return mesh


def report(config: PretrainConfig, where: Target) -> dict[str, Any]:
    """Return the estimates for the step of each phase, the full length first. `auto` fields are resolved.

    If no choice fits, the estimates are for the last one. Milliseconds, and values derived from them, are None for a
    step that the compiler rejects because it exceeds the memory. `lower_bound` is true for a step with a kernel that
    could not be measured: its milliseconds are then at least those stated, its MFU and tokens per second at most.
    """
    mesh = check(config, where)
    config = first_that_fits(config, mesh, lambda choice: _fits(choice, where)) or list(choices(config, mesh))[-1]
    assert config.micro_batches != "auto"
    steps = _steps(config, where)
    shares = [
        (phase.end_step - phase.first_step) * config.batch_size * phase.length for phase in reversed(_phases(config))
    ]
    whole = {"topology": where.name, "slices": where.slices, "chips": where.num_chips, "mesh": dict(mesh.shape)}
    whole |= {"device": where.word, "cost_model": where.cost_model}
    whole |= steps[0] | {"fits": all(step["fits"] for step in steps), "days": None}
    if config.num_steps and all(step["tokens_per_second"] for step in steps):
        seconds = sum(tokens / step["tokens_per_second"] for tokens, step in zip(shares, steps, strict=True))
        whole["days"] = round(seconds / 86400, 2)
    rates = [dataclasses.asdict(rate) for rate in calibration(where)]
    rounded = [rate | {"estimated": round(rate["estimated"], 1)} for rate in rates]
    return whole | {"steps": steps, "calibration": rounded, "versions": compilers(where.platform)}


def advice(config: PretrainConfig, where: Target) -> dict[str, Any]:
    """Compile changes to a config that does not fit, one at a time, until one fits.

    tried: the changes, each with its peak memory. choice: the fields of the one that fits, or None. report: its report.
    """
    tried: list[dict[str, Any]] = []
    for change in _changes(config, make_mesh(config.mesh, where.devices()), where.slices):
        choice, candidate = " ".join(f"--{name} {value}" for name, value in change.items()), with_fields(config, change)
        step, fits = _steps(candidate, where)[0], _fits(candidate, where)
        tried.append({"choice": choice, "fits": fits, "peak_gib": step["peak_gib"]})
        log.info("tried %s: %s", choice, "fits" if fits else "does not fit")
        if fits:
            return {"tried": tried, "choice": choice, "report": report(candidate, where)}
    return {"tried": tried, "choice": None, "report": None}


def larger_gpu(found: dict[str, Any], where: Target) -> str | None:
    """Return the name of the smallest GPU of the table that holds a step which does not fit, or None."""
    peaks = [step["peak_gib"] for step in found["steps"]]
    return smallest_that_holds(max(peaks)) if where.platform == "gpu" and None not in peaks else None


def _changes(config: PretrainConfig, mesh: Mesh, slices: int) -> Iterator[dict[str, Any]]:
    """Yield changes of fields, the cheapest first: micro-batches, remat, both, more shards of the model."""
    counts, remats = micro_batch_counts(config.batch_size, mesh), list[str](REMATS)
    assert config.micro_batches != "auto"
    micro = [{"micro-batches": count} for count in counts if count > config.micro_batches]
    remat = [{"execution.remat": name} for name in remats[remats.index(config.execution.remat) + 1 :]]
    both: dict[str, Any] = {}
    for change in micro[-1:] + remat[-1:]:
        both |= change
    yield from micro
    yield from remat
    if micro and remat:
        yield both
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    for factor in range(2, data + 1):
        if data % factor == 0 and data // factor % slices == 0:
            shards = {"mesh.data": data // factor, "mesh.fsdp": fsdp * factor}
            yield shards
            if both:
                yield shards | both


def _fits(config: PretrainConfig, where: Target) -> bool:
    return all(step["fits"] for step in _steps(config, where))


def _steps(config: PretrainConfig, where: Target) -> list[dict[str, Any]]:
    return [_step(config, phase.length, where) for phase in reversed(_phases(config))]


def _phases(config: PretrainConfig) -> tuple[Phase, ...]:
    return phases(config.data, length=config.length, num_steps=config.num_steps or STEPS)


@functools.cache  # the report of a choice reuses the compilation that tried it
def _step(config: PretrainConfig, length: int, where: Target) -> dict[str, Any]:
    pretraining, mesh = make_pretraining(config, None), make_mesh(config.mesh, where.devices())
    compiled = compile_training(pretraining, config, length, mesh, where.compiler_options)
    tokens, chip = config.batch_size * length, where.chip
    flops = tokens * pretraining.flops_per_token(length)
    dtype = "bfloat16" if config.execution.dtype == "auto" else config.execution.dtype
    peak = compiled.peak_gib
    values: dict[str, Any] = {
        "length": length,
        "batch_size": config.batch_size,
        "micro_batches": config.micro_batches,
        "remat": config.execution.remat,
        "fits": compiled.step is not None and peak is not None and peak <= where.usable_gib,
        "hbm_gib": chip.memory_gib,
        "peak_gib": None if peak is None else round(peak, 3),
        "model_tflops": round(flops / 1e12, 3),
        "peak_tflops": chip.peak(dtype),
        "compile_seconds": round(compiled.seconds, 1),
        "step_milliseconds": None,
        "bound_milliseconds": None,
        "lower_bound": False,
        "mfu": None,
        "tokens_per_second": None,
        "step_parts": {},
        "collectives": [],
    }
    if compiled.step is None:
        return values
    found = estimate(compiled.step, where, mesh.shape)
    seconds = found.milliseconds / 1e3
    cost: Any = compiled.step.cost_analysis() or {}  # the GPU's compiler has none
    return values | {
        "memory_gib": {name: round(size, 3) for name, size in dataclasses.asdict(found.memory).items()},
        "step_milliseconds": round(found.milliseconds, 3),
        "bound_milliseconds": found.bound_milliseconds and round(found.bound_milliseconds, 3),
        "lower_bound": found.is_lower_bound,
        "step_parts": {name: round(value, 3) for name, value in found.parts.items()},
        "kernels": [dataclasses.asdict(kernel) for kernel in found.kernels if kernel.milliseconds is not None],
        "uncounted_kernels": {kernel.name: kernel.count for kernel in found.kernels if kernel.milliseconds is None},
        "costliest": [dataclasses.asdict(one) for one in found.costliest],
        "chip_tflops": round(found.matmul_flops / 1e12, 3),
        "compiler_tflops": round(cost.get("flops", 0.0) / 1e12, 3),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "mfu": round(flops / seconds / (chip.peak(dtype) * 1e12 * where.num_chips), 4),
        "tokens_per_second": round(tokens / seconds, 1),
        "collectives": [dataclasses.asdict(one) | {"milliseconds": round(time, 4)} for one, time in found.collectives],
    }
