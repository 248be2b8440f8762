"""Estimate the cost of a pretraining step on absent TPUs and GPUs: `python -m jaxlm.aot CONFIG --topology v5e:4x4`.

The command compiles the same step that `pretrain` would run, with the compiler of a TPU (the extra [tpu]) or of a GPU
(the extra [gpu-compiler], `--topology h100`), on any machine and offline; it needs no store. It reports whether the
step fits, and estimates its milliseconds as a sum that assumes no overlap.

On TPUs the sum has the compiler's cycles with loops multiplied out, custom kernels by their instruction bundles, and
collectives by their bytes. Memory-bound operations are estimated up to four times too long, as the calibration table
shows. A step with a kernel that could not be read is printed as a lower bound, `≥ 12.3 ms`, and `lower_bound` is true
in the JSON. On GPUs the sum has matrix products at 75 % of the peak, cuDNN's attention at 45 %, and other operations by
XLA's cost model (H100, H200) or by their bytes; the bound next to it has each operation by its FLOPs and bytes alone.

If the step does not fit, changes are compiled until one fits. --compare adds reports of other choices. For a config
with two lengths the report begins with the full length. The last line of standard output is one JSON object, as in
--output.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxlm import cuda
from jaxlm.config import command_line, given_fields, program_name, with_chosen_members, with_fields
from jaxlm.errors import InputError, RunError, one_line, run_command
from jaxlm.files import check_output, write_json
from jaxlm.host import in_words
from jaxlm.ranges import Count, Range, checked
from jaxlm.training.config import PretrainConfig, one_duration
from jaxlm.wording import counted


@dataclass(frozen=True)
class Arguments:
    """Compile a pretraining step for TPUs or GPUs and report what it costs."""

    config: tyro.conf.Positional[str]
    """A config file or its name, for example pretrain/gpt1."""
    topology: str = "v5e:4x4"
    """A TPU (v4, v5e, v5p or v6e) and the sides of its torus, or a GPU (t4, l4, rtx3060, rtx3090, rtx4090, rtx5090,
    a100, a100-40, h100, h200 or b200), with :8 for eight on one host and :4x8 for four such hosts."""
    slices: Count = 1
    """Number of such topologies of TPUs, connected by the data center network. mesh.data spans them."""
    memory: Annotated[float | None, Range(above=0)] = None
    """Memory of each GPU in GiB, instead of the table's, for example for a laptop's card."""
    compare: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Other values for an additional report: mesh.fsdp=16, or 'mesh.fsdp=16 execution.remat=full'."""
    output: Path | None = None
    """File for the report as JSON."""
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


ARGUMENTS = (Arguments,)


def aot(arguments: Arguments) -> dict[str, Any]:
    """Print and write the report, and return it. JAX is imported here, when the command line is known to be right."""
    from jaxlm.compiler.targets import target
    from jaxlm.training.program import with_vocabulary
    from jaxlm.views.aot_report import advice, check, larger_gpu, report

    arguments = replace(arguments, settings=with_vocabulary(arguments.settings))
    others = [(choice, with_choice(arguments, choice)) for choice in arguments.compare]
    where, *elsewhere = (
        target(one.topology, one.slices, one.memory) for one in (arguments, *(other for _, other in others))
    )
    for place in elsewhere:
        if place.cost_model != where.cost_model:
            raise InputError(
                f"--compare must keep to devices whose estimates are of one kind, got {place.name} (by "
                f"{place.cost_model}) and {where.name} (by {where.cost_model}); make two reports, and compare their "
                "bounds"
            )
    check(arguments.settings, where)
    for (_, other), place in zip(others, elsewhere, strict=True):
        check(other.settings, place)
    if arguments.output is not None:
        check_output(arguments.output)
    whole = report(arguments.settings, where)
    print(*lines(whole), sep="\n", flush=True)
    if not whole["fits"]:
        tried = {"micro-batches": whole["micro_batches"], "execution.remat": whole["remat"]}
        whole["advice"] = advice(with_fields(arguments.settings, tried), where)
        whole["advice"]["larger_gpu"] = larger_gpu(whole, where)
        print(*advice_lines(whole["advice"]), sep="\n")
    if others:
        whole["compared"] = [
            {"choice": choice} | report(other.settings, place)
            for (choice, other), place in zip(others, elsewhere, strict=True)
        ]
        print(*table([{"choice": "as given"} | whole, *whole["compared"]]), sep="\n")
    print(json.dumps(whole), flush=True)
    if arguments.output is not None:
        write_json(arguments.output, whole)
    return whole


def with_choice(arguments: Arguments, choice: str) -> Arguments:
    """Return the arguments with those of a --compare on top. Invalid ones end the process as on the command line."""
    try:
        words = shlex.split(choice)
    except ValueError:  # an unclosed quotation mark
        words = []
    if not words or not all("=" in word for word in words):
        raise InputError(
            f"--compare must be fields with values, for example mesh.fsdp=16 or 'mesh.fsdp=16 micro-batches=2', "
            f"got {choice!r}"
        )
    fields = [f"--{word}" for word in words]
    default = replace(arguments, compare=(), settings=with_chosen_members(arguments.settings, fields))
    chosen = tyro.cli(Arguments, args=fields, default=default, prog=program_name("aot"))
    return replace(checked(chosen), settings=one_duration(chosen.settings, given_fields(fields)))


def lines(whole: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    found = []
    for step in whole["steps"]:
        found += _step_lines(whole, step)
    least = "≥ " if any(step["lower_bound"] for step in whole["steps"]) else ""
    if whole["days"] is not None:
        found.append(f"the whole run: {least}{whole['days']:.1f} days")
    elif all(step["step_milliseconds"] is not None for step in whole["steps"]):
        found.append("the whole run: unknown, since num_epochs needs the store; --num-steps gives days")
    found.append(f"versions: {in_words(whole['versions'])}")
    if whole["calibration"]:
        found.append("calibration: the compiler's cycles for plain programs, and the chip's peak")
    found += [
        f"  {one['program']:<16}{one['estimated']:8,.0f} of {one['peak']:,.0f} {one['unit']}"
        for one in whole["calibration"]
    ]
    return found


def _step_lines(whole: dict[str, Any], step: dict[str, Any]) -> list[str]:
    slices = f"{whole['slices']} slices, " if whole["slices"] > 1 else ""
    found = [
        f"{slices}{counted(whole['chips'], whole['device'])} of {whole['topology']}, {step['batch_size']} x "
        f"{step['length']} tokens per step in {counted(step['micro_batches'], 'micro-batch', 'micro-batches')}, "
        f"remat {step['remat']} ({step['compile_seconds']} s to compile); all numbers are estimates"
    ]
    if step["step_milliseconds"] is None:
        needed = "more" if step["peak_gib"] is None else f"{step['peak_gib']:.2f} GiB"
        return [
            *found,
            f"  memory        {needed} needed of {step['hbm_gib']:.3g} GiB per {whole['device']}  DOES NOT FIT",
        ]
    memory = step["memory_gib"]
    compiler = ""
    if step["bytes_accessed"]:
        compiler = (
            f" (the compiler, which counts bodies of loops once: {step['compiler_tflops']:,.2f} T and "
            f"{step['bytes_accessed'] / 1e9:,.1f} GB)"
        )
    found += [
        f"  memory        {step['peak_gib']:.2f} of {step['hbm_gib']:.3g} GiB per {whole['device']}: state and batch "
        f"{memory['arguments']:.2f}, temporaries {memory['temporaries']:.2f}, program {memory['program']:.2f}"
        + ("" if step["fits"] else "  DOES NOT FIT"),
        f"  step          {_at_least(step)}{step['step_milliseconds']:.1f} ms, "
        f"{_at_most(step)}{step['tokens_per_second']:,.0f} tokens/s, MFU {_at_most(step)}{step['mfu']:.1%}",
        *_bound_lines(whole, step),
        f"  FLOPs         {step['model_tflops']:,.2f} T of the model, the basis of MFU; per {whole['device']} "
        f"{step['chip_tflops']:,.2f} T in matrix products outside kernels{compiler}",
    ]
    found += [f"    {name:<18}{value:8.2f} ms" for name, value in step["step_parts"].items()]
    found += [
        f"    kernel {one['name']}: {one['count']} per step, {one['milliseconds']:.2f} ms" for one in step["kernels"]
    ]
    found += [f"    not counted: kernel {name}, {times} per step" for name, times in step["uncounted_kernels"].items()]
    found += [
        f"    {one['kind']} over {one['axis']} ({one['size']}), {one['network']}: {one['count']} per step, "
        f"{one['bytes'] / 1e6:,.1f} MB, {one['milliseconds']:.2f} ms"
        for one in step["collectives"]
    ]
    if step["costliest"]:
        found.append("  most expensive operations: estimate, bound, runs per step, and line")
    found += [
        f"    {one['milliseconds']:7.2f} ms {one['bound']:7.2f} ms {one['count']:4d}  {one['part']}, "
        f"{one['source'].rpartition('/')[2]}, {one['line'] or one['name']}"
        for one in step["costliest"]
    ]
    return found


def _bound_lines(whole: dict[str, Any], step: dict[str, Any]) -> list[str]:
    """Return the line of the bound, which estimates for GPUs have."""
    if step["bound_milliseconds"] is None:
        return []
    return [
        f"  bound         {step['bound_milliseconds']:.1f} ms, each operation by its FLOPs and bytes alone; the step's "
        f"products at the peak: {1e3 * step['chip_tflops'] / step['peak_tflops']:.1f} ms; other operations of the "
        f"estimate by {whole['cost_model']}"
    ]


def advice_lines(found: dict[str, Any]) -> list[str]:
    """Return lines about the changes that were tried because the step does not fit."""
    tried = ["it does not fit; tried:"]
    for one in found["tried"]:
        peak = "out of memory" if one["peak_gib"] is None else f"{one['peak_gib']:.2f} GiB"
        tried.append(f"  {one['choice']:<60}{peak}{'' if one['fits'] else '  does not fit'}")
    if found["larger_gpu"]:
        tried.append(f"the smallest listed GPU that holds it unchanged is {found['larger_gpu']}")
    if found["choice"] is None:
        return [*tried, "no change fits: use more or larger devices, or a smaller model or batch"]
    best = found["report"]
    return [
        *tried,
        f"{found['choice']} fits: {best['peak_gib']:.2f} of {best['hbm_gib']:.0f} GiB, "
        f"{_at_least(best)}{best['step_milliseconds']:.1f} ms, MFU {_at_most(best)}{best['mfu']:.1%}",
    ]


def table(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of reports, each with its `choice`; the values are those of the step of the full length."""
    rows = [("choice", "fits", "peak GiB", "ms", "MFU", "collective MB", "compile s")]
    for one in reports:
        compiled = one["step_milliseconds"] is not None
        rows.append(
            (
                one["choice"],
                "yes" if one["fits"] else "no",
                "-" if one["peak_gib"] is None else f"{one['peak_gib']:.2f}",
                f"{_at_least(one)}{one['step_milliseconds']:.1f}" if compiled else "-",
                f"{_at_most(one)}{one['mfu']:.1%}" if compiled else "-",
                f"{sum(part['bytes'] for part in one['collectives']) / 1e6:,.0f}",
                f"{one['compile_seconds']:.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _at_least(whole: dict[str, Any]) -> str:
    return "≥ " if whole["lower_bound"] else ""


def _at_most(whole: dict[str, Any]) -> str:
    return "≤ " if whole["lower_bound"] else ""


def main() -> None:
    """Run the command."""
    arguments, given = command_line(Arguments, PretrainConfig, program="aot", description=__doc__)
    settings = one_duration(arguments.settings, given)
    cuda.show()
    with cuda.quiet():  # the plugin says that there is no driver
        import jax

    jax.config.update("jax_platforms", "cpu")  # anything that is computed, not only compiled, is computed here
    jax.config.update("jax_enable_compilation_cache", False)  # a program that was compiled without a device is not read
    try:
        aot(replace(arguments, settings=settings))
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"the compiler rejects the step; try other sizes, or --execution.attention xla: {one_line(error)[:300]}"
        ) from error


if __name__ == "__main__":
    run_command(main)
