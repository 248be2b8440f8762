"""Prediction with a fine-tuned model: encoding, the compiled step, and outputs in the order of the rows.

`jaxlm.tasks.predictions` turns the outputs into predictions and metrics.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.data.batch import ExampleBatch
from jaxlm.errors import RunError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.rows import run_batches
from jaxlm.tasks import Encoded, Predicted, Size, Task, encode_examples, eval_batches, predictions
from jaxlm.tasks.batches import standard_sizes
from jaxlm.tasks.predicted import check_embeddings, check_top_k, scores_of, with_inputs
from jaxlm.training.program import CompiledStep
from jaxlm.training.task_model import TaskLearner

MAX_DOCUMENT_CHUNKS = 8  # a chunk is extended to the end of a tagged document, up to this many times its size
log = logging.getLogger(__name__)


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

        threshold: as in `jaxlm.tasks.predictions`.
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
    sizes: Sequence[Size] | None = None,
) -> SplitPredictions:
    """Compute the outputs of every row of a split once. step: a compiled `make_predict_step`."""
    found: dict[int, np.ndarray] = {}
    embedded: dict[int, np.ndarray] = {}
    loss, weight = 0.0, 0.0
    batches = eval_batches(encoded, batch_size=batch_size, sizes=sizes)
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


class Predictor:
    """A fine-tuned run that encodes and predicts examples of its task.

    command: named in the InputError for a run that is not fine-tuned. batch_size: sequences in a batch. embeddings:
    whether the vector that the head reads is computed too; InputError for a task without one. limit: tokens of the
    longest sequence.
    """

    def __init__(self, run: LoadedRun, command: str, *, batch_size: int, embeddings: bool = False):
        self.task, config, learner = run.finetuned_parts(command)
        if embeddings:
            check_embeddings(self.task)
        self.limit = config.length or run.model.max_length
        self.batch_size = batch_size
        self._run = run
        self._sizes = standard_sizes(self.limit)
        step = jax.jit(make_predict_step(learner, embeddings=embeddings))
        self._step = CompiledStep("evaluation", step, expected_shapes=len(self._sizes))

    def encode(self, examples: Sequence[Any], *, part: str = "") -> Encoded:
        """Return examples as token sequences. part: name of their split in errors."""
        run = self._run
        return encode_examples(self.task, examples, run.tokenizer, self.limit, run.model.family.input_format, part=part)

    def predict(self, encoded: Encoded) -> SplitPredictions:
        """Return the outputs of every row, in order. The mesh of the run must be in use."""
        run = self._run
        return predict_split(self._step, run.params, encoded, run.mesh, batch_size=self.batch_size, sizes=self._sizes)

    def lines(
        self, examples: Sequence[Any], *, first: int = 0, inputs: bool = False, top_k: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the lines of predictions of examples, and the number of truncated examples.

        Args:
          first: `index` of the first line. inputs: True if lines have the columns of the row and its gold label.
            top_k: number of labels or answers in the scores, best first; None: all labels, no other answers.

        Returns:
          For each example `index`, `prediction` and `scores`; `tokens` of tagged sentences; `embedding` where asked
          for: nine digits of each float32 number, which determine it.

        Raises:
          RunError: The scores of a row are NaN or infinite. The message gives its index.
        """
        task = self.task
        check_top_k(task, top_k)
        encoded = self.encode(examples)
        found = self.predict(encoded)
        for number, output in enumerate(found.outputs):
            if np.isnan(output).any() or np.isposinf(output).any():  # -inf may be a mask
                raise RunError(
                    f"the scores of row {first + number} (counted from 0) must be finite, got NaN or infinity; the "
                    "weights are not finite, or overflow in 16 bits; use another checkpoint (RUN@STEP), or leave the "
                    "row out"
                )
        predicted, _ = found.predicted(task, encoded)
        lines = []
        for number, (example, scores) in enumerate(zip(examples, scores_of(task, predicted, top_k), strict=True)):
            line = {"index": first + number, "prediction": predicted.lines[number][0], "scores": scores}
            if (tokens := getattr(example, "tokens", None)) is not None:  # a text may have been split into them
                line["tokens"] = list(tokens)
            if found.embeddings:
                line["embedding"] = nine_digits(found.embeddings[number].tolist())
            lines.append(with_inputs(line, task, example) if inputs else line)
        return lines, encoded.truncated


def warn_of_rows(name: str, examples: int, *, truncated: int, empty: int, limit: int) -> None:
    """Warn of an input without rows, and of rows whose predictions tell little. name: of the input."""
    if not examples:
        log.warning("%s has no rows: nothing was predicted", name)
    if empty:
        log.warning("%d of %d rows have an empty text", empty, examples)
    if truncated:
        log.warning("%d of %d rows were truncated to %d tokens", truncated, examples, limit)


def empty_rows(examples: Sequence[Any]) -> int:
    """Return the number of examples with an empty text, or without tokens."""
    return sum(not example.parts or not all(part.strip() for part in example.parts) for example in examples)


def nine_digits(value: Any) -> Any:
    """Return nested lists of float32 numbers with nine digits, which determine them."""
    return [nine_digits(item) for item in value] if isinstance(value, list) else float(f"{value:.9g}")
