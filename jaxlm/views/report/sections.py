"""Sections of a report: runs, curves, differences, samples, zero-shot tasks, evaluations and starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.runs.config import CONTENTS, flat
from jaxlm.views.report.charts import EXACT, Chart, Entry, Line
from jaxlm.views.report.run_record import Evaluation, Record
from jaxlm.views.report.tables import ABSENT, Cell, Row, Table, escaped, number, swatch, table_html, whole
from jaxlm.views.run import Summary, differing_values
from jaxlm.wording import counted

LONGEST_SAMPLE = 4000  # characters
MOST_FIELDS = 12  # columns of the table of runs for fields that differ
FILTER = (
    '<form id="filter" role="search"><label>filter runs <input type="search" name="words" '
    'placeholder="words of a name"></label></form>\n'
)
AXES = {"step": "steps", "tokens": "tokens", "hours": "hours of training"}


@dataclass(frozen=True)
class Section:
    """A part of the page. anchor: its id. content: HTML."""

    anchor: str
    title: str
    content: str


def short_names(names: Sequence[str]) -> list[str]:
    """Return for each of distinct paths its shortest ending, in whole parts, that no other path has.

    A path that ends another one keeps all of its parts.
    """
    parts = [[part for part in name.split("/") if part] for name in names]
    ends = Counter(tuple(one[k:]) for one in parts for k in range(len(one)))
    found = []
    for one, name in zip(parts, names, strict=True):
        short = [k for k in range(len(one)) if ends[tuple(one[k:])] == 1]
        found.append("/".join(one[short[-1] :]) if short else name)
    return found


def runs_section(records: Sequence[Record], names: Sequence[str]) -> Section:
    """Return the table of the runs, with the best validation loss and the fields in which they differ."""
    rows: list[Row] = []
    fields = settings_of(records)
    shown = dict(list(fields.items())[:MOST_FIELDS])
    for position, (record, name) in enumerate(zip(records, names, strict=True)):
        config, loss = record.summary.config, record.summary.curves.get("loss")
        model = f"{config.get('model.num_layers')} × {config.get('model.width')}"
        last = number(None if loss is None else float(loss.values[-1]))
        starts = whole(len(record.starts))
        steps = whole(record.last_step)
        differing = [_setting(values[position]) for values in shown.values()]
        row: Row = [name, record.kind, model, steps, _progress(record), last, *_best_validation(record)]
        rows.append([*row, *differing, starts, record.name])
    measured = ("loss, last", "validation loss, best", "at step")
    columns = ("run", "kind", "layers × width", "step", "progress", *measured, *shown, "starts", "directory")
    content = FILTER if len(records) > 1 else ""
    content += table_html(Table("The runs and their progress", columns, rows, "runs"))
    if len(fields) > len(shown):
        more = counted(len(fields) - len(shown), "further field")
        content += f"<p>The runs differ in {more}; the section Differences has all.</p>\n"
    return Section("runs", "Runs", content)


def settings_of(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the fields in which the runs differ with their values, a text for each run, without hashes of contents."""
    if len(records) < 2:
        return {}
    found = differing_values([record.summary for record in records])
    return {name: values for name, values in found.items() if name not in CONTENTS and name != "kind"}


def _setting(text: str) -> Cell:
    """Return the cell of a field's value, which sorts as a number where it is one."""
    try:
        return Cell(text, float(text))
    except ValueError:
        return Cell(text) if text != "-" else ABSENT


def _best_validation(record: Record) -> tuple[Cell, Cell]:
    """Return the lowest loss of the evaluations, a mean over seeds, and its step."""
    curve = next((record.summary.curves.get(name) for name in record.main if name.endswith("_loss")), None)
    if curve is None:
        return ABSENT, ABSENT
    at = curve.best("loss")
    return number(float(curve.values[at])), whole(int(curve.steps[at]))


def _progress(record: Record) -> str:
    total = record.summary.config.get("num_steps")
    if record.results or (total and record.last_step >= total):
        return "complete"
    if not record.last_step:
        return "no logged steps"
    return f"{record.last_step / total:.0%} of {total:,} steps" if total else "without results"


def curves_section(
    charts: Sequence[Chart], entries: Sequence[Entry], records: Sequence[Record], groups: Sequence[str] = ()
) -> Section:
    """Return the charts with their settings and tables; the page's script plots them. groups: fields to group by."""
    choices = "".join(
        f'<label><input type="checkbox" name="entry" value="{k}" checked>{swatch(k)}'
        f"<span>{escaped(entry.label)}</span></label>"
        for k, entry in enumerate(entries)
    )
    metrics = "".join(
        f'<label><input type="checkbox" name="chart" value="{k}"{" checked" * chart.shown}>'
        f"<span>{escaped(chart.title)}</span></label>"
        for k, chart in enumerate(charts)
    )
    several = any(line.kind == "trial" for chart in charts for line in chart.lines)
    content = settings_html(several, groups) + _fieldset("Runs", choices, "entries")
    content += '<p id="groups" role="status"></p>\n' + _fieldset("Charts", metrics)
    content += '<p id="notice" role="status"></p>\n'
    content += "".join(_figure(k, chart, entries) for k, chart in enumerate(charts))
    if any(len(line.curve.steps) > EXACT for chart in charts for line in chart.lines):
        content += (
            f"<p>Curves of more than {EXACT:,} points are plotted through the lowest and the highest value of equal "
            "parts, and smoothed over the means of these parts. The tables are computed from all values.</p>\n"
        )
    if any(record.clock is None for record in records):
        content += "<p>Runs without a logged number of tokens are plotted over steps only.</p>\n"
    return Section("curves", "Curves", content)


def settings_html(several: bool, groups: Sequence[str]) -> str:
    """Return the settings of all charts. several: True if a run has several seeds. groups: fields to group by."""
    axes = "".join(f'<option value="{name}">{text}</option>' for name, text in AXES.items())
    seeds = (
        '<label>seeds <select name="seeds"><option value="mean">mean</option><option value="trial">each</option>'
        "</select></label>"
    )
    fields = "".join(f'<option value="{escaped(name)}">{escaped(name)}</option>' for name in groups)
    group = f'<label>group by <select name="group"><option value="">no field</option>{fields}</select></label>'
    return (
        f'<form id="settings"><label>x axis <select name="axis">{axes}</select></label>'
        '<label><input type="checkbox" name="logx">log x</label><label><input type="checkbox" name="logy">log y</label>'
        '<label>smoothing <input type="range" name="smoothing" min="0" max="0.99" step="0.01" value="0">'
        '<output name="amount">0</output></label>'
        f"{seeds if several else ''}{group if groups else ''}"
        '<label><input type="checkbox" name="marks" checked>restarts</label>'
        '<button type="button" id="reset">show all x</button></form>\n'
        '<p class="hint" id="keys">Drag over a chart to zoom in, double-click to zoom out. In a chart that has the '
        "focus, arrow keys move the cursor, + and - zoom, and 0 shows everything.</p>\n"
    )


def _fieldset(legend: str, choices: str, name: str = "") -> str:
    buttons = '<button type="button" data-all="1">all</button><button type="button" data-all="">none</button>'
    buttons = f'<span class="buttons">{buttons}</span>'
    return f'<fieldset class="{name}"><legend>{legend}</legend>{choices}{buttons}</fieldset>\n'


def _figure(k: int, chart: Chart, entries: Sequence[Entry]) -> str:
    whole_lines = [line for line in chart.lines if line.kind != "trial"]
    sentence, hidden = escaped(sentence_of(chart, whole_lines)), "" if chart.shown else " hidden"
    return (
        f'<figure class="chart" data-chart="{k}"{hidden}><h3>{escaped(chart.title)}</h3><div class="plot" '
        f'role="img" tabindex="0" aria-describedby="keys" aria-label="{sentence}"></div>'
        f"{table_html(_values_table(chart, whole_lines, entries))}</figure>\n"
    )


def sentence_of(chart: Chart, lines: Sequence[Line]) -> str:
    """Return a sentence about a chart for those who do not see it."""
    line = min(lines, key=lambda line: float(line.curve.values[-1]))
    ends = [float(line.curve.values[-1]) for line in lines]
    said = f"Chart of {chart.title} over steps, {counted(len(lines), 'line')}"
    if len(lines) == 1:
        return f"{said}: {line.label}, from {line.curve.values[0]:.4g} to {ends[0]:.4g}."
    highest = max(lines, key=lambda line: float(line.curve.values[-1]))
    return f"{said}; the last values are from {min(ends):.4g} ({line.label}) to {max(ends):.4g} ({highest.label})."


def _values_table(chart: Chart, lines: Sequence[Line], entries: Sequence[Entry]) -> Table:
    """Return the first, best and last values of the lines; with several seeds, the deviation of their last values."""
    best = ("best", "at step") if chart.judged else ("lowest", "highest")
    rows: list[Row] = []
    for line in lines:
        steps, values = line.curve
        ends = [one.curve.values[-1] for one in chart.lines if one.kind == "trial" and one.entry == line.entry]
        row = [Cell(entries[line.entry].label, entry=line.entry), number(float(values[0]))]
        if chart.judged:
            at = chart.best(line.curve)
            row += [number(float(values[at])), whole(int(steps[at]))]
        else:
            row += [number(float(values.min())), number(float(values.max()))]
        if len(ends) > 1:
            mean = sum(ends) / len(ends)
            std = (sum((end - mean) ** 2 for end in ends) / (len(ends) - 1)) ** 0.5
            row += [number(float(mean), float(std)), whole(int(steps[-1]))]
        else:
            row += [number(float(values[-1])), whole(int(steps[-1]))]
        rows.append(row)
    columns = ("run", "first", *best, "last", "at step")
    return Table(f"{chart.title}: values", columns, rows, f"curves-{chart.name}")


def differences_section(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    """Return the fields of the configs that differ; None of a single run."""
    if len(records) < 2:
        return None
    summaries: list[Summary] = [record.summary for record in records]
    found = differing_values(summaries)
    if not found:
        return Section("differences", "Differences", "<p>The configs are equal.</p>\n")
    rows: list[Row] = [[Cell(name, code=True), *values] for name, values in found.items()]
    table = Table("Fields of config.json that differ", ("field", *names), rows, "differences")
    content = table_html(table)
    if any(name.startswith("fingerprints.") for name in found):
        content += "<p>Equal letters stand for equal contents.</p>\n"
    if len({record.kind.partition(" on ")[0] for record in records}) > 1:
        content += "<p>Of runs of different kinds only the fields that all have are compared.</p>\n"
    return Section("differences", "Differences", content)


def zero_shot_section(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    """Return the last value of each zero-shot task, protocol and metric of each run."""
    rows: list[Row] = []
    for record, name in zip(records, names, strict=True):
        last: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for line in sorted(record.zero_shot, key=lambda line: line["step"]):
            last[tuple(str(line[part]) for part in ("task", "protocol", "metric"))] = line
        for (task, protocol, metric), line in sorted(last.items()):
            error = number(line["stderr"]) if line["stderr"] == line["stderr"] else ABSENT
            examples = line.get("scored")
            scored = whole(examples) if isinstance(examples, int) else ABSENT
            rows.append([name, task, protocol, metric, whole(line["step"]), number(line["value"]), error, scored])
    if not rows:
        return None
    columns = ("run", "task", "protocol", "metric", "step", "value", "standard error", "examples")
    content = "<p>Values over the steps are among the curves.</p>\n"
    return Section(
        "zero-shot",
        "Zero-shot tasks",
        content + table_html(Table("Values without fine-tuning at the last step", columns, rows, "zero-shot")),
    )


def evaluations_section(evaluations: Sequence[Evaluation]) -> Section | None:
    """Return the metrics of evaluations, a column for each file."""
    if not evaluations:
        return None
    values = [flat(one.values) for one in evaluations]
    names = list(dict.fromkeys(name for one in values for name in one))
    rows: list[Row] = [[name, *(_metric_cell(one.get(name)) for one in values)] for name in names]
    columns = ("metric", *short_names([one.name for one in evaluations]))
    table = Table("Metrics of jaxlm.evaluate", columns, rows, "evaluations")
    return Section("evaluations", "Evaluations", table_html(table))


def _metric_cell(value: Any) -> Cell:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell(shortened(str(value), 80))
    return whole(value) if isinstance(value, int) else number(value)


def samples_section(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    """Return the texts that were generated."""
    parts = []
    for record, name in zip(records, names, strict=True):
        texts = "".join(f"<pre>{escaped(shortened(text, LONGEST_SAMPLE))}</pre>\n" for text in record.samples)
        parts += [f"<h3>{escaped(name)}</h3>\n{texts}"] if texts else []
    return Section("samples", "Samples", "".join(parts)) if parts else None


def starts_section(records: Sequence[Record], names: Sequence[str]) -> Section | None:
    """Return the starts and restarts of the runs."""
    named = zip(records, names, strict=True)
    rows = [_start(name, start) for record, name in named for start in record.starts]
    if not rows:
        return None
    columns = ("run", "time", "began", "devices", "commit", "jax", "command")
    table = Table("Starts and restarts of the runs", columns, rows, "starts")
    return Section("starts", "Starts", table_html(table))


def _start(name: str, start: Mapping[str, Any]) -> Row:
    devices, versions = start.get("devices"), start.get("versions")
    devices = devices if isinstance(devices, dict) else {}
    versions = versions if isinstance(versions, dict) else {}
    return (
        name,
        str(start.get("time")),
        str(start.get("started_from") or "from scratch"),
        f"{devices.get('count')} × {devices.get('kind')}",
        Cell(str(start.get("commit") or "–")[:12], code=True),
        str(versions.get("jax") or "–"),
        Cell(shortened(str(start.get("command")), 2000), code=True),
    )


def shortened(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
