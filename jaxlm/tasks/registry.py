"""Every task by its name, and the reading of a whole task: its parts, its labels, a held-out dev part."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.builtin import BuiltIn
from jaxlm.tasks.catalogue import is_catalogue, read_catalogue
from jaxlm.tasks.codah import CODAH
from jaxlm.tasks.custom import CustomConfig, read_custom
from jaxlm.tasks.files import Errors
from jaxlm.tasks.glue import COLA, MRPC, RTE, SST2, STSB
from jaxlm.tasks.rows import JSON_SUFFIXES, RowReader, collect
from jaxlm.tasks.snli_counterfactual import SNLI_COUNTERFACTUAL
from jaxlm.tasks.task import Example, Split, Task, TaskData, with_scale
from jaxlm.tasks.trec import TREC

BUILT_IN: dict[str, BuiltIn] = {
    entry.task.name: entry for entry in (COLA, SST2, MRPC, STSB, RTE, SNLI_COUNTERFACTUAL, TREC, CODAH)
}
TASKS: dict[str, Task] = {name: entry.task for name, entry in BUILT_IN.items()}
HELD_OUT_SHARE = 0.1


def task_names() -> tuple[str, ...]:
    """What `--task` takes."""
    return (*TASKS, "custom")


def read_task(
    name: str, task_dir: str | None = None, custom: CustomConfig | None = None, *, seed: int = 0
) -> tuple[Task, TaskData]:
    """A task as its data defines it (labels, choices, scale of scores), and its parts.

    Args:
      name: one of `task_names()`.
      task_dir: directory of the task's files, `tfds`, or `tfds:DATA_DIR`; for `custom` where relative files start.
      custom: the columns and files of `custom`.
      seed: of the dev part that is held out where there is none. Runs that are to be compared need the same one, so the
        several seeds of one table share it.

    Raises:
      InputError: an unknown task, a missing directory or file, a bad row; one line that says which.
    """
    if name == "custom":
        if task_dir and is_catalogue(task_dir):
            raise InputError("task custom: reads a user's own files, not TFDS; give --custom.train FILE")
        task, splits = read_custom(custom or CustomConfig(), task_dir)
    elif name in BUILT_IN:
        task, splits = _read_built_in(BUILT_IN[name], task_dir)
    else:
        raise InputError(f"task {name!r}: there is no such task here; there are {', '.join(task_names())}")
    held_out = None
    if "dev" not in splits:
        train, dev, held_out = hold_out(splits["train"], seed)
        splits = {"train": train, "dev": dev} | {part: split for part, split in splits.items() if part != "train"}
    if task.kind == "regression":
        task = with_scale(task, splits["train"].examples)
    return task, TaskData(splits, task.labels, held_out)


def read_labelled(path: Path | str, task: Task, *, errors: Errors = "strict") -> Split:
    """Another labelled file of a task that was read before, for evaluation.

    A TSV, CSV or JSONL with named columns, a label among them; for a built-in task also a file in its own format.
    """
    path = Path(path)
    if task.name in BUILT_IN and path.suffix.lower() not in (*JSON_SUFFIXES, ".csv"):
        return BUILT_IN[task.name].read(path, task, labelled=True)
    reader = RowReader(path, task.columns, quoting=task.quoting, errors=errors, warn_quotes=task.quoting == "none")
    return collect(list(reader), reader, task)


def hold_out(train: Split, seed: int) -> tuple[Split, Split, str]:
    """(train, dev, a sentence about it): a tenth of train set apart by a seed, both in the order of the file.

    Rows with the same texts and choices stay on one side, so that no dev row stands in train too: whole groups of them
    are taken in a random order, those left out that would exceed the tenth (the smallest is taken if all would).
    """
    groups: dict[tuple, list[int]] = {}
    for row, example in enumerate(train.examples):
        groups.setdefault((example.texts, example.choices), []).append(row)
    if len(groups) < 2:
        raise InputError("no dev part is given and train has too few different rows to hold some out; give a dev file")
    wanted = max(1, round(len(train.examples) * HELD_OUT_SHARE))
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed % 2**64))).permutation(len(groups))
    rows_of, chosen = list(groups.values()), set[int]()
    for group in order:
        if len(chosen) + len(rows_of[group]) <= wanted:
            chosen.update(rows_of[group])
    if not chosen:
        chosen.update(sorted(rows_of, key=len)[0])
    dev = tuple(example for row, example in enumerate(train.examples) if row in chosen)
    rest = tuple(example for row, example in enumerate(train.examples) if row not in chosen)
    sentence = (
        f"dev: {len(dev)} of the {len(train.examples)} train rows ({HELD_OUT_SHARE:.0%}) are held out by seed {seed}, "
        "rows with the same texts on one side"
    )
    held = Split(dev, len(dev), (), _empty_fields(dev))
    return dataclasses.replace(train, examples=rest, empty_fields=_empty_fields(rest)), held, sentence


def _read_built_in(entry: BuiltIn, task_dir: str | None) -> tuple[Task, dict[str, Split]]:
    name = entry.task.name
    if not task_dir:
        raise InputError(f"task {name}: no task_dir; give --task-dir the directory of its files, or tfds")
    if is_catalogue(task_dir):
        return entry.task, read_catalogue(entry, task_dir)
    directory = Path(task_dir)
    if not directory.is_dir():
        raise InputError(f"task {name}: {directory} is not a directory; give --task-dir the directory of its files")
    paths = {}
    for part, names in entry.files.items():
        path = next((directory / file for file in names if (directory / file).is_file()), None)
        if path is not None:
            paths[part] = path
        elif part != "test":
            raise InputError(
                f"task {name}: {directory} has no {' or '.join(names)}; give --task-dir the task's directory"
            )
    task = entry.spell(entry.task, paths["train"])
    return task, {part: entry.read(path, task, labelled=part != "test") for part, path in paths.items()}


def _empty_fields(examples: Sequence[Example]) -> int:
    return sum(not text for example in examples for text in (*example.texts, *example.choices))
