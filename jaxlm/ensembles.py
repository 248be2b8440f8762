"""Several fine-tuned runs as one: their outputs on the same rows, averaged (Devlin et al. 2019, table 2's ensembles).

Probabilities are averaged for classes, choices and tags, numbers for scores, and logits for spans, whose windows are
compared by them. Spans and tags belong to tokens, so such runs must have read the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import from_json
from jaxlm.errors import InputError
from jaxlm.tasks import CustomConfig, Encoded, Split, Task, TaskOptions, encode_examples, read_task
from jaxlm.tasks.loading import standard_lengths
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.labelling import Labelled, label_split, make_label_step
from jaxlm.training.loaded import LoadedRun
from jaxlm.training.run import RunDirectory


@dataclass(frozen=True)
class Opinion:
    """What one run says of each part: the rows as it read them, and its outputs."""

    run: str
    task: Task
    encoded: dict[str, Encoded]
    labelled: dict[str, Labelled]
    reads: tuple[Any, ...]
    """What its rows depend on, where they are windows or pieces."""


def opinion(run: LoadedRun, parts: dict[str, Split], *, mesh: Mesh, batch_size: int) -> Opinion:
    """Label every part with one run."""
    task, config, network = run.tuned("evaluate ensemble")
    limit = config.length or config.model.num_positions
    lengths = standard_lengths(limit)
    step = CompiledStep("evaluation", jax.jit(make_label_step(network)), expected_shapes=len(lengths))
    encoded = {
        part: encode_examples(task, split.examples, run.tokenizer, limit, config.model.kind, part=part)
        for part, split in parts.items()
    }
    labelled = {
        part: label_split(step, run.params, rows, mesh, batch_size=batch_size, lengths=lengths)
        for part, rows in encoded.items()
    }
    return Opinion(run.name, task, encoded, labelled, (run.tokenizer.fingerprint, limit, task.options))


def check_agreement(opinions: Sequence[Opinion]) -> None:
    """Refuse runs of other tasks, and of spans or tags those that read other tokens."""
    first = opinions[0]
    what = lambda task: (task.name, task.kind, task.labels, task.mean, task.deviation)  # noqa: E731
    for other in opinions[1:]:
        if what(other.task) != what(first.task):
            raise InputError(
                f"{other.run} is not of the same task and labels as {first.run}: an ensemble is of one task"
            )
        if first.task.kind in ("span", "tagging") and other.reads != first.reads:
            raise InputError(
                f"{other.run} reads with another tokenizer, length or options than {first.run}: outputs of a "
                f"{first.task.kind} task are averaged token by token, so these must be the same"
            )


def averaged(kind: str, outputs: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """The outputs of all runs as those of one: for each row the mean, or the logarithm of the mean probabilities."""
    rows = [np.stack([np.asarray(row, np.float64) for row in of_runs]) for of_runs in zip(*outputs, strict=True)]
    if kind in ("regression", "span"):
        return [row.mean(axis=0) for row in rows]
    return [np.log(np.maximum(_softmax(row).mean(axis=0), 1e-300)) for row in rows]


def parts_of(runs: Sequence[RunDirectory]) -> dict[str, Split]:
    """The parts that runs were evaluated on, read again from the files of the first.

    InputError where these have changed, where a run was trained on other rows (the others' dev may be among them) or
    imported.
    """
    if imported := [run for run in runs if "published" in run.config]:
        raise InputError(f"{imported[0].path} was imported and has no rows of its own; name a file with --input")
    saved = runs[0].config
    _, data = read_task(
        saved["task"],
        saved["task_dir"],
        None if saved["custom"] is None else from_json(CustomConfig, saved["custom"], "custom"),
        seed=saved["held_out_seed"],
        options=from_json(TaskOptions, saved["options"], "options"),
    )
    for run in runs:
        if run.config["fingerprints"].get("task_data") != data.fingerprint():
            raise InputError(
                f"{run.path} was not trained on the rows that the files of {runs[0].path} hold now; name a file to "
                "label with --input"
            )
    return {part: split for part, split in data.splits.items() if part != "train"}


def _softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)
