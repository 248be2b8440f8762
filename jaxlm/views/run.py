"""View of a run: its progress, its results, and its starts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.bounded_read import read_signed
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import run_config
from jaxlm.models import family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.runs.trees import named_leaves
from jaxlm.text import load_tokenizer
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.validation import metrics_sentence
from jaxlm.views.store import tokenizer_lines
from jaxlm.wording import counted

LANGUAGE_FIGURES = ("perplexity", "word_perplexity", "bits_per_byte")  # of a decoder's validation, beside the loss
CURVE = 10  # lines of a run's metrics that are shown


def run_lines(run: RunDirectory) -> Iterator[str]:
    """Yield the model, data, progress, results and starts of a run."""
    config, saved = run_config(run), run.config
    checkpoints = Checkpoints(run.checkpoints, read_only=True)
    steps = checkpoints.steps()
    published = saved.get("published")
    kind = "pretraining" if isinstance(config, PretrainConfig) else f"fine-tuning on {saved.get('task')}"
    if published is not None:
        kind = f"{published.get('architecture')}, imported"
    model = config.model
    yield f"run {run.name}: {kind}"
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
            figures = {key: line[key] for key in line if key.startswith("validation_") or key in LANGUAGE_FIGURES}
            length = figures.pop("validation_length", None)
            said = metrics_sentence(figures).removeprefix("validation ") + (
                "" if length is None else f", rows of {length}"
            )
            yield f"  {name} validation: step {line['step']:,}, {said}"


def _results_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    results = from_file(path)
    yield f"  results: {counted(len(results['runs']), 'run')}, {results['metric']} first"
    splits = {name: figures for name, figures in results.items() if is_split(figures)}
    width = max(map(len, splits), default=0) + 1
    finished = [run for run in results["runs"] if "failed" not in run]
    seeds = sum(run["learning_rate"] == results["learning_rate"] for run in finished)
    for split, figures in splits.items():
        names = sorted(figures, key=lambda name: (name != results["metric"], name))
        spread = {name: f" ± {figures[name]['std']:.4f}" if seeds > 1 else "" for name in names}
        parts = (f"{name} {figures[name]['mean']:.4f}{spread[name]}" for name in names)
        yield f"    {split:<{width}}{'  '.join(parts)}"
    for run in results["runs"]:
        if "failed" in run:
            yield f"    failed: seed {run['seed']} at learning rate {run['learning_rate']:g}: {run['failed']}"


def is_split(value: Any) -> bool:
    """Return whether a value of results.json holds the metrics of a split."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, dict) for item in value.values())


def from_file(path: Path) -> Any:
    """Return the content of a JSON file of a run. Raises InputError if it is damaged."""
    try:
        return read_signed(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; put it back from a copy") from error
