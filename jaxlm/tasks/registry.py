"""All tasks by name, and the reading of a whole task: its splits, its labels, and a held-out dev split."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.reading.lines import Errors
from jaxlm.reading.rows import TextFormat, format_of
from jaxlm.tasks.builtin import BuiltIn, first_file, is_catalogue, read_catalogue
from jaxlm.tasks.custom import CustomConfig, read_custom
from jaxlm.tasks.datasets.choices import CHOICES
from jaxlm.tasks.datasets.classifications import CLASSIFICATIONS
from jaxlm.tasks.datasets.sentiment import SENTIMENT
from jaxlm.tasks.datasets.spans_and_tags import SQUAD, SQUAD2, TAGS
from jaxlm.tasks.datasets.texts import SUMMARIZATION, TRANSLATION
from jaxlm.tasks.examples import Split, TaskData
from jaxlm.tasks.kinds import KINDS
from jaxlm.tasks.task import Columns, Task, TaskOptions
from jaxlm.tasks.text_to_text import LabelledText
from jaxlm.wording import did_you_mean

BUILT_IN: dict[str, BuiltIn] = {
    entry.task.name: entry
    for entry in (*CLASSIFICATIONS, *SENTIMENT, *CHOICES, SQUAD, SQUAD2, *TAGS, TRANSLATION, SUMMARIZATION)
}
TASKS: dict[str, Task] = {name: entry.task for name, entry in BUILT_IN.items()}
HELD_OUT_FRACTION = 0.1
_SAMPLE = 1  # the second word of the seed of samples; that of held-out rows has one word


def task_names() -> tuple[str, ...]:
    """Return the values that `--task` accepts."""
    return (*TASKS, "custom")


# What a kind of task is estimated with where no data is read: two labels, four choices, the nine tags of CoNLL-2003.
_TYPICAL: Mapping[str, Mapping[str, Any]] = {
    "choice": {"labels": ("0", "1", "2", "3"), "num_choices": 4},
    "tagging": {"labels": ("O", *(f"{mark}-{kind}" for kind in ("LOC", "MISC", "ORG", "PER") for mark in "BI"))},
    "span": {},
    "regression": {},
    "text": {},
}


def typical_task(name: str) -> Task:
    """Return a built-in task, or a task of a kind, for measurements without data; its labels are typical ones.

    InputError for another name.
    """
    known = (*TASKS, *KINDS)
    if name not in known:
        hint = did_you_mean(name, known, "choose one of them")
        raise InputError(f"task must be one of {', '.join(known)}, got {name}; {hint}")
    if name in KINDS:
        return KINDS[name](name=name, **_TYPICAL.get(name, {"labels": ("0", "1")}))
    task = TASKS[name]
    return task if task.num_outputs or task.generates else dataclasses.replace(task, **_TYPICAL[task.kind])


def read_task(
    name: str,
    task_dir: str | None = None,
    custom: CustomConfig | None = None,
    *,
    seed: int = 0,
    options: TaskOptions | None = None,
    strict: bool = False,
    sample: int | None = None,
) -> tuple[Task, TaskData]:
    """Return a task as its data defines it (labels, choices, scale of scores), and its splits.

    Args:
      name: one of `task_names()`.
      task_dir: directory of the task's files, `tfds`, or `tfds:DATA_DIR`; for `custom` the directory that relative
        file names refer to.
      custom: the columns and files of `custom`.
      seed: seed of the dev split that is held out where there is none. Runs that are compared need the same seed, so
        all seeds of one table share it.
      options: windows, answers and context, for the tasks that have them; saved with the task.
      strict: True to raise an error that lists answers that are not at their offsets; by default they are counted.
      sample: number of training rows, chosen by `seed` after a dev split was held out; None: all. The labels are those
        of all rows, the scale of scores that of the sample.

    Raises:
      InputError: an unknown task, a missing directory or file, or a bad row, named in one line.
    """
    fraction = HELD_OUT_FRACTION
    if name == "custom":
        if task_dir and is_catalogue(task_dir):
            raise InputError(f"--task-dir must be a directory with task custom, got {task_dir}; give --custom.train")
        task, splits = read_custom(custom or CustomConfig(), task_dir)
    elif name in BUILT_IN:
        task, splits = _read_built_in(BUILT_IN[name], task_dir, options)
        fraction = BUILT_IN[name].held_out_fraction
    else:
        hint = did_you_mean(name, task_names(), "choose one of them")
        raise InputError(f"task must be one of {', '.join(task_names())}, got {name!r}; {hint}")
    if options is not None:
        task = dataclasses.replace(task, options=options)
    splits, held_out = task.checked(splits, strict=strict), None
    if task.selects not in splits:
        place = Path(task_dir or ".") / custom.train if name == "custom" and custom is not None else task_dir
        train, dev, held_out = hold_out(splits["train"], seed, fraction, f"the train split of {place or name}")
        splits = {"train": train, "dev": dev} | {part: split for part, split in splits.items() if part != "train"}
    task = task.with_labels(splits)
    left_out: tuple[Any, ...] = ()
    if sample is not None:
        train, left_out = sampled(splits["train"], sample, seed)
        splits = splits | {"train": train}
    task = task.fitted(splits["train"])
    return task, TaskData(splits, task.labels, held_out, left_out)


def read_labelled(path: Path | str, task: Task, *, errors: Errors = "strict") -> Split:
    """Read another labelled file of a task that was read before, for evaluation.

    The file is a TSV, CSV or JSONL with named columns including the label; for a built-in task also a file in its own
    format.
    """
    path, read = Path(path), task.reads
    if not read.of_tokens and read.name in BUILT_IN and format_of(path, otherwise="tsv") == "tsv":
        return task.converted(BUILT_IN[read.name].read(path, read, labelled=True))
    splits = read.checked({"": read.rows.read(path, read, labelled=True, errors=errors)})
    read.with_labels(splits)
    return task.converted(splits[""])


def read_split(name: str, directory: Path, parts: Sequence[str]) -> tuple[str, Split]:
    """Return the first of some splits that the directory of a built-in task has, its name first; no other one is read.

    InputError without any of them, or for rows without labels.
    """
    entry = BUILT_IN[name]
    for part in parts:
        if (path := first_file(directory, entry.files.get(part, ()))) is not None:
            return part, entry.read(path, entry.spell(entry.task, path), labelled=True)
    names = [file for part in parts for file in entry.files.get(part, ())]
    raise InputError(f"{directory} must have {' or '.join(names)}, got none; give the task's directory, or a file")


def read_rows(
    path: Path | str, task: Task, *, errors: Errors = "strict", form: TextFormat | None = None, keep: bool = False
) -> Iterator[Any]:
    """Yield the unlabelled examples of a file, of a folder of texts or of standard input (`-`), in order.

    The header, or each object's fields, must name the texts (and choices) of `task`, as `task.columns.describe()` lists
    them; other columns, including labels, are ignored. Questions come as `context` and `question`, sentences as
    `tokens` or `text`, or in columns; from standard input both come as JSON lines unless `form` is given.

    form: the format; None: that of the suffix, and of standard input as in `RowReader`. keep: True if examples keep
    their `row`, all fields of the file.

    Raises:
      InputError: a bad row, with file and line number; earlier rows have been yielded.
    """
    yield from task.rows.stream(path, task, errors=errors, form=form, keep=keep)


def rows_of_records(rows: Iterable[Mapping[str, Any]], task: Task, *, keep: bool = False) -> Iterator[Any]:
    """Yield the unlabelled examples of rows that are given as dictionaries by column name; see `read_rows`, also keep.

    Raises:
      InputError: a bad row, with its number from 1.
    """
    unit = "rows: row"
    yield from task.rows.of_records(_checked_rows(rows, unit), unit, task, keep=keep)


def _checked_rows(rows: Iterable[Mapping[str, Any]], unit: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not row:
            raise InputError(f"{unit} {number} must be a dictionary of the row's columns, got {row!r:.80}; correct it")
        yield number, dict(row)


def hold_out(
    train: Split, seed: int, fraction: float = HELD_OUT_FRACTION, name: str = "train"
) -> tuple[Split, Split, str]:
    """Return (train, dev, a sentence about it): a fraction of train held out by a seed, both in file order.

    Rows with the same texts and choices (questions on the same text, sentences of the same document) stay together, so
    that no dev row is also in train. Whole groups of them are taken in a random order, and groups that would exceed the
    fraction are skipped (if all would, the smallest is taken). name: of the training rows in messages.
    """
    groups: dict[Any, list[int]] = {}
    for row, example in enumerate(train.examples):
        groups.setdefault(example.key, []).append(row)
    if len(groups) < 2:
        raise InputError(f"dev must be given, as {name} has too few distinct rows to hold some out; name a dev file")
    target = max(1, round(len(train.examples) * fraction))
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed % 2**64))).permutation(len(groups))
    rows_of, chosen = list(groups.values()), set[int]()
    for group in order:
        if len(chosen) + len(rows_of[group]) <= target:
            chosen.update(rows_of[group])
    if not chosen:
        chosen.update(sorted(rows_of, key=len)[0])
    dev = tuple(example for row, example in enumerate(train.examples) if row in chosen)
    rest = tuple(example for row, example in enumerate(train.examples) if row not in chosen)
    sentence = (
        f"dev: {len(dev):,} of the {len(train.examples):,} train rows ({len(dev) / len(train.examples):.0%}) are held "
        f"out by seed {seed}, rows with the same {train.examples[0].same} together"
    )
    held = Split(dev, len(dev), (), _empty_fields(dev))
    return dataclasses.replace(train, examples=rest, empty_fields=_empty_fields(rest)), held, sentence


def sampled(split: Split, count: int, seed: int) -> tuple[Split, tuple[Any, ...]]:
    """Return a split with `count` random examples and the other examples, both in file order.

    A split that has no more is returned itself. A larger sample of the same seed contains a smaller one.
    """
    total = len(split.examples)
    if count >= total:
        return split, ()
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed % 2**64, _SAMPLE])))
    order = random.permutation(total)
    examples, others = (
        tuple(split.examples[row] for row in sorted(rows.tolist())) for rows in np.split(order, [count])
    )
    note = f"{count:,} of the {total:,} examples are used, chosen by seed {seed}"
    kept = dataclasses.replace(
        split, examples=examples, empty_fields=_empty_fields(examples), notes=(*split.notes, note)
    )
    return kept, others


def _read_built_in(entry: BuiltIn, task_dir: str | None, options: TaskOptions | None) -> tuple[Task, dict[str, Split]]:
    name, task = entry.task.name, entry.task
    if options is not None:
        task = dataclasses.replace(task, options=options)
    if not task_dir:
        raise InputError(f"task {name}: --task-dir must be given; name the directory of its files, or tfds")
    if is_catalogue(task_dir):
        return entry.task, read_catalogue(entry, task_dir)
    directory = Path(task_dir)
    if not directory.is_dir():
        raise InputError(f"task {name}: {directory} is not a directory; give --task-dir the directory of its files")
    paths = entry.find(entry, directory, task)
    task = entry.spell(task, paths["train"])
    known = {part: part == "train" or part.startswith("dev") for part in paths}
    read = dict.fromkeys(paths, entry.read) | {"train": entry.read_train or entry.read}
    return task, {part: read[part](path, task, labelled=known[part]) for part, path in paths.items()}


def _empty_fields(examples: Sequence[Any]) -> int:
    return sum(not text for example in examples for text in example.parts)


def task_from_json(values: Mapping[str, Any]) -> Task:
    """Return the task that `Task.to_json` wrote, also via a JSON file. InputError names missing or unknown fields."""
    if values.get("kind") not in KINDS:
        raise InputError(
            f"task.json: kind must be one of {', '.join(KINDS)}, got {values.get('kind')!r}; read it with the version "
            "that wrote it"
        )
    loaded = {name: _tuples(value) for name, value in values.items()}
    try:
        for name, part in (("columns", Columns), ("options", TaskOptions)):
            if name in loaded:
                loaded[name] = part(**loaded[name])
        if "original" in loaded:
            return LabelledText(**loaded | {"original": task_from_json(loaded["original"])})
        return KINDS[loaded["kind"]](**loaded)
    except TypeError as error:
        raise InputError(f"task.json: {error}; read it with the version that wrote it") from None


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return value
