"""View of a run: its progress, its results, and its starts; and of several runs side by side.

Side by side are what differs in their configs, their metrics, and their losses as bars.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.config import to_json
from jaxlm.files import read_own
from jaxlm.inference.loaded_run import run_config
from jaxlm.models import family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.config import CONTENTS, differing, flat, shown
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.runs.trees import named_leaves
from jaxlm.text import load_tokenizer
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.validation import metrics_sentence
from jaxlm.views.curves import Curve, curves_of, save_plot, text_curve
from jaxlm.views.data import tokenizer_lines
from jaxlm.wording import counted

LANGUAGE_METRICS = ("perplexity", "word_perplexity", "bits_per_byte")  # of a decoder's validation, besides the loss
CURVE = 10  # lines of a run's metrics that are shown
LONGEST = 40  # characters of a value in a table, and of the differences in a label
WIDEST = 48  # bars of a curve
DERIVED = ("start_trained_length", "fingerprints.data_order")  # fields that no flag sets


def run_lines(run: RunDirectory) -> Iterator[str]:
    """Yield the model, data, progress, results and starts of a run."""
    config, saved = run_config(run), run.config
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    steps = checkpoints.steps()
    published, model = saved.get("published"), config.model
    yield f"run {run.name}: {kind_in_words(run, config)}"
    sizes = f"{counted(model.num_layers, 'layer')} x {model.width}"
    sizes += "".join(f", {getattr(model, name)} {word}" for name, word in family_of(model).other_sizes.items())
    if steps:
        params = named_leaves(checkpoints.metadata(steps[-1]).tree["params"])
        sizes += f", {sum(int(np.prod(leaf.shape)) for leaf in params.values()):,} parameters"
    yield f"  model: {sizes}, vocabulary {model.vocab_size:,}"
    if published is None:
        yield from _training_lines(config, saved)
    yield f"  checkpoints at steps: {', '.join(map(str, steps))}" if steps else "  checkpoints: none yet"
    if run.tokenizer.exists():
        yield from tokenizer_lines(load_tokenizer(run.tokenizer))
    lines = list(read_metrics(run.path / "metrics.jsonl")) if (run.path / "metrics.jsonl").exists() else []
    if published is None:
        yield from _metrics_lines(lines, config.num_steps)
    yield from _results_lines(run.path / "results.json")
    starts = run.starts()
    yield counted(len(starts), "start")
    for start in starts:
        devices, commit = start.get("devices", {}), (start.get("commit") or "no commit")[:12]
        yield (
            f"  {start.get('time')}  {start.get('started_from') or 'from scratch'}, {devices.get('count')} x "
            f"{devices.get('kind')}, {commit}"
        )
        yield f"    {start.get('command')}"


def kind_in_words(run: RunDirectory, config: PretrainConfig | FinetuneConfig) -> str:
    """Return the kind of a run in words, with its task or its published class."""
    if (published := run.config.get("published")) is not None:
        return f"{published.get('architecture')}, imported"
    return "pretraining" if isinstance(config, PretrainConfig) else f"fine-tuning on {run.config.get('task')}"


def is_split(value: Any) -> bool:
    """Return True if a value of results.json holds the metrics of a split."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, dict) for item in value.values())


@dataclass(frozen=True)
class Summary:
    """A run to compare: its config with dotted names, its curves, and its results.json or an empty dictionary."""

    name: str
    config: Mapping[str, Any]
    curves: Mapping[str, Curve]
    results: Mapping[str, Any]


def comparison_lines(runs: Sequence[RunDirectory]) -> Iterator[str]:
    """Yield the runs by number, the fields that differ, the last and best metrics, and the training losses as bars."""
    summaries = [summary_of(run) for run in runs]
    yield from (f"{number}  {one.name}" for number, one in enumerate(summaries, 1))
    yield from _table("fields that differ", differing_values(summaries), len(runs))
    if not differing_fields(summaries):
        yield "the configs are equal"
    yield from _table("metrics", _metrics(summaries), len(runs))
    curves = [(number, one.curves["loss"]) for number, one in enumerate(summaries, 1) if "loss" in one.curves]
    if curves:
        losses = np.concatenate([curve.values for _, curve in curves])
        bounds, last = (float(losses.min()), float(losses.max())), max(int(curve.steps[-1]) for _, curve in curves)
        width = min(WIDEST, max(len(curve.steps) for _, curve in curves))
        yield f"loss of training, steps 1 to {last:,}, from {bounds[0]:.4g} to {bounds[1]:.4g}"
        yield from (f"  {number}  {text_curve(curve, last, bounds, width)}" for number, curve in curves)


def plot_runs(runs: Sequence[RunDirectory], path: Path) -> str:
    """Write a plot of the curves of runs, labelled by what differs, and return a line about it."""
    summaries = [summary_of(run) for run in runs]
    save_plot(dict(zip(labels(summaries), (one.curves for one in summaries), strict=True)), path)
    return f"{path}: curves of {counted(len(runs), 'run')}"


def summary_of(run: RunDirectory) -> Summary:
    """Read what is compared of a run. Raises InputError if it is not a run or is damaged."""
    return Summary(run.name, full_config(run), curves_of(run), read_own(run.path / "results.json"))


def full_config(run: RunDirectory) -> dict[str, Any]:
    """Return the config of a run by dotted names, with the fields that its version did not have."""
    return flat({**run.config, **to_json(run_config(run))})


def differing_fields(summaries: Sequence[Summary]) -> list[str]:
    """Return the dotted names of the fields in which the runs differ.

    Of runs of different kinds, or of imported and trained ones, only the fields that all have are compared.
    """
    first, *others = (one.config for one in summaries)
    names = sorted({name for other in others for name in differing(first, other)})
    if len({(one.config.get("kind"), "published.architecture" in one.config) for one in summaries}) > 1:
        names = [name for name in names if all(name in one.config for one in summaries)]
    return [name for name in names if name not in DERIVED]


def differing_values(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return the fields in which the runs differ, with the value of each run as a text."""
    values = {name: _values(summaries, name) for name in differing_fields(summaries)}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def labels(summaries: Sequence[Summary]) -> list[str]:
    """Return a distinct label per run: the fields that differ, or its name where they are too long or not enough."""
    fields = [name for name in differing_fields(summaries) if name not in CONTENTS]
    found = [", ".join(f"{name.split('.')[-1]} {_short(one.config, name)}" for name in fields) for one in summaries]
    if "" not in found and len(set(found)) == len(found) and max(map(len, found)) <= LONGEST:
        return found
    names = [one.name for one in summaries]
    return names if len(set(names)) == len(names) else [f"{name} ({n})" for n, name in enumerate(names, 1)]


def _training_lines(config: PretrainConfig | FinetuneConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    optimizer = config.optimizer
    yield (
        f"  training: batch {config.batch_size} x {config.length}, {optimizer.kind}, learning rate "
        f"{optimizer.peak_lr:g}, warmup {optimizer.warmup:g}, decay {optimizer.decay}, seed {config.seed}"
    )
    if isinstance(config, PretrainConfig):
        yield f"  data: {', '.join(config.data.store)}; validation: {', '.join(config.data.validation) or 'none'}"
    else:
        yield f"  start: {saved.get('start') or 'from scratch'}; seeds: {saved.get('seeds')}"


def _metrics_lines(lines: Sequence[dict[str, Any]], num_steps: int | None) -> Iterator[str]:
    training = [line for line in lines if "loss" in line]
    if not training:
        yield "  no logged steps"
        return
    last = training[-1]
    total = f" of {num_steps:,}" if num_steps else ""
    speed = f", {last['tokens_per_second']:,.0f} tokens/s" if last.get("tokens_per_second") else ""
    yield f"  step {last['step']:,}{total}: loss {last['loss']:.4f}{speed}"
    for line in (training[k] for k in np.unique(np.linspace(0, len(training) - 1, CURVE).astype(int))):
        seed = f" seed {line['seed']}" if "seed" in line else ""
        rate = line.get("learning_rate", 0)
        yield f"    step {line['step']:>8,}{seed}  loss {line['loss']:8.4f}  learning rate {rate:.3g}"
    validation = [line for line in lines if "validation_loss" in line]
    if validation:
        best = min(validation, key=lambda line: line["validation_loss"])
        for name, line in (("best", best), ("last", validation[-1])):
            metrics = {key: line[key] for key in line if key.startswith("validation_") or key in LANGUAGE_METRICS}
            length = metrics.pop("validation_length", None)
            said = metrics_sentence(metrics).removeprefix("validation ") + (
                "" if length is None else f", rows of {length}"
            )
            yield f"  {name} validation: step {line['step']:,}, {said}"


def _results_lines(path: Path) -> Iterator[str]:
    if not (results := read_own(path)):
        return
    yield f"  results: {counted(len(results['runs']), 'run')}, {results['metric']} first"
    splits = {name: metrics for name, metrics in results.items() if is_split(metrics)}
    width = max(map(len, splits), default=0) + 1
    for split, metrics in splits.items():
        names = sorted(metrics, key=lambda name: (name != results["metric"], name))
        parts = (f"{name} {_result(results, split, name)}" for name in names)
        yield f"    {split:<{width}}{'  '.join(parts)}"
    for run in results["runs"]:
        if "failed" in run:
            yield f"    failed: seed {run['seed']} at learning rate {run['learning_rate']:g}: {run['failed']}"


def _values(summaries: Sequence[Summary], name: str) -> list[str]:
    """Return the values of a field. Hashes of contents are shown as letters, equal ones as the same letter."""
    values = [shown(one.config, name) for one in summaries]
    if name not in CONTENTS:
        return [_short(one.config, name) for one in summaries]
    known = list(dict.fromkeys(value for value in values if value not in ("absent", "null")))
    return ["-" if value not in known else chr(ord("A") + known.index(value)) for value in values]


def _short(config: Mapping[str, Any], name: str) -> str:
    text = shown(config, name).strip('"') if name in config else "-"
    return text if len(text) <= LONGEST else f"…{text[-LONGEST + 1 :]}"


def _metrics(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return the rows of metrics: the last and the best of each curve, and the means of results.json."""
    rows: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for one in summaries for name in one.curves):
        curves = [one.curves.get(name) for one in summaries]
        rows[f"{name}, last"] = [_at(curve, -1) for curve in curves]
        if name != "loss":
            rows[f"{name}, best"] = [_at(curve, None if curve is None else curve.best(name)) for curve in curves]
    splits = dict.fromkeys(name for one in summaries for name, value in one.results.items() if is_split(value))
    for split in splits:
        metrics = dict.fromkeys(one.results["metric"] for one in summaries if is_split(one.results.get(split)))
        for metric in metrics:
            rows[f"results: {split} {metric}"] = [_result(one.results, split, metric) for one in summaries]
    return rows


def _at(curve: Curve | None, index: int | None) -> str:
    if curve is None or index is None:
        return "-"
    return f"{curve.values[index]:.4f} at {curve.steps[index]:,}"


def _result(results: Mapping[str, Any], split: str, metric: str) -> str:
    """Return a mean of results.json, with the standard deviation of several seeds at the selected learning rate."""
    value = results.get(split, {}).get(metric)
    if value is None:
        return "-"
    rate = results.get("learning_rate")
    several = sum("failed" not in run and run["learning_rate"] == rate for run in results["runs"]) > 1
    return f"{value['mean']:.4f}" + (f" ± {value['std']:.4f}" if several else "")


def _table(title: str, rows: Mapping[str, Sequence[str]], count: int) -> Iterator[str]:
    """Yield a table with a column per run, if it has rows."""
    if not rows:
        return
    lines = [(title, *map(str, range(1, count + 1))), *((f"  {name}", *values) for name, values in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
