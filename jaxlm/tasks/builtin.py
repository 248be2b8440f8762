"""Sources of a built-in task: the file of each split, the reader of a file, and the copy in TFDS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.reading.rows import format_of
from jaxlm.tasks.examples import Split
from jaxlm.tasks.row_reader import LabelRule, RowReader, collect
from jaxlm.tasks.task import Task

# GPT-1's fine-tuning settings "for most tasks" (Radford et al. 2018, section 4.1); the length is its position table.
GPT1_PAPER: Mapping[str, float] = {"length": 512, "batch_size": 32, "peak_lr": 6.25e-5, "num_epochs": 3}
# BERT's for GLUE: batch 32, three epochs, the best on dev of four learning rates (Devlin et al. 2019, section 4.1).
# This learning rate and the length are those of the original's own examples (README of google-research/bert).
BERT_PAPER: Mapping[str, float] = {"length": 128, "batch_size": 32, "peak_lr": 2e-5, "num_epochs": 3}
PAPERS: Mapping[str, Mapping[str, float]] = {"gpt1": GPT1_PAPER, "bert": BERT_PAPER}
TABLES: Mapping[str, tuple[str, ...]] = {part: (f"{part}.tsv",) for part in ("train", "dev", "test")}
"""The files of a task whose splits are TSVs by their own names."""


def papers(**bert: float) -> Mapping[str, Mapping[str, float]]:
    """Return GPT-1's settings, and BERT's with the changes in `bert` to those for GLUE."""
    return {"gpt1": GPT1_PAPER, "bert": {**BERT_PAPER, **bert}}


def read_table(
    path: Path, task: Task, *, labelled: bool, dropped_labels: tuple[str, ...] = (), drop_short: bool = False
) -> Split:
    """Read a TSV, CSV or JSONL of a task whose columns have names, in a header or in `task.headerless`.

    Args:
      labelled: True if labels are required, as in train and dev splits; a test split may lack the column.
      dropped_labels: labels whose rows are dropped and counted.
      drop_short: True to drop and count rows of a labelled split with a wrong number of columns.
    """
    label: LabelRule = "required" if labelled else "optional"
    reader = RowReader(
        path,
        task.columns,
        label=label,
        quoting=task.quoting,
        headerless=task.headerless,
        short_rows="drop" if drop_short and labelled else "refuse",
        form=format_of(path, otherwise="tsv"),
    )
    return collect(list(reader), reader, task, dropped_labels=dropped_labels)


@dataclass(frozen=True)
class Catalogue:
    """A task's copy in TFDS: its name, its text and label features, its label names in id order, and its splits.

    splits: split -> the name of a TFDS split, or several; `NAME@SPLIT` is the split of another data set. optional:
    splits that may be missing. read: converts a record to examples where `texts` and `label` do not suffice; called
    with the record and the data set's name. drops_unlabelled: True if unlabelled rows of every split are dropped and
    counted.
    """

    name: str
    texts: tuple[str, ...] = ()
    label: str = "label"
    label_names: tuple[str, ...] = ()
    drops_unlabelled: bool = False
    optional: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any], str], list[Any]] | None = None
    splits: Mapping[str, str | tuple[str, ...]] = field(
        default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"}, hash=False
    )


@dataclass(frozen=True)
class BuiltIn:
    """A task and its sources.

    files: for each split the names that its file (or directory) may have; the first that exists is read. Train and dev
    splits are required. A task without `dev` here holds out `held_out_fraction` of train. read: reads one of the files.
    spell: returns the task with its labels as the training file spells them, for tasks whose copies differ in that.
    """

    task: Task
    files: Mapping[str, tuple[str, ...]]
    catalogue: Catalogue | None = None
    read: Callable[..., Split] = read_table
    spell: Callable[[Task, Path], Task] = lambda task, train_file: task
    held_out_fraction: float = 0.1
