"""Curves of runs: the metrics of metrics.jsonl over the steps, as arrays, as a line of text and as a plot."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import InputError, RunError
from jaxlm.inference.loaded_run import saved_task
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics

BARS = "▁▂▃▄▅▆▇█"
PLOTS = (".png", ".pdf", ".svg")
OF_A_LINE = {"step", "seed", "peak_lr", "tokens", "trained_tokens"}  # numbers of a line that are not metrics
# Ends of the names of metrics whose smallest value is best; of all others it is the largest.
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "calibration_error")


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
    names = main_metrics(run)
    file = run.path / "metrics.jsonl"
    found = curves_by_trial(read_metrics(file) if file.exists() else (), names)
    return {name: mean_curve(list(found[name].values())) for name in names if name in found}


def main_metrics(run: RunDirectory) -> list[str]:
    """Return the metrics that are shown of a run: the loss, and the loss and the selecting metric of evaluations."""
    if not (run.path / "task.json").exists():
        return ["loss", "validation_loss"]
    task = saved_task(run)
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


def _curve(values: Mapping[int, Sequence[float]]) -> Curve:
    steps = sorted(values)
    means = [np.mean(values[step]) if len(values[step]) > 1 else float(values[step][0]) for step in steps]
    return Curve(np.array(steps), np.array(means))


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
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}; choose another place") from error
