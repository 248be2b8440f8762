"""Prediction with a fine-tuned model: outputs in the order of the rows, for any number of rows.

`jaxlm.tasks.metrics.predictions` turns the outputs into predictions and metrics.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxlm.data.batch import ExampleBatch
from jaxlm.inference.rows import run_batches
from jaxlm.tasks import Encoded, Predicted, Task, eval_batches, predictions
from jaxlm.training.task_model import TaskLearner

MAX_DOCUMENT_CHUNKS = 8  # a chunk is extended to the end of a tagged document, up to so many times its size


def make_predict_step(network: TaskLearner, *, embeddings: bool = False) -> Callable[[Any, ExampleBatch], Any]:
    """Return a function (params, batch) -> outputs of the head, embeddings, sum of the task's loss, its weight.

    Embeddings, the vector that the head reads for each row, are None unless asked for.
    """

    def predict_step(params: Any, batch: ExampleBatch) -> Any:
        if embeddings:
            outputs, vectors = network.outputs_and_vectors(params, batch)
        else:
            outputs, vectors = network.outputs(params, batch), None
        return outputs, vectors, network.loss.sum(outputs, batch), network.loss.weight(batch)

    return predict_step


@dataclass(frozen=True)
class SplitPredictions:
    """The outputs of n rows in order, float32, without padding of spans and tags: (outputs,), (C,), (L, 2 or T).

    loss: the mean loss of the task; None without labels. embeddings: the vector of each row, float32 (D,) or (C, D);
    empty unless asked for.
    """

    outputs: list[np.ndarray]
    loss: float | None
    embeddings: list[np.ndarray] = field(default_factory=list)

    def predicted(self, task: Task, encoded: Encoded, threshold: float | None = None) -> tuple[Predicted, dict]:
        """Return the predictions, and the task's metrics with `loss`, empty without labels.

        threshold: as in `jaxlm.tasks.metrics.predictions`.
        """
        found = predictions(task, encoded, self.outputs, threshold=threshold)
        return found, found.metrics | {"loss": float(self.loss or 0.0)} if encoded.labelled else {}


def predict_split(
    step: Callable[[Any, ExampleBatch], Any],
    params: Any,
    encoded: Encoded,
    mesh: Mesh,
    *,
    batch_size: int,
    lengths: Iterable[int] | None = None,
) -> SplitPredictions:
    """Compute the outputs of every row of a split once. step: a compiled `make_predict_step`."""
    found: dict[int, np.ndarray] = {}
    embedded: dict[int, np.ndarray] = {}
    loss, weight = 0.0, 0.0
    batches = eval_batches(encoded, batch_size=batch_size, lengths=None if lengths is None else tuple(lengths))
    with_indices = ((batch.index.tolist(), batch) for batch in batches)
    for indices, (outputs, vectors, batch_loss, batch_weight) in run_batches(step, params, with_indices, mesh):
        for index, row in zip(indices, outputs, strict=True):
            if index >= 0:  # padding of spans and tags is dropped
                found[index] = row[: encoded.longest[index]].copy() if row.ndim > 1 else row
        if vectors is not None:
            embedded |= zip(indices, vectors, strict=True)
        loss += float(batch_loss)
        weight += float(batch_weight)
    ordered, embeddings = (
        [values[index] for index in range(len(encoded))] if values else [] for values in (found, embedded)
    )
    return SplitPredictions(ordered, loss / (weight or 1.0) if encoded.labelled else None, embeddings)


def in_chunks(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` examples; a list is longer, to a limit, if it would split a document."""
    chunk: list[Any] = []
    for example in examples:
        document = getattr(example, "document", None)
        same_document = document is not None and bool(chunk) and chunk[-1].document == document
        if len(chunk) >= size and not (same_document and len(chunk) < MAX_DOCUMENT_CHUNKS * size):
            yield chunk
            chunk = []
        chunk.append(example)
        if len(chunk) >= size and document is None:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def default_batch_size(batch_size: int, mesh: Mesh) -> int:
    """Return `batch_size`, rounded up to a multiple of the devices that share the rows of a batch."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // rows) * rows
