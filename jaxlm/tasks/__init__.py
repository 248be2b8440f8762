"""Labelled data sets: readers of their files, batches of their examples, and metrics of predictions.

NumPy only; no model is known here. A task names its input form and the kind of its head.
"""

from jaxlm.tasks.batching.batches import (
    TrainBatches,
    choose_lengths,
    eval_batches,
    standard_lengths,
    steps_of_epochs,
    train_batches,
)
from jaxlm.tasks.batching.bert_inputs import ENCODER_ROLES
from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
from jaxlm.tasks.batching.encoding import encode_examples, encode_split
from jaxlm.tasks.batching.gpt1_inputs import ROLES
from jaxlm.tasks.custom import CustomConfig
from jaxlm.tasks.examples import Example, SpanExample, Split, TaggedSentence, TaskData
from jaxlm.tasks.metrics.classification import compute_metrics
from jaxlm.tasks.metrics.predicted import Predicted
from jaxlm.tasks.metrics.predictions import predictions
from jaxlm.tasks.options import TaskOptions
from jaxlm.tasks.registry import TASKS, read_labelled, read_rows, read_task, rows_of_records, task_names
from jaxlm.tasks.task import Columns, InputFormat, Task

__all__ = [
    "ENCODER_ROLES",
    "ROLES",
    "TASKS",
    "Columns",
    "CustomConfig",
    "Encoded",
    "EncodedSplit",
    "Example",
    "InputFormat",
    "Predicted",
    "SpanExample",
    "Split",
    "TaggedSentence",
    "Task",
    "TaskData",
    "TaskOptions",
    "TrainBatches",
    "choose_lengths",
    "compute_metrics",
    "encode_examples",
    "encode_split",
    "eval_batches",
    "predictions",
    "read_labelled",
    "read_rows",
    "read_task",
    "rows_of_records",
    "standard_lengths",
    "steps_of_epochs",
    "task_names",
    "train_batches",
]
