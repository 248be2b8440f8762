"""Labelled data sets: readers of their files, batches of their examples, and metrics of predictions.

NumPy only; no model is known here, and no JAX is imported until a batch is made. A task names its input form, and its
class is its kind.
"""

from jaxlm.tasks.batches import (
    AlternatingBatches,
    TrainBatches,
    choose_lengths,
    eval_batches,
    standard_sizes,
    steps_of_epochs,
    training_batches,
)
from jaxlm.tasks.custom import CustomConfig
from jaxlm.tasks.encoding import Encoded, Size, empty_row, encode_examples, encode_split
from jaxlm.tasks.examples import Example, SpanExample, Split, TaggedSentence, TaskData
from jaxlm.tasks.input_formats import FORMATS
from jaxlm.tasks.kinds import KINDS
from jaxlm.tasks.metrics.classification import compute_metrics
from jaxlm.tasks.predicted import Predicted, predictions
from jaxlm.tasks.registry import (
    TASKS,
    read_labelled,
    read_rows,
    read_split,
    read_task,
    rows_of_records,
    task_from_json,
    typical_task,
)
from jaxlm.tasks.task import Columns, Task, TaskOptions

__all__ = [
    "FORMATS",
    "KINDS",
    "TASKS",
    "AlternatingBatches",
    "Columns",
    "CustomConfig",
    "Encoded",
    "Example",
    "Predicted",
    "Size",
    "SpanExample",
    "Split",
    "TaggedSentence",
    "Task",
    "TaskData",
    "TaskOptions",
    "TrainBatches",
    "choose_lengths",
    "compute_metrics",
    "empty_row",
    "encode_examples",
    "encode_split",
    "eval_batches",
    "predictions",
    "read_labelled",
    "read_rows",
    "read_split",
    "read_task",
    "rows_of_records",
    "standard_sizes",
    "steps_of_epochs",
    "task_from_json",
    "training_batches",
    "typical_task",
]
