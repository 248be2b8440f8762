"""A built-in task's files: where each part stands, what its copy in TFDS is called, and how a file is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlm.tasks.reading.rows import LabelRule, RowReader, collect
from jaxlm.tasks.task import Split, Task

# GPT-1's fine-tuning settings "for most tasks" (Radford et al. 2018, section 4.1); the length is its position table.
GPT1_PAPER: Mapping[str, float] = {"length": 512, "batch_size": 32, "peak_lr": 6.25e-5, "num_epochs": 3}
# BERT's for GLUE: batch 32, three epochs, the best on dev of four rates (Devlin et al. 2019, section 4.1), of which
# this is the one of the original's own examples (README of google-research/bert), as the length is.
BERT_PAPER: Mapping[str, float] = {"length": 128, "batch_size": 32, "peak_lr": 2e-5, "num_epochs": 3}
PAPERS: Mapping[str, Mapping[str, float]] = {"gpt": GPT1_PAPER, "bert": BERT_PAPER}


def papers(**bert: float) -> Mapping[str, Mapping[str, float]]:
    """GPT-1's settings, and BERT's where they differ from those for GLUE."""
    return {"gpt": GPT1_PAPER, "bert": {**BERT_PAPER, **bert}}


def read_table(
    path: Path, task: Task, *, labelled: bool, dropped_labels: tuple[str, ...] = (), drop_short: bool = False
) -> Split:
    """One TSV, CSV or JSONL of a task whose columns have names, in a header or in `task.headerless`.

    Args:
      labelled: train and dev parts need labels; a test part may lack the column. dropped_labels: labels whose rows are
      left out, and counted. drop_short: leave out, and count, rows of a labelled part with a wrong number of columns.
    """
    label: LabelRule = "required" if labelled else "optional"
    reader = RowReader(
        path,
        task.columns,
        label=label,
        quoting=task.quoting,
        headerless=task.headerless,
        short_rows="drop" if drop_short and labelled else "refuse",
    )
    return collect(list(reader), reader, task, dropped_labels=dropped_labels)


@dataclass(frozen=True)
class Catalogue:
    """A task's copy in TFDS: its name there, texts and label, the label names in the order of their ids, its parts.

    splits: part -> the name of a split there, or several; `NAME@SPLIT` is the split of another data set. optional:
    parts that may be missing. read: makes examples of a record where fields do not do; called with the record and the
    data set's name. drops_unlabelled: whether rows without a label are left out of every part (and counted).
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

    files: for each part the names its file (or directory) may have, the first that exists being read; train and the
    dev parts must be there. A task without `dev` here has none, and `held_out_share` of train is held out. read: reads
    one of the files. spell: the task with its labels as the training file spells them, where copies differ in that.
    """

    task: Task
    files: Mapping[str, tuple[str, ...]]
    catalogue: Catalogue | None = None
    read: Callable[..., Split] = read_table
    spell: Callable[[Task, Path], Task] = lambda task, train_file: task
    held_out_share: float = 0.1
