"""Labelling examples with a fine-tuned model: outputs in the order of the examples, for any number of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm.batch import ExampleBatch
from jaxlm.heads import SequenceHead
from jaxlm.objectives import sequence_outputs, task_loss
from jaxlm.sharding import host_rows, to_devices
from jaxlm.tasks import Task, compute_metrics, eval_batches
from jaxlm.tasks.loading import EncodedSplit


def make_head(task: Task, dropout_rate: float, init_std: float) -> SequenceHead:
    """The head that a task asks for."""
    return SequenceHead(task.kind, task.num_outputs, dropout_rate, init_std)


def make_label_step(model: Any, head: SequenceHead) -> Callable[[Any, ExampleBatch], Any]:
    """(params, batch) -> the head's outputs of each example, the sum of the task's loss and its weight."""

    def label_step(params: Any, batch: ExampleBatch) -> Any:
        outputs, _, _ = sequence_outputs(model, head, params, batch)
        return outputs, task_loss(head.kind, outputs, batch), jnp.sum(batch.weights)

    return label_step


@dataclass(frozen=True)
class Labelled:
    """The outputs of n examples in order, float32 (n, outputs), and the mean loss of the task (None: no labels)."""

    outputs: np.ndarray
    loss: float | None

    def metrics(self, task: Task, encoded: EncodedSplit) -> dict[str, float]:
        """The task's metrics, and `loss`."""
        predictions = self.outputs[:, 0] if task.kind == "regression" else np.argmax(self.outputs, axis=-1)
        return compute_metrics(task, predictions, encoded.labels) | {"loss": float(self.loss or 0.0)}


def label_split(
    step: Callable[[Any, ExampleBatch], Any],
    params: Any,
    encoded: EncodedSplit,
    mesh: Mesh,
    *,
    batch_size: int,
    lengths: Iterable[int] | None = None,
) -> Labelled:
    """Label every example of a split once. step: a compiled `make_label_step`."""
    rows = host_rows(batch_size, mesh)
    width = encoded.num_sequences
    found: dict[int, np.ndarray] = {}
    loss, weight = 0.0, 0.0
    for batch in eval_batches(encoded, batch_size=batch_size, lengths=None if lengths is None else tuple(lengths)):
        outputs, batch_loss, batch_weight = step(
            params, to_devices(jax.tree.map(lambda x: x[rows], batch), mesh, batch_size)
        )
        outputs = np.asarray(multihost_utils.process_allgather(outputs, tiled=True))
        found |= {int(index): row for index, row in zip(batch.index, outputs, strict=True) if index >= 0}
        loss += float(batch_loss)
        weight += float(batch_weight)
    if not found:
        return Labelled(np.zeros((0, width), np.float32), None)
    ordered = np.stack([found[index] for index in range(len(encoded))])
    return Labelled(ordered, loss / weight if encoded.labelled else None)


def default_batch_size(batch_size: int, mesh: Mesh) -> int:
    """The next multiple of the rows that the mesh deals out together."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // rows) * rows
