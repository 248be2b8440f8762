"""A built-in task's files: where each part stands, what its copy in TFDS is called, and how a file is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxlm.tasks.rows import LabelRule, RowReader, collect
from jaxlm.tasks.task import Split, Task

# GPT-1's fine-tuning settings "for most tasks" (Radford et al. 2018, section 4.1); the length is its position table.
GPT1_PAPER: Mapping[str, float] = {"length": 512, "batch_size": 32, "peak_lr": 6.25e-5, "num_epochs": 3}


def read_table(path: Path, task: Task, *, labelled: bool) -> Split:
    """One TSV of a task whose columns have names, in a header or in `task.headerless`.

    Args:
      labelled: train and dev parts need labels; a test part may lack the column.
    """
    label: LabelRule = "required" if labelled else "optional"
    reader = RowReader(path, task.columns, label=label, quoting=task.quoting, headerless=task.headerless)
    return collect(list(reader), reader, task)


@dataclass(frozen=True)
class Catalogue:
    """A task's copy in TFDS: its name there, texts and label, the label names in the order of their ids, its parts."""

    name: str
    texts: tuple[str, ...]
    label: str = "label"
    label_names: tuple[str, ...] = ()
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"}, hash=False
    )


@dataclass(frozen=True)
class BuiltIn:
    """A task and its sources.

    files: for each part the names its file may have, the first that exists being read; `test` may be absent. A task
    without `dev` here has none, and a share of train is held out. read: reads one of the files. spell: the task with
    its labels as the training file spells them, where copies differ in that.
    """

    task: Task
    files: Mapping[str, tuple[str, ...]]
    catalogue: Catalogue | None = None
    read: Callable[..., Split] = read_table
    spell: Callable[[Task, Path], Task] = lambda task, train_file: task
