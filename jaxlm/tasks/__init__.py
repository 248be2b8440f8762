"""Labelled data sets: how their files are read, how examples become batches, and how predictions are judged.

NumPy only; no model is known here. A task names the form of its input and the kind of its head.
"""

from jaxlm.tasks.custom import CustomConfig
from jaxlm.tasks.inputs import ROLES, gpt1_sequences
from jaxlm.tasks.loading import (
    EncodedSplit,
    TrainBatches,
    choose_lengths,
    encode_examples,
    encode_split,
    eval_batches,
    num_eval_batches,
    standard_lengths,
    train_batches,
)
from jaxlm.tasks.metrics import compute_metrics
from jaxlm.tasks.registry import TASKS, read_labelled, read_task, task_names
from jaxlm.tasks.rows import read_rows
from jaxlm.tasks.task import Columns, Example, Split, Task, TaskData

__all__ = [
    "ROLES",
    "TASKS",
    "Columns",
    "CustomConfig",
    "EncodedSplit",
    "Example",
    "Split",
    "Task",
    "TaskData",
    "TrainBatches",
    "choose_lengths",
    "compute_metrics",
    "encode_examples",
    "encode_split",
    "eval_batches",
    "gpt1_sequences",
    "num_eval_batches",
    "read_labelled",
    "read_rows",
    "read_task",
    "standard_lengths",
    "task_names",
    "train_batches",
]
