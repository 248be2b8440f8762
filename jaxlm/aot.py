"""What a pretraining step costs on TPUs that are not here: `python -m jaxlm.aot CONFIG --topology v5e:4x4`.

Compiles the very step that `pretrain` would run, with the TPU's own compiler, on any machine and offline (the extra
[tpu]); no store is needed. Says whether it fits, and an estimate of its milliseconds as a sum of lines: the compiler's
cycles with loops multiplied out, and collectives by their bytes; nothing is taken to overlap, and operations that
memory bounds are estimated up to four times too long. Custom kernels carry no cycles and are named. With two lengths in
the config the full one stands at the top. The last line of standard output is one JSON object, as in --output.
"""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jaxlm.compiler.chips import Topology, topology
from jaxlm.compiler.estimate import RUNTIME_GIB, estimate
from jaxlm.config import command_line
from jaxlm.data.phases import Phase, phases
from jaxlm.errors import run_command
from jaxlm.output import write_json
from jaxlm.sharding import check_batch, make_mesh, use_mesh
from jaxlm.training.abstract import abstract_batch, with_vocabulary
from jaxlm.training.config import PretrainConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import training_program


@dataclass(frozen=True)
class Arguments:
    """Compile a pretraining step for a TPU topology and report what it costs."""

    config: tyro.conf.Positional[str]
    """A config file, or its name: pretrain/gpt1."""
    topology: str = "v5e:4x4"
    """The chip, v4, v5e, v5p or v6e, and the sides of its torus."""
    slices: int = 1
    """Such topologies, joined by the data center's network."""
    output: Path | None = None
    """A file for the report as JSON."""
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


def report(config: PretrainConfig, where: Topology) -> dict[str, Any]:
    """The figures of each phase's step, that of the full length first."""
    config = with_vocabulary(config)
    config.check()
    num_steps = config.num_steps or 1_000_000
    mesh = make_mesh(config.mesh, where.devices())
    check_batch(config.batch_size, config.micro_batches, mesh)
    found = phases(config.data, length=config.length, num_steps=num_steps)
    steps = [_step(config, phase, num_steps, mesh, where) for phase in reversed(found)]
    tokens = [config.batch_size * phase.length * (phase.end_step - phase.first_step) for phase in reversed(found)]
    days = sum(count / step["tokens_per_second"] for count, step in zip(tokens, steps, strict=True)) / 86400
    whole = {"topology": where.name, "slices": where.slices, "chips": where.num_chips, "mesh": dict(mesh.shape)}
    whole |= steps[0] | {"fits": all(step["fits"] for step in steps)}
    whole["days"] = round(days, 2) if config.num_steps else None
    return whole | {"steps": steps}


def _step(config: PretrainConfig, phase: Phase, num_steps: int, mesh: Any, where: Topology) -> dict[str, Any]:
    pretraining = make_pretraining(config, None)
    with use_mesh(mesh):
        program = training_program(pretraining, config, mesh, num_steps=num_steps)
        started = time.perf_counter()
        compiled = program.step.lower(program.abstract, abstract_batch(config, phase.length, mesh)).compile()
        seconds = time.perf_counter() - started
    found = estimate(compiled, where)
    tokens = config.batch_size * phase.length
    flops = tokens * pretraining.flops_per_token(phase.length)
    per_second = tokens / (found.milliseconds / 1e3)
    peak = where.chip.peak_tflops * 1e12 * where.num_chips
    cost: Any = compiled.cost_analysis()
    return {
        "length": phase.length,
        "batch_size": config.batch_size,
        "fits": found.memory.peak + RUNTIME_GIB <= where.chip.memory_gib,
        "hbm_gib": where.chip.memory_gib,
        "peak_gib": round(found.memory.peak, 3),
        "memory_gib": {name: round(size, 3) for name, size in dataclasses.asdict(found.memory).items()},
        "step_milliseconds": round(found.milliseconds, 3),
        "step_parts": {name: round(value, 3) for name, value in found.parts.items()},
        "uncounted_kernels": dict(found.uncounted),
        "model_tflops": round(flops / 1e12, 3),
        "bytes_accessed": cost.get("bytes accessed"),
        "mfu": round(flops / (found.milliseconds / 1e3) / peak, 4),
        "tokens_per_second": round(per_second, 1),
        "collectives": [dataclasses.asdict(one) for one in found.collectives],
        "compile_seconds": round(seconds, 1),
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """The report for people."""
    said = []
    for step in figures["steps"]:
        memory = step["memory_gib"]
        said += [
            f"{figures['chips']} chips of {figures['topology']}, {step['batch_size']} x {step['length']} tokens a step "
            f"({step['compile_seconds']} s to compile); all figures are estimates",
            f"  memory        {step['peak_gib']:.2f} of {step['hbm_gib']:.0f} GiB a chip: state and batch "
            f"{memory['arguments']:.2f}, temporaries {memory['temporaries']:.2f}, program {memory['program']:.2f}"
            + ("" if step["fits"] else "  DOES NOT FIT"),
            f"  step          {step['step_milliseconds']:.1f} ms, {step['tokens_per_second']:,.0f} tokens/s, "
            f"MFU {step['mfu']:.1%}",
        ]
        said += [f"    {name:<18}{value:8.2f} ms" for name, value in step["step_parts"].items()]
        said += [
            f"    {one['kind']} over {one['size']}: {one['count']} a step, {one['bytes'] / 1e6:,.1f} MB, "
            f"{one['milliseconds']:.2f} ms"
            for one in step["collectives"]
        ]
        said += [f"    not counted: {name}, {times} times" for name, times in step["uncounted_kernels"].items()]
    if figures["days"] is not None:
        said.append(f"the whole run: {figures['days']:.1f} days")
    if not figures["fits"]:
        said.append("it does not fit: more --micro-batches, --execution.remat dots or full, a larger --mesh.fsdp")
    return said


def aot(arguments: Arguments) -> dict[str, Any]:
    """The report, printed and written."""
    figures = report(arguments.settings, topology(arguments.topology, arguments.slices))
    print(*lines(figures), sep="\n")
    print(json.dumps(figures), flush=True)
    if arguments.output is not None:
        write_json(arguments.output, figures)
    return figures


def main() -> None:
    """The command."""
    arguments, _ = command_line(Arguments, PretrainConfig, program="aot", description=__doc__)
    jax.config.update("jax_platforms", "cpu")  # what is computed and not compiled is computed here
    aot(arguments)


if __name__ == "__main__":
    run_command(main)
