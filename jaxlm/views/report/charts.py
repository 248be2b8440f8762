"""Charts of a report: their lines as compact arrays for the page, and their values for its tables.

A curve of more than EXACT points is stored as the lowest and the highest value of each of PARTS equal parts, so that no
spike is lost, with the means of the parts for smoothing. Steps are int32 and values float32, little-endian, in base64.
Values in tables are computed from all values.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.tasks.metrics import METRICS
from jaxlm.views.curves import LOWER_IS_BETTER, SCALES, Curve, Trial, mean_curve
from jaxlm.views.report.run_record import Clock, Record

EXACT = 2000  # points of a curve that is stored as it is
PARTS, FEWER_PARTS = 1000, 250  # of a longer curve; in charts that are hidden at first, the second
CLOCK_POINTS = 1000
# Units by the ends of the names of metrics; the first that fits holds, and others are plain numbers.
FRACTIONS = ("accuracy", "f1", "precision", "recall", "exact_match", "calibration_error", "wait_share", "mfu")
UNITS = {
    "tokens_per_second": "tokens/s",
    "bits_per_byte": "bits/byte",
    "bits_per_character": "bits/character",
    "memory_gib": "GiB",
    "loss": "nats",
    "nll": "nats",
    **dict.fromkeys(("bleu", "chrf"), "0 to 100"),
    **dict.fromkeys(FRACTIONS, "fraction"),
}
SCORES = ("pearson", "spearman")  # metrics of regression, whose loss is a squared error
# Ends of the names of metrics that have a best value; those of the catalogue, and those of language models.
JUDGED = (*LOWER_IS_BETTER, *sorted({metric.name for metric in METRICS}))


@dataclass(frozen=True)
class Entry:
    """A row of the legend: a run, or one of the learning rates of a fine-tuning run. run: its number."""

    run: int
    label: str
    rate: float | None = None


@dataclass(frozen=True)
class Line:
    """A curve of an entry. kind: `mean` over several seeds, `trial` for one of these, or `single`.

    errors: the standard error of each value, (n,); None: not known.
    """

    entry: int
    label: str
    curve: Curve
    kind: str = "single"
    errors: np.ndarray | None = None


@dataclass(frozen=True)
class Chart:
    """A metric over the steps.

    shown: True if it is plotted at first. judged: True if it has a best value. unit: "" for a number without one.
    """

    name: str
    lines: Sequence[Line]
    shown: bool
    judged: bool
    unit: str = ""

    @property
    def title(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """The title of the y axis: the name in words, with its unit."""
        return f"{self.title.removesuffix(' gib')} ({self.unit})" if self.unit else self.title

    def best(self, curve: Curve) -> int:
        """Return the index of the best value of a curve."""
        return curve.best(self.name)


def entries_of(records: Sequence[Record], names: Sequence[str]) -> list[Entry]:
    """Return the entries of runs that have curves. names: a short, distinct name of each run."""
    entries = []
    for number, (record, name) in enumerate(zip(records, names, strict=True)):
        rates = sorted({trial.rate for of in record.curves.values() for trial in of if trial.rate is not None})
        several = len(rates) > 1
        found = [Entry(number, f"{name}, rate {rate:g}" if several else name, rate) for rate in rates]
        if not rates and (record.curves or record.zero_shot):
            found = [Entry(number, name)]
        entries += found
    return entries


def charts_of(records: Sequence[Record], entries: Sequence[Entry]) -> list[Chart]:
    """Return the charts: the main metrics of the runs, the others by name, and those of zero-shot tasks."""
    main = list(dict.fromkeys(name for record in records for name in record.main))
    names = {name for record in records for name in record.curves}
    scores = any(name.endswith(SCORES) for name in main)
    charts = []
    for name in [name for name in main if name in names] + sorted(names - set(main)):
        lines = [
            line
            for number, entry in enumerate(entries)
            for line in _lines(number, entry, records[entry.run].curves.get(name, {}))
        ]
        charts.append(Chart(name, lines, name in main, name.endswith(JUDGED), _unit(name, scores)))
    return charts + _zero_shot_charts(records, entries)


def _lines(number: int, entry: Entry, curves: Mapping[Trial, Curve]) -> list[Line]:
    """Return the lines of an entry: the curve of its only trial, or each trial's and their mean."""
    own = {trial: curve for trial, curve in curves.items() if entry.rate is None or trial.rate == entry.rate}
    if len(own) < 2:
        return [Line(number, entry.label, curve) for curve in own.values()]
    order = sorted(own, key=lambda trial: (trial.seed is None, trial.seed))
    trials = [Line(number, f"{entry.label}, seed {trial.seed}", own[trial], "trial") for trial in order]
    return [Line(number, entry.label, mean_curve([own[trial] for trial in order]), "mean"), *trials]


def _zero_shot_charts(records: Sequence[Record], entries: Sequence[Entry]) -> list[Chart]:
    """Return a chart for each task, protocol and metric of zero_shot.jsonl; the metric of a task's scale is shown."""
    first = {entry.run: number for number, entry in reversed(list(enumerate(entries)))}
    found: dict[tuple[str, str, str], dict[int, dict[int, tuple[float, float]]]] = {}
    for number, record in enumerate(records):
        for line in record.zero_shot:
            key = (str(line["task"]), str(line["protocol"]), str(line["metric"]))
            if np.isfinite(line["value"]):
                found.setdefault(key, {}).setdefault(first[number], {})[line["step"]] = line["value"], line["stderr"]
    charts = []
    for (task, protocol, metric), of_entries in sorted(found.items()):
        scale = SCALES.get(task)
        lines = []
        for entry, values in sorted(of_entries.items()):
            steps = sorted(values)
            of_steps, errors = np.array([values[step] for step in steps]).T
            curve = Curve(np.array(steps), of_steps)
            lines.append(Line(entry, entries[entry].label, curve, errors=np.nan_to_num(errors)))
        shown = scale is None or (scale.protocol, scale.metric) == (protocol, metric)
        name = f"zero-shot {task}, {protocol}: {metric}"
        charts.append(Chart(name, lines, shown, metric.endswith(JUDGED), _unit(metric)))
    return charts


def _unit(name: str, scores: bool = False) -> str:
    """Return the unit of a metric. scores: True if its loss may be a squared error."""
    if scores and name.endswith("loss"):
        return ""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def charts_json(charts: Sequence[Chart], entries: Sequence[Entry], records: Sequence[Record]) -> dict[str, Any]:
    """Return the data that the page's script plots, as JSON values."""
    of_entries = [
        {
            "label": entry.label,
            "marks": list(records[entry.run].resumed),
            "clock": _clock_json(records[entry.run].clock),
        }
        for entry in entries
    ]
    return {"entries": of_entries, "charts": [_chart_json(chart) for chart in charts]}


def _chart_json(chart: Chart) -> dict[str, Any]:
    parts = PARTS if chart.shown else FEWER_PARTS
    lines = []
    for line in chart.lines:
        values = {"entry": line.entry, "label": line.label, "kind": line.kind} | compact(line.curve, parts)
        if line.errors is not None and "mx" not in values:
            values["e"] = _base64(line.errors, "<f4")
        lines.append(values)
    return {"title": chart.title, "axis": chart.axis, "lines": lines}


def groups_json(
    fields: Mapping[str, Sequence[str]], entries: Sequence[Entry], records: Sequence[Record]
) -> dict[str, dict[str, Any]]:
    """Return the fields by which entries can be grouped: those with fewer values than there are runs, at least two.

    fields: name -> a value of each run. Each has its `values`, in order, and `of`: the number of each entry's value.
    """
    found = {}
    for name, values in fields.items():
        own = sorted(set(values), key=_order)
        if 1 < len(own) < len(records):
            found[name] = {"values": own, "of": [own.index(values[entry.run]) for entry in entries]}
    return found


def _order(text: str) -> tuple[bool, float, str]:
    """Return the key that sorts numbers by value, before other texts."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def compact(curve: Curve, parts: int) -> dict[str, str]:
    """Return a curve as base64: `x` and `y`; of a long one the extremes of its parts, and their means `mx` and `my`."""
    if len(curve.steps) <= EXACT:
        return {"x": _base64(curve.steps, "<i4"), "y": _base64(curve.values, "<f4")}
    bounds = np.linspace(0, len(curve.steps), parts + 1).astype(int)
    kept, middles, means = [0, len(curve.steps) - 1], [], []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        values = curve.values[begin:end]
        kept += [begin + int(values.argmin()), begin + int(values.argmax())]
        middles.append(curve.steps[(begin + end) // 2])
        means.append(values.mean())
    kept = sorted(set(kept))
    extremes = {"x": _base64(curve.steps[kept], "<i4"), "y": _base64(curve.values[kept], "<f4")}
    return extremes | {"mx": _base64(np.array(middles), "<i4"), "my": _base64(np.array(means), "<f4")}


def _clock_json(clock: Clock | None) -> dict[str, Any] | None:
    if clock is None:
        return None
    kept = np.unique(np.linspace(0, len(clock.steps) - 1, CLOCK_POINTS).astype(int))
    return {
        "steps": _base64(clock.steps[kept], "<i4"),
        "tokens": _base64(clock.tokens[kept], "<f8"),
        "hours": _base64(clock.hours[kept], "<f8"),
    }


def _base64(values: np.ndarray, dtype: str) -> str:
    limits = np.finfo(np.float32)
    if dtype == "<f4":
        values = np.clip(values, limits.min, limits.max)
    return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode("ascii")
