"""Sections of a report about fine-tuning: results over seeds, confusion matrices, calibration, and predictions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlm.finetuning.results import over_seeds
from jaxlm.views.report.charts import Entry
from jaxlm.views.report.run_record import Record
from jaxlm.views.report.sections import Section, shortened
from jaxlm.views.report.tables import ABSENT, Cell, Row, Table, digits, escaped, number, table_html, whole

SHOWN_CLASSES = 40  # classes of a confusion matrix that is shown
LONGEST_TEXT = 400  # characters of a cell of an example

Numbered = Sequence[tuple[str, Record]]  # runs by their short names


def results_section(runs: Numbered) -> Section | None:
    """Return the results of fine-tuning over seeds, those of all metrics, and those of each seed."""
    runs = [(name, record) for name, record in runs if record.results]
    if not runs:
        return None
    content = table_html(_over_seeds(runs, selecting=True))
    content += _details("All metrics", table_html(_over_seeds(runs, selecting=False)))
    content += _details("Each seed", table_html(_each_seed(runs)))
    failed = [line for name, record in runs for line in _failures(name, record.results)]
    content += "".join(f"<p>{escaped(line)}</p>\n" for line in failed)
    return Section("results", "Results of fine-tuning", content)


def _over_seeds(runs: Numbered, *, selecting: bool) -> Table:
    """Return a row for each run and learning rate. selecting: with the metric that selects alone, else with all."""
    groups = [
        (name, record.results, rate, trials) for name, record in runs for rate, trials in _by_rate(record.results)
    ]
    found = [over_seeds(trials) for _, _, _, trials in groups]
    columns: dict[tuple[str, str], None] = {}
    for (_, results, _, _), splits in zip(groups, found, strict=True):
        for split, metrics in splits.items():
            names = sorted(metrics, key=lambda name: (name != results["metric"], name == "loss", name))
            columns |= {(split, name): None for name in names if not selecting or name == results["metric"]}
    rows: list[Row] = []
    for (name, results, rate, trials), splits in zip(groups, found, strict=True):
        row = [Cell(name), Cell(str(results["task"])), _rate(results, rate), whole(len(trials))]
        means = [splits.get(split, {}).get(metric, {}) for split, metric in columns]
        rows.append(row + [number(one.get("mean"), one.get("std") if len(trials) > 1 else None) for one in means])
    names = [f"{split} {metric}" for split, metric in columns]
    which, of_which = ("results", "the metric that selects") if selecting else ("all-results", "all metrics")
    caption = f"Mean over seeds of {of_which}, ± the standard deviation of several; * the selected learning rate"
    return Table(caption, ("run", "task", "learning rate", "seeds", *names), rows, which)


def _by_rate(results: Mapping[str, Any]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Return the finished trials of each learning rate; of those at one rate, what all of them measured."""
    found: dict[float, list[dict[str, Any]]] = {}
    for trial in results["runs"]:
        if "failed" not in trial:
            found.setdefault(trial["learning_rate"], []).append({k: v for k, v in trial.items() if _is_metrics(v)})
    return [(rate, _common(found[rate])) for rate in sorted(found)]


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, int | float) for item in value.values())


def _common(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return trials with the splits and metrics that all of them have."""
    common: dict[str, list[str]] = {
        split: [name for name in metrics if all(name in trial.get(split, {}) for trial in trials)]
        for split, metrics in trials[0].items()
    }
    splits = [split for split, names in common.items() if names]
    return [{split: {name: trial[split][name] for name in common[split]} for split in splits} for trial in trials]


def _rate(results: Mapping[str, Any], rate: float) -> Cell:
    several = len({trial["learning_rate"] for trial in results["runs"]}) > 1
    return number(rate, text=f"{rate:g}" + (" *" if several and rate == results.get("learning_rate") else ""))


def _each_seed(runs: Numbered) -> Table:
    trials = [(name, record.results, trial) for name, record in runs for trial in record.results["runs"]]
    trials = [one for one in trials if "failed" not in one[2]]
    columns: dict[tuple[str, str], None] = {}
    for _, results, trial in trials:
        splits = [split for split, value in trial.items() if _is_metrics(value)]
        columns |= {(split, results["metric"]): None for split in splits if results["metric"] in trial[split]}
    rows: list[Row] = []
    for name, results, trial in trials:
        step = trial.get("step")
        row = [Cell(name), _rate(results, trial["learning_rate"]), whole(trial["seed"])]
        row.append(whole(step if isinstance(step, int) else None))
        rows.append(row + [number(trial.get(split, {}).get(metric)) for split, metric in columns])
    names = [f"{split} {metric}" for split, metric in columns]
    return Table("Results of each seed", ("run", "learning rate", "seed", "step", *names), rows, "seeds")


def _failures(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    for trial in results["runs"]:
        if "failed" in trial:
            yield f"{name}: seed {trial['seed']} at learning rate {trial['learning_rate']:g} failed: {trial['failed']}"


def best_trial(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the trial of results.json that is its best."""
    best = results.get("best") or {}
    same = ("seed", "learning_rate")
    found = [trial for trial in results.get("runs", ()) if best and all(trial[name] == best.get(name) for name in same)]
    return found[0] if found else None


def reports_of(record: Record) -> list[Mapping[str, Any]]:
    """Return the reports of the best trial, one for each split, see `jaxlm.tasks.metrics.classification`."""
    trial = best_trial(record.results)
    return [] if trial is None else [report for report in trial.get("reports", ()) if isinstance(report, dict)]


def errors_section(runs: Numbered) -> Section | None:
    """Return the confusion matrices and the calibration of the best seed of each run."""
    matrices, bins = list[str](), list[str]()
    for name, record in runs:
        for report in reports_of(record):
            title = f"{name}, {report.get('split')}"
            if table := _confusion_table(title, report):
                matrices.append(_details(f"Confusion matrix of {title}", table_html(table), opened=not matrices))
            if rows := _calibration_rows(report):
                columns = ("probability, from", "to", "examples", "mean probability", "accuracy")
                table = Table(f"Calibration of {title}", columns, rows, headed=False, sortable=False)
                bins.append(_details(f"Calibration of {title}", table_html(table)))
    if not matrices and not bins:
        return None
    content = "<p>Metrics of the best seed of each run.</p>\n" + "".join(matrices)
    splits = calibration_json(runs, [])
    content += "".join(
        f'<figure class="chart reliability" data-split="{escaped(split)}"><h3>Calibration on {escaped(split)}</h3>'
        f'<div class="plot" role="img" aria-label="{escaped(_calibration_sentence(split, lines))}"></div></figure>\n'
        for split, lines in splits.items()
    )
    return Section("errors", "Confusion and calibration", content + "".join(bins))


def _confusion_table(title: str, report: Mapping[str, Any]) -> Table | None:
    matrix, names = report.get("confusion_matrix"), list(report.get("classes", ()))
    if not matrix or len(names) != len(matrix) or len(names) > SHOWN_CLASSES:
        return None
    rows: list[Row] = []
    for name, counts in zip(names, matrix, strict=True):
        total, values = max(sum(counts), 1), report["classes"][name]
        shares = [Cell(f"{count:,}", float(count), share=count / total) for count in counts]
        rows.append([Cell(name), *shares, *(number(values.get(key)) for key in ("precision", "recall", "f1"))])
    columns = ("given label", *(f"predicted {name}" for name in names), "precision", "recall", "F1")
    return Table(f"{title}: examples by given and predicted label", columns, rows, sortable=False)


def _calibration_rows(report: Mapping[str, Any]) -> list[Row]:
    found = report.get("calibration") or []
    return [
        [
            number(k / len(found), text=f"{k / len(found):.3f}"),
            number((k + 1) / len(found), text=f"{(k + 1) / len(found):.3f}"),
            whole(one["examples"]),
            number(one["probability"]),
            number(one["accuracy"]),
        ]
        for k, one in enumerate(found)
        if one["examples"]
    ]


def calibration_json(runs: Numbered, entries: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Return split -> lines of probability and accuracy, of the best seed of each run, for the page's script."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run, (name, record) in enumerate(runs):
        rate = (record.results.get("best") or {}).get("learning_rate")
        own = [k for k, entry in enumerate(entries) if entry.run == run and entry.rate in (rate, None)]
        for report in reports_of(record):
            points = [one for one in report.get("calibration") or () if one["examples"]]
            line = {"entry": own[0] if own else run, "label": name, "x": [one["probability"] for one in points]}
            if points:
                found.setdefault(str(report.get("split")), []).append(line | {"y": [one["accuracy"] for one in points]})
    return found


def _calibration_sentence(split: str, lines: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(line["label"] for line in lines)
    return (
        f"Chart of the accuracy on {split} over the mean probability of the predicted label, in bins, of {names}. On "
        "the diagonal both are equal. The tables below have the numbers."
    )


def predictions_section(runs: Numbered) -> Section | None:
    """Return examples of predictions, wrong ones where the labels are known."""
    parts = list[str]()
    for name, record in runs:
        examples = record.examples
        if examples is None:
            continue
        rows: list[Row] = []
        for line in examples.lines:
            cells = [whole(line["index"]), *(_text(line.get(column)) for column in examples.inputs)]
            cells += [_text(line.get("label"))] if examples.labelled else []
            rows.append([*cells, _text(line["prediction"]), _probability(line)])
        label = ["label"] if examples.labelled else []
        columns = ("index", *examples.inputs, *label, "prediction", "probability")
        trial = f"seed {examples.trial.get('seed')}, learning rate {examples.trial.get('learning_rate')}"
        where = f"{name}, {examples.split}, {trial}"
        if examples.wrong is not None:
            said = f"{where}: {examples.wrong:,} of {examples.total:,} predictions are wrong; the first {len(rows):,}"
        elif examples.labelled:
            said = f"{where}: the largest errors of {examples.total:,} predictions"
        else:
            said = f"{where}: the first {len(rows):,} of {examples.total:,} predictions, without labels"
        parts.append(_details(said, table_html(Table(said, columns, rows, f"predictions-{name}")), opened=not parts))
    if not parts:
        return None
    if not all(record.examples.labelled for _, record in runs if record.examples is not None):
        parts.append(
            "<p>Wrong predictions are found in runs that were trained with <code>--with-inputs</code>, which writes "
            "the gold labels into predictions.jsonl.</p>\n"
        )
    return Section("predictions", "Predictions", "".join(parts))


def _text(value: Any) -> Cell:
    if isinstance(value, float):
        return number(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Cell(shortened(text, LONGEST_TEXT))


def _probability(line: Mapping[str, Any]) -> Cell:
    scores, prediction = line.get("scores"), line["prediction"]
    value = scores.get(prediction) if isinstance(scores, dict) and isinstance(prediction, str) else None
    return number(value, text=digits(value)) if isinstance(value, float) else ABSENT


def _details(summary: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' * opened}><summary>{escaped(summary)}</summary>\n{content}</details>\n"
