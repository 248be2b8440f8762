"""The content of a run that a report shows, read from its directory, damaged parts as sentences.

A run that is being trained has no results yet and may have an incomplete last line in a file; it is read as far as it
is complete. Of the examples of its predictions the wrong ones come first, where the gold labels are known.
"""

import functools
import itertools
import json
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxlm.errors import InputError, one_line
from jaxlm.evaluation.zero_shot import RESULTS, read_results
from jaxlm.files import open_regular, parse_json, read_object, read_own, read_regular
from jaxlm.inference.loaded_run import run_config, saved_task, split_run
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.tasks import Task
from jaxlm.views.curves import Curve, Trial, curves_by_trial, main_metrics, mean_curve
from jaxlm.views.run import Summary, full_config, kind_in_words

TRIAL = ("seed", "learning_rate")
NOT_INPUTS = {"split", "index", *TRIAL, "prediction", "scores", "label"}
log = logging.getLogger(__name__)
T = TypeVar("T")
DAMAGE = (InputError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
SAMPLES = ("samples.jsonl", "samples.txt")  # of a run's directory: output of jaxlm.generate
LONGEST_SAMPLES = 1 << 20  # bytes


@dataclass(frozen=True)
class Examples:
    """Predictions of one trial on one split.

    lines: as in predictions.jsonl, at most the requested number. total: all of the split. wrong: those that differ
    from their label; None if the lines have no labels or are numbers, of which those with the largest error are shown.
    """

    split: str
    trial: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    total: int
    wrong: int | None

    @property
    def inputs(self) -> list[str]:
        """The names of the columns of the rows."""
        return list(dict.fromkeys(name for line in self.lines for name in line if name not in NOT_INPUTS))

    @property
    def labelled(self) -> bool:
        """True if the lines have labels."""
        return any("label" in line for line in self.lines)


def read_examples(
    lines: Iterable[Mapping[str, Any]], task: Task | None, best: Mapping[str, Any] | None, count: int
) -> Examples | None:
    """Return the first `count` wrong predictions, or the first ones without labels; None of an empty file.

    They are those of the best trial, by default the first of the file, on the split that selects, by default the first.
    Raises KeyError or TypeError for lines of another kind.
    """
    kept: list[Mapping[str, Any]] = []
    trial, split = best and {name: best[name] for name in TRIAL}, task and task.selects
    for line in lines:
        int(line["index"]), line["prediction"]
        trial = trial or {name: line.get(name) for name in TRIAL}
        split = split or line["split"]
        if line["split"] == split and all(line.get(name) == value for name, value in trial.items()):
            kept.append(line)
    if not kept or trial is None:
        return None
    given = [line for line in kept if line.get("label") is not None]
    if not given:
        return Examples(str(split), trial, kept[:count], len(kept), None)
    if all(isinstance(line["prediction"], int | float) for line in given):
        ordered = sorted(given, key=lambda line: -abs(float(line["prediction"]) - float(line["label"])))
        return Examples(str(split), trial, ordered[:count], len(kept), None)
    is_right = operator.eq if task is None else task.is_right
    wrong = [line for line in given if not is_right(line["prediction"], line["label"])]
    return Examples(str(split), trial, wrong[:count], len(kept), len(wrong))


@dataclass(frozen=True)
class Clock:
    """Tokens and hours of training at some steps. steps: int (n,), increasing. tokens, hours: float (n,).

    Tokens count every position of the batches. Hours leave out evaluation and compilation, as the logged speed does; of
    trials that are trained together each has its share.
    """

    steps: np.ndarray
    tokens: np.ndarray
    hours: np.ndarray


@dataclass(frozen=True)
class Record:
    """A run. summary: its name, config and results.json, and the means of its main curves.

    kind: the kind in words. main: names of the metrics that are shown first. curves: metric -> trial -> curve.
    clock: None without logged tokens. resumed: steps at which it was resumed. zero_shot: lines of zero_shot.jsonl.
    problems: sentences about damaged parts.
    """

    summary: Summary
    kind: str
    main: Sequence[str] = ()
    curves: Mapping[str, Mapping[Trial, Curve]] = field(default_factory=dict)
    clock: Clock | None = None
    starts: Sequence[Mapping[str, Any]] = ()
    resumed: Sequence[int] = ()
    samples: Sequence[str] = ()
    examples: Examples | None = None
    zero_shot: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The directory or URL as given."""
        return self.summary.name

    @property
    def results(self) -> Mapping[str, Any]:
        """Content of results.json, or an empty dictionary."""
        return self.summary.results

    @property
    def last_step(self) -> int:
        """The last step with a training loss, 0 without one."""
        return max((int(curve.steps[-1]) for curve in self.curves.get("loss", {}).values()), default=0)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of an evaluation: a JSON object that jaxlm.evaluate wrote."""

    name: str
    values: Mapping[str, Any]


def read_targets(targets: Sequence[str], count: int) -> tuple[list[Record], list[Evaluation], list[str]]:
    """Return runs, evaluations, and sentences about those that cannot be read.

    targets: run directories, RUN@STEP, URLs of runs, or .json files of jaxlm.evaluate. count: examples and samples of
    each run. InputError for a target that does not exist or is something else, and if none can be read.
    """
    records, evaluations, problems = list[Record](), list[Evaluation](), list[str]()
    for target in dict.fromkeys(targets):
        if target.endswith(".json") and Path(target).is_file():
            values = _attempt(problems, f"{target} cannot be read", functools.partial(read_object, Path(target)))
            evaluations += [] if values is None else [Evaluation(target, values)]
            continue
        run = RunDirectory(split_run(target)[0])
        if not (run.path / "config.json").exists():
            _ = run.config  # raises the InputError of a directory that is not a run
        record = _attempt(problems, f"{run.name} cannot be shown", functools.partial(read_record, run, count))
        records += [] if record is None else [record]
    problems += [problem for record in records for problem in record.problems]
    if not records and not evaluations:
        raise InputError(problems[0])
    for problem in problems:
        log.warning("%s", problem)
    return records, evaluations, problems


def read_record(run: RunDirectory, count: int) -> Record:
    """Return a run as far as it can be read. Raises InputError if its config.json is damaged."""
    config, problems = run_config(run), list[str]()

    def part(file: str, read: Callable[[], T]) -> T | None:
        return _attempt(problems, f"{run.name}: {file} is left out", read) if (run.path / file).exists() else None

    lines = part("metrics.jsonl", lambda: list(read_metrics(run.path / "metrics.jsonl"))) or []
    task = part("task.json", lambda: saved_task(run))
    results = part("results.json", lambda: _checked_results(read_own(run.path / "results.json"))) or {}
    main = main_metrics(task)
    curves = part("metrics.jsonl", lambda: curves_by_trial(lines)) or {}
    of_main = {name: mean_curve(list(curves[name].values())) for name in main if name in curves}
    starts = [start for start in part("starts.jsonl", run.starts) or [] if isinstance(start, dict)]
    examples = part("predictions.jsonl", lambda: _examples(run, task, results, count))
    clock = _attempt(problems, f"{run.name}: its tokens and hours are left out", lambda: _clock(lines))
    zero_shot = part(RESULTS, lambda: _checked_zero_shot(run.path / RESULTS)) or []
    samples = list[str]()
    for file in SAMPLES:
        samples += part(file, functools.partial(_samples, run.path / file, count)) or []
    trained = [f"step {line['step']}: {line['sample']['text']}" for line in lines if "sample" in line]
    return Record(
        Summary(run.name, full_config(run), of_main, results),
        kind_in_words(run, config),
        main,
        curves,
        clock,
        starts,
        [step for start in starts if (step := _resumed_at(start)) is not None],
        samples[:count] + trained[-count:],
        examples,
        zero_shot,
        list(dict.fromkeys(problems)),
    )


def _attempt(problems: list[str], what: str, read: Callable[[], T]) -> T | None:
    """Return what `read` returns; after an error of damaged content, note it and return None."""
    try:
        return read()
    except DAMAGE as error:
        reason = str(error) if isinstance(error, InputError) else f"it is damaged ({type(error).__name__}: {error})"
        problems.append(one_line(f"{what}: {reason}"))
        return None


def _checked_results(results: Any) -> dict[str, Any]:
    """Return results.json. Raises KeyError or TypeError if it lacks what the report reads."""
    for trial in results["runs"]:
        float(trial["learning_rate"]), int(trial["seed"])
        for report in trial.get("reports", ()):
            _check_report(report)
    best = results.get("best", {"seed": 0, "learning_rate": 0.0})
    str(results["task"]), str(results["metric"]), best["seed"], best["learning_rate"]
    return dict(results)


def _check_report(report: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError unless a split's report has what its tables show."""
    for counts in report.get("confusion_matrix", ()):
        sum(counts)
    for metrics in report.get("classes", {}).values():
        [float(metrics[name]) for name in ("precision", "recall", "f1")]
    for one in report.get("calibration", ()):
        if int(one["examples"]):
            float(one["accuracy"]), float(one["probability"])


def _checked_zero_shot(path: Path) -> list[dict[str, Any]]:
    """Return the lines of whole tasks in zero_shot.jsonl with numbers. Raises if they are damaged."""
    lines = [line for line in read_results(path) if line["step"] is not None and "paradigm" not in line]
    return [
        line | {"step": int(line["step"]), "value": float(line["value"]), "stderr": float(line["stderr"])}
        for line in lines
        if "field" not in line
    ]


def _resumed_at(start: Mapping[str, Any]) -> int | None:
    before, _, step = str(start.get("started_from")).rpartition("resumed at step ")
    return int(step) if not before and step.isdecimal() else None


def _clock(lines: Sequence[Mapping[str, Any]]) -> Clock | None:
    """Return the tokens and hours at the logged steps, means over the trials, or None where they are not logged."""
    found = curves_by_trial(lines, ["tokens_per_second", "trained_tokens"])
    if len(found) < 2:
        return None
    speed = mean_curve(list(found["tokens_per_second"].values()))
    usable = speed.values > 0
    steps = np.array([0, *speed.steps[usable]])
    logged = mean_curve(list(found["trained_tokens"].values()))
    tokens = np.interp(steps, [0, *logged.steps], [0.0, *logged.values])
    hours = np.cumsum([0.0, *(np.diff(tokens) / speed.values[usable] / 3600)])
    return Clock(steps, tokens, hours)


def _examples(run: RunDirectory, task: Task | None, results: Mapping[str, Any], count: int) -> Examples | None:
    with open_regular(run.path / "predictions.jsonl") as file:
        complete = (line for line in file if line.endswith(b"\n"))
        return read_examples(map(parse_json, complete), task, results.get("best"), count)


def _samples(path: Path, count: int) -> list[str]:
    """Return the texts of a file of samples: JSONL as jaxlm.generate writes it, or its standard output as one text."""
    text = read_regular(path, LONGEST_SAMPLES).decode(errors="replace")
    if path.suffix == ".txt":
        return [text.strip()] if text.strip() else []
    # Not splitlines(), which also breaks at separators that a text may hold, such as U+2028.
    lines = itertools.islice((line for line in text.split("\n") if line.strip()), count)
    return [str(json.loads(line)["text"]) for line in lines]
