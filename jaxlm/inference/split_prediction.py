"""Predictions of a split: what all learners of a task give, and those of a model with a head."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.data.batch import ExampleBatch
from jaxlm.inference.rows import run_batches
from jaxlm.tasks import Encoded, Predicted, Size, Task, eval_batches, predictions
from jaxlm.training.program import CompiledStep
from jaxlm.training.task_model import HeadLearner


@dataclass(frozen=True)
class SplitPredictions:
    """The outputs of n rows in order.

    outputs: of a head, float32, without padding of spans and tags: (outputs,), (C,), (L, 2 or T); of a model that
    generates, texts with their log-probabilities; None if only the loss was asked for. loss: the mean loss of the task;
    None without labels. embeddings: the vector of each row, float32 (D,) or (C, D); empty unless asked for. not_finite:
    the first row with a score that is NaN or infinite, None without one.
    """

    outputs: list[Any] | None
    loss: float | None
    embeddings: list[np.ndarray] = field(default_factory=list)
    not_finite: int | None = None

    def predicted(self, task: Task, encoded: Encoded, threshold: float | None = None) -> tuple[Predicted, dict]:
        """Return the predictions, and the task's metrics with `loss`, empty without labels.

        threshold: as in `jaxlm.tasks.predictions`.
        """
        if self.outputs is None:
            found = Predicted([])
        else:
            found = predictions(task, encoded, self.outputs, threshold=threshold)
        return found, found.metrics | {"loss": float(self.loss or 0.0)} if encoded.labelled else {}


class SplitPredictor(Protocol):
    """A predictor of splits, which keeps its compiled programs."""

    def __call__(
        self,
        params: Any,
        encoded: Encoded,
        *,
        batch_size: int,
        sizes: Sequence[Size] | None = None,
        needed: str | None = None,
    ) -> SplitPredictions:
        """Return the outputs of every row of a split.

        sizes: bucket sizes of the batches; chosen from the data by default. needed: the only metric that is needed, for
        predictors to which others cost more; None: all.
        """


def make_predict_step(network: HeadLearner, *, embeddings: bool = False) -> Callable[[Any, ExampleBatch], Any]:
    """Return a function (params, batch) -> scores of the head, embeddings, sum of the task's loss, its weight.

    Embeddings, the vector that the head reads for each row, are None unless asked for.
    """

    def predict_step(params: Any, batch: ExampleBatch) -> Any:
        if embeddings:
            outputs, vectors = network.outputs_and_vectors(params, batch)
        else:
            outputs, vectors = network.outputs(params, batch), None
        loss = network.loss
        return loss.scores(outputs), vectors, loss.sum(outputs, batch), loss.weight(batch)

    return predict_step


class HeadPredictor:
    """The predictor of a model with a head. expected_shapes, options: of the compiled step."""

    def __init__(
        self,
        learner: HeadLearner,
        mesh: Mesh,
        *,
        expected_shapes: int,
        options: Mapping[str, Any] | None = None,
        embeddings: bool = False,
    ) -> None:
        self._mesh = mesh
        step = jax.jit(make_predict_step(learner, embeddings=embeddings))
        self._step = CompiledStep("evaluation", step, expected_shapes=expected_shapes, options=options)

    def __call__(
        self,
        params: Any,
        encoded: Encoded,
        *,
        batch_size: int,
        sizes: Sequence[Size] | None = None,
        needed: str | None = None,
    ) -> SplitPredictions:
        """Return the outputs of every row; all metrics come from one pass."""
        found: dict[int, np.ndarray] = {}
        embedded: dict[int, np.ndarray] = {}
        loss, weight = 0.0, 0.0
        batches = eval_batches(encoded, batch_size=batch_size, sizes=sizes)
        with_indices = ((batch.index.tolist(), batch) for batch in batches)
        for indices, outputs in run_batches(self._step, params, with_indices, self._mesh):
            rows, vectors, batch_loss, batch_weight = outputs
            for index, row in zip(indices, rows, strict=True):
                if index >= 0:  # padding of spans and tags is dropped
                    found[index] = row[: encoded.longest[index]].copy() if row.ndim > 1 else row
            if vectors is not None:
                embedded |= zip(indices, vectors, strict=True)
            loss += float(batch_loss)
            weight += float(batch_weight)
        ordered, embeddings = (
            [values[index] for index in range(len(encoded))] if values else [] for values in (found, embedded)
        )
        # -inf may be a mask.
        bad = (k for k, output in enumerate(ordered) if np.isnan(output).any() or np.isposinf(output).any())
        mean = loss / (weight or 1.0) if encoded.labelled else None
        return SplitPredictions(ordered, mean, embeddings, next(bad, None))
