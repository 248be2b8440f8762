"""Labelling examples with a fine-tuned model: outputs in the order of the rows, for any number of them.

How a model's numbers become predictions and figures is the task's business (`jaxlm.tasks.metrics.predictions`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import host_rows, to_devices
from jaxlm.objectives.task import loss_weight, task_loss
from jaxlm.tasks import Encoded, Predicted, Task, eval_batches, predictions
from jaxlm.training.task_model import TaskLearner

DOCUMENT_SHARE = 8  # a document of tagged sentences is read on to its end, up to so many times what is read at a time


def make_label_step(network: TaskLearner) -> Callable[[Any, ExampleBatch], Any]:
    """(params, batch) -> the head's outputs of each row, the sum of the task's loss and its weight."""

    def label_step(params: Any, batch: ExampleBatch) -> Any:
        outputs = network.outputs(params, batch)
        kind = network.head.kind
        return outputs, task_loss(kind, outputs, batch), loss_weight(kind, batch)

    return label_step


@dataclass(frozen=True)
class Labelled:
    """The outputs of n rows in order, float32, those of spans and tags without padding: (outputs,), (C,), (L, 2 or T).

    loss: the mean loss of the task; None where there are no labels.
    """

    outputs: list[np.ndarray]
    loss: float | None

    def predicted(self, task: Task, encoded: Encoded, threshold: float | None = None) -> tuple[Predicted, dict]:
        """What they come to, and the task's figures with `loss`; no figures without labels.

        threshold: as in `jaxlm.tasks.metrics.predictions`.
        """
        found = predictions(task, encoded, self.outputs, threshold=threshold)
        return found, found.figures | {"loss": float(self.loss or 0.0)} if encoded.labelled else {}


def label_split(
    step: Callable[[Any, ExampleBatch], Any],
    params: Any,
    encoded: Encoded,
    mesh: Mesh,
    *,
    batch_size: int,
    lengths: Iterable[int] | None = None,
) -> Labelled:
    """Label every row of a split once. step: a compiled `make_label_step`."""
    rows = host_rows(batch_size, mesh)
    found: dict[int, np.ndarray] = {}
    loss, weight = 0.0, 0.0
    for batch in eval_batches(encoded, batch_size=batch_size, lengths=None if lengths is None else tuple(lengths)):
        outputs, batch_loss, batch_weight = step(
            params, to_devices(jax.tree.map(lambda x: x[rows], batch), mesh, batch_size)
        )
        outputs = np.asarray(multihost_utils.process_allgather(outputs, tiled=True))
        for index, row in zip(batch.index.tolist(), outputs, strict=True):
            if index >= 0:  # a row of spans or tags has padding that is not worth keeping
                found[index] = row[: encoded.longest[index]].copy() if row.ndim > 1 else row
        loss += float(batch_loss)
        weight += float(batch_weight)
    ordered = [found[index] for index in range(len(encoded))]
    return Labelled(ordered, loss / max(weight, 1.0) if encoded.labelled else None)


def in_pieces(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Examples as lists of `size`; one is longer where sentences of a document would be parted, but not for ever."""
    piece: list[Any] = []
    for example in examples:
        document = getattr(example, "document", None)
        goes_on = document is not None and bool(piece) and piece[-1].document == document
        if len(piece) >= size and not (goes_on and len(piece) < DOCUMENT_SHARE * size):
            yield piece
            piece = []
        piece.append(example)
        if len(piece) >= size and document is None:
            yield piece
            piece = []
    if piece:
        yield piece


def default_batch_size(batch_size: int, mesh: Mesh) -> int:
    """The next multiple of the rows that the mesh deals out together."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // rows) * rows
