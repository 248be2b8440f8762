"""Labelled data sets: readers of their files, batches of their examples, and metrics of predictions.

NumPy only; no model is known here. A task names its input form and the kind of its head. The names below are imported
on first use: batches need JAX, for its pytrees, and a command line is parsed without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlm.tasks.batching import FORMATS, format_for
    from jaxlm.tasks.batching.batches import (
        TrainBatches,
        choose_lengths,
        eval_batches,
        standard_lengths,
        steps_of_epochs,
        train_batches,
    )
    from jaxlm.tasks.batching.encoded_split import Encoded, EncodedSplit
    from jaxlm.tasks.batching.encoding import encode_examples, encode_split
    from jaxlm.tasks.custom import CustomConfig
    from jaxlm.tasks.examples import Example, SpanExample, Split, TaggedSentence, TaskData
    from jaxlm.tasks.metrics.classification import compute_metrics
    from jaxlm.tasks.metrics.predicted import Predicted
    from jaxlm.tasks.metrics.predictions import predictions
    from jaxlm.tasks.options import TaskOptions
    from jaxlm.tasks.registry import (
        TASKS,
        read_labelled,
        read_rows,
        read_split,
        read_task,
        rows_of_records,
        task_names,
    )
    from jaxlm.tasks.task import Columns, Task

__all__ = [
    "FORMATS",
    "TASKS",
    "Columns",
    "CustomConfig",
    "Encoded",
    "EncodedSplit",
    "Example",
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
    "format_for",
    "predictions",
    "read_labelled",
    "read_rows",
    "read_split",
    "read_task",
    "rows_of_records",
    "standard_lengths",
    "steps_of_epochs",
    "task_names",
    "train_batches",
]

_MODULES = {
    "Columns": "task",
    "CustomConfig": "custom",
    "Encoded": "batching.encoded_split",
    "EncodedSplit": "batching.encoded_split",
    "Example": "examples",
    "FORMATS": "batching",
    "Predicted": "metrics.predicted",
    "SpanExample": "examples",
    "Split": "examples",
    "TASKS": "registry",
    "TaggedSentence": "examples",
    "Task": "task",
    "TaskData": "examples",
    "TaskOptions": "options",
    "TrainBatches": "batching.batches",
    "choose_lengths": "batching.batches",
    "compute_metrics": "metrics.classification",
    "encode_examples": "batching.encoding",
    "encode_split": "batching.encoding",
    "eval_batches": "batching.batches",
    "format_for": "batching",
    "predictions": "metrics.predictions",
    "read_labelled": "registry",
    "read_rows": "registry",
    "read_split": "registry",
    "read_task": "registry",
    "rows_of_records": "registry",
    "standard_lengths": "batching.batches",
    "steps_of_epochs": "batching.batches",
    "task_names": "registry",
    "train_batches": "batching.batches",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxlm.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxlm.tasks.{_MODULES[name]}"), name)
