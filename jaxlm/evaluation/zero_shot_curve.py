"""`evaluate zero-shot-curve`: relative zero-shot performance over pretraining, as GPT-1's figure 2, right.

The figure normalizes the score of a task between a random guess and the best earlier result of a single model (Radford
et al., 2018, section 5). It prints neither; the ceilings here are those of the sources that are named.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import ZeroShotCurve
from jaxlm.evaluation.command import say
from jaxlm.evaluation.zero_shot import RESULTS, read_results
from jaxlm.files import check_output
from jaxlm.runs.directory import split_start

_GPT1 = "best earlier result in GPT-1's tables"
_GPT2 = "best earlier result in GPT-2's table 3"
SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Scale:
    """The metric of a task that a curve shows, its value by chance, its ceiling, and the source of the ceiling. None:
    no ceiling is known."""

    protocol: str
    metric: str
    chance: float
    ceiling: float | None
    source: str


SCALES: Mapping[str, Scale] = {
    "cola": Scale("paper", "matthews", 0.0, 0.350, f"{_GPT1} 4"),
    "sst2": Scale("paper", "accuracy", 0.5, 0.932, f"{_GPT1} 4"),
    "race": Scale("paper", "accuracy", 0.25, 0.533, f"{_GPT1} 3, an ensemble of nine models"),
    "dpr": Scale("paper", "accuracy_partial", 0.5, 0.764, "Peng, Khashabi and Roth, 2015"),
    "lambada": Scale("paper", "accuracy", 0.0, 0.5923, _GPT2),
    "cbt": Scale("paper", "accuracy", 0.1, 0.857, f"{_GPT2}, common nouns"),
    "wsc273": Scale("paper", "accuracy_partial", 0.5, None, ""),
    "blimp": Scale("paper", "accuracy_sum", 0.5, 0.964, "agreement of people by majority, Warstadt et al., 2020"),
    "codah": Scale("paper", "accuracy", 0.25, None, ""),
    "swag": Scale("paper", "accuracy", 0.25, None, ""),
    "story_cloze": Scale("paper", "accuracy", 0.5, None, ""),
}


def scales(ceilings: Sequence[str]) -> dict[str, Scale]:
    """Return the scales with other ceilings, each TASK=VALUE. InputError for an unknown task or a bad value."""
    found = dict(SCALES)
    for text in ceilings:
        name, _, value = text.partition("=")
        if name not in found:
            raise InputError(f"--ceiling must be TASK=VALUE with one of {', '.join(found)}, got {text!r}; write that")
        try:
            ceiling = float(value)
        except ValueError:
            raise InputError(f"--ceiling must be TASK=VALUE with a number, got {text!r}; write {name}=0.9") from None
        scale = found[name]
        if not ceiling > scale.chance:
            raise InputError(
                f"--ceiling of {name} must be above chance, {scale.chance:g}, got {value}; give a larger one"
            )
        found[name] = Scale(scale.protocol, scale.metric, scale.chance, ceiling, "given")
    return found


def relative(scale: Scale, value: float) -> float:
    """Return a value as a fraction of the way from chance to the ceiling."""
    assert scale.ceiling is not None
    return (value - scale.chance) / (scale.ceiling - scale.chance)


class Point(NamedTuple):
    """The relative performance of a step, and its standard error."""

    step: int
    value: float
    stderr: float


def zero_shot_curve(arguments: ZeroShotCurve) -> dict[str, Any]:
    """Return the points of the curves, which are plotted in the output."""
    check_output(arguments.output)
    if arguments.output.suffix.lower() not in SUFFIXES:
        raise InputError(f"--output must end in {', '.join(SUFFIXES)}, got {arguments.output}; choose another name")
    known = scales(arguments.ceiling)
    curves = {run: curves_of(run, known) for run in arguments.runs}
    plot(curves, arguments.output)
    for run, tasks in curves.items():
        for task, points in tasks.items():
            last, scale = points[-1], known[task]
            say(f"{run}  {task:<12} {last.value:+.3f} at step {last.step}; ceiling {scale.ceiling:g} ({scale.source})")
    shown = {
        run: {task: [list(point) for point in points] for task, points in of.items()} for run, of in curves.items()
    }
    return {"output": str(arguments.output), "curves": shown}


def curves_of(run: str, known: dict[str, Scale]) -> dict[str, list[Point]]:
    """Return the points of each task of a run that has a scale with a ceiling, in the order of the steps.

    InputError without any, naming what is missing.
    """
    path = Path(split_start(run)[0])
    file = path / RESULTS if path.is_dir() else path
    if not file.exists():
        raise InputError(
            f"{run} must have a {RESULTS}, got none; make it with python -m jaxlm.evaluate zero-shot --run {run} "
            "--checkpoints all --task NAME:PATH"
        )
    found: dict[str, dict[int, Point]] = {}
    without_ceiling = set()
    for line in read_results(file):
        scale = known.get(line["task"])
        if (
            line["step"] is None
            or scale is None
            or "field" in line
            or (line["protocol"], line["metric"]) != (scale.protocol, scale.metric)
        ):
            continue
        if scale.ceiling is None:
            without_ceiling.add(line["task"])
            continue
        error = float(line["stderr"]) / (scale.ceiling - scale.chance)
        point = Point(line["step"], relative(scale, float(line["value"])), error)
        found.setdefault(line["task"], {})[line["step"]] = point
    if not found:
        hint = f"give --ceiling {sorted(without_ceiling)[0]}=VALUE" if without_ceiling else "evaluate other tasks"
        raise InputError(f"{file} must have a task with a known ceiling, got none; {hint}")
    return {task: [points[step] for step in sorted(points)] for task, points in found.items()}


def plot(curves: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """Write a plot with a color for each task, a line style for each run, and error bars of one standard error."""
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    panel = figure.subplots()
    tasks = list(dict.fromkeys(task for of_run in curves.values() for task in of_run))
    styles = ("-", "--", ":", "-.")
    for number, (run, of_run) in enumerate(curves.items()):
        for task, points in of_run.items():
            steps, values, errors = zip(*points, strict=True)
            label = task if len(curves) == 1 else f"{task}, {run}"
            panel.errorbar(
                steps,
                values,
                yerr=[0.0 if math.isnan(error) else error for error in errors],
                label=label,
                color=f"C{tasks.index(task)}",
                linestyle=styles[number % len(styles)],
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1.2,
            )
    panel.axhline(0.0, color="gray", linewidth=0.8)
    panel.set(xlabel="pretraining step", ylabel="relative zero-shot performance", title="0: chance, 1: ceiling")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
