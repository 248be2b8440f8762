"""Curves of runs: metrics over the steps, as arrays, as a line of text and as plots.

`evaluate zero-shot-curve` plots relative zero-shot performance over pretraining, as GPT-1's figure 2, right. The figure
normalizes the score of a task between a random guess and the best earlier result of a single model (Radford et al.,
2018, section 5). It prints neither; the ceilings here are those of the sources that are named.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import InputError, RunError
from jaxlm.evaluation.arguments import ZeroShotCurve
from jaxlm.evaluation.output import say
from jaxlm.evaluation.zero_shot import RESULTS, read_results
from jaxlm.files import check_output
from jaxlm.inference.loaded_run import saved_task
from jaxlm.runs.directory import RunDirectory, split_start
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.tasks import Task

BARS = "▁▂▃▄▅▆▇█"
PLOTS = (".png", ".pdf", ".svg")
OF_A_LINE = {"step", "seed", "peak_lr", "tokens", "trained_tokens"}  # numbers of a line that are not metrics
# Ends of the names of metrics whose smallest value is best; of all others it is the largest.
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "calibration_error")
_GPT1 = "best earlier result in GPT-1's tables"
_GPT2 = "best earlier result in GPT-2's table 3"


class Curve(NamedTuple):
    """A metric over the steps. steps: int, increasing, shape (n,). values: float, finite, shape (n,)."""

    steps: np.ndarray
    values: np.ndarray

    def best(self, name: str) -> int:
        """Return the index of the best value of the metric `name`."""
        return int(np.argmin(self.values) if name.endswith(LOWER_IS_BETTER) else np.argmax(self.values))


class Trial(NamedTuple):
    """A seed and a learning rate of a fine-tuning run; None and None are those of a pretraining run."""

    seed: int | None
    rate: float | None


def curves_of(run: RunDirectory) -> dict[str, Curve]:
    """Return the curves of a run: `loss` of training, and the loss and the selecting metric of its evaluations.

    A value of several seeds and learning rates is their mean at that step. Values that are not finite are left out. A
    run that has logged nothing has no curves.
    """
    names = main_metrics(saved_task(run) if (run.path / "task.json").exists() else None)
    file = run.path / "metrics.jsonl"
    found = curves_by_trial(read_metrics(file) if file.exists() else (), names)
    return {name: mean_curve(list(found[name].values())) for name in names if name in found}


def main_metrics(task: Task | None) -> list[str]:
    """Return the metrics that are shown of a run: the loss, and the loss and the selecting metric of evaluations."""
    if task is None:
        return ["loss", "validation_loss"]
    return list(dict.fromkeys(["loss", f"{task.selects}_loss", f"{task.selects}_{task.metric}"]))


def curves_by_trial(lines: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> dict[str, dict[Trial, Curve]]:
    """Return metric -> trial -> curve of the lines of a metrics.jsonl.

    names: the metrics; default, all that are numbers. Values that are not finite are left out, and several of a trial
    at one step are averaged.
    """
    found: dict[str, dict[Trial, dict[int, list[float]]]] = {}
    for line in lines:
        trial = Trial(line.get("seed"), line.get("peak_lr"))
        for name in names or line.keys() - OF_A_LINE:
            value = line.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                found.setdefault(name, {}).setdefault(trial, {}).setdefault(line["step"], []).append(value)
    return {name: {trial: _curve(values) for trial, values in of_trials.items()} for name, of_trials in found.items()}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves at each step, over those that have a value there."""
    if len(curves) == 1:
        return curves[0]
    values: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            values.setdefault(step, []).append(value)
    return _curve(values)


def text_curve(curve: Curve, last_step: int, bounds: tuple[float, float], width: int) -> str:
    """Return a curve from step 1 to `last_step` as `width` bars; a blank where a bar has no value.

    Each bar is the mean of its steps, between the lowest and the highest value in `bounds`.
    """
    low, high = bounds
    at = np.maximum(curve.steps - 1, 0) * width // max(last_step, 1)
    bars = []
    for position in range(width):
        values = curve.values[at == position]
        height = (float(values.mean()) - low) / (high - low) if len(values) and high > low else 0.0
        bars.append(BARS[min(int(height * len(BARS)), len(BARS) - 1)] if len(values) else " ")
    return "".join(bars).rstrip()


def check_plot(path: Path) -> None:
    """Raise InputError for a plot that cannot be written."""
    if path.suffix.lower() not in PLOTS:
        raise InputError(f"--plot must be a file ending in {', '.join(PLOTS)}, got {path}; choose another name")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot must be in an existing directory, got {path}; create {path.parent} first")


def save_plot(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Write a plot with a panel for each metric and a line for each run. runs: the curves by the label of the run."""
    from matplotlib.figure import Figure  # takes half a second

    names = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    if not names:
        raise InputError("the runs have logged no steps; train first")
    figure = Figure(figsize=(6.0 * len(names), 4.0), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            if name in curves:
                marker = "." if len(curves[name].steps) < 100 else ""
                panel.plot(*curves[name], label=label, color=f"C{number}", linewidth=1.2, marker=marker)
        panel.set(title=name.replace("_", " "), xlabel="step")
    _write(figure, path)


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
        found[name] = replace(scale, ceiling=ceiling, source="given")
    return found


class Point(NamedTuple):
    """The relative performance of a step, from 0 for chance to 1 for the ceiling, and its standard error."""

    step: int
    value: float
    stderr: float


def zero_shot_curve(arguments: ZeroShotCurve) -> dict[str, Any]:
    """Return the points of the curves, which are plotted in the output."""
    check_output(arguments.output)
    if arguments.output.suffix.lower() not in PLOTS:
        raise InputError(f"--output must end in {', '.join(PLOTS)}, got {arguments.output}; choose another name")
    known = scales(arguments.ceiling)
    curves = {run: relative_curves(run, known) for run in arguments.runs}
    plot(curves, arguments.output)
    for run, tasks in curves.items():
        for task, points in tasks.items():
            last, scale = points[-1], known[task]
            say(f"{run}  {task:<12} {last.value:+.3f} at step {last.step}; ceiling {scale.ceiling:g} ({scale.source})")
    shown = {
        run: {task: [list(point) for point in points] for task, points in of.items()} for run, of in curves.items()
    }
    return {"output": str(arguments.output), "curves": shown}


def relative_curves(run: str, known: dict[str, Scale]) -> dict[str, list[Point]]:
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
        span = scale.ceiling - scale.chance
        point = Point(line["step"], (float(line["value"]) - scale.chance) / span, float(line["stderr"]) / span)
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
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    """Write a figure with a grid and a legend in each panel. RunError if the file cannot be written."""
    for panel in figure.axes:
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}; choose another place") from error


def _curve(values: Mapping[int, Sequence[float]]) -> Curve:
    steps = sorted(values)
    means = [np.mean(values[step]) if len(values[step]) > 1 else float(values[step][0]) for step in steps]
    return Curve(np.array(steps), np.array(means))
