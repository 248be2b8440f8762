"""Curves of runs: the metrics of metrics.jsonl over the steps, as arrays, as a line of text and as a plot."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlm.errors import InputError, RunError
from jaxlm.inference.loaded_run import saved_task
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics

BARS = "▁▂▃▄▅▆▇█"
PLOTS = (".png", ".pdf", ".svg")
LOWER_IS_BETTER = ("loss", "perplexity")  # ends of the names of such metrics; of all others the largest value is best


class Curve(NamedTuple):
    """A metric over the steps. steps: int, increasing, shape (n,). values: float, finite, shape (n,)."""

    steps: np.ndarray
    values: np.ndarray

    def best(self, name: str) -> int:
        """Return the index of the best value of the metric `name`."""
        return int(np.argmin(self.values) if name.endswith(LOWER_IS_BETTER) else np.argmax(self.values))


def curves_of(run: RunDirectory) -> dict[str, Curve]:
    """Return the curves of a run: `loss` of training, and the loss and the selecting metric of its evaluations.

    A value of several seeds and learning rates is their mean at that step. Values that are not finite are left out. A
    run that has logged nothing has no curves.
    """
    names = ["loss", "validation_loss"]
    if (run.path / "task.json").exists():
        task = saved_task(run)
        names = ["loss", f"{task.selects}_loss", f"{task.selects}_{task.metric}"]
    found: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    file = run.path / "metrics.jsonl"
    for line in read_metrics(file) if file.exists() else ():
        for name in names:
            value = line.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                found[name].setdefault(line["step"], []).append(value)
    return {
        name: Curve(np.array(sorted(values)), np.array([np.mean(values[step]) for step in sorted(values)]))
        for name, values in found.items()
        if values
    }


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
