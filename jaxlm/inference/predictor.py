"""Prediction of examples with a fine-tuned run: encoding, the compiled step, and its outputs in order."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxlm.errors import RunError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.prediction import SplitPredictions, make_predict_step, predict_split
from jaxlm.tasks import Encoded, encode_examples
from jaxlm.tasks.batching.batches import standard_lengths
from jaxlm.tasks.prediction_lines import check_embeddings, check_top_k, scores_of, with_inputs
from jaxlm.training.program import CompiledStep

log = logging.getLogger(__name__)


class Predictor:
    """A fine-tuned run that encodes and predicts examples of its task.

    command: named in the InputError for a run that is not fine-tuned. batch_size: sequences in a batch. embeddings:
    whether the vector that the head reads is computed too; InputError for a task without one. limit: tokens of the
    longest sequence.
    """

    def __init__(self, run: LoadedRun, command: str, *, batch_size: int, embeddings: bool = False):
        self.task, config, learner = run.tuned(command)
        if embeddings:
            check_embeddings(self.task)
        self.limit = config.length or run.model.max_length
        self.batch_size = batch_size
        self._run = run
        self._lengths = standard_lengths(self.limit)
        step = jax.jit(make_predict_step(learner, embeddings=embeddings))
        self._step = CompiledStep("evaluation", step, expected_shapes=len(self._lengths))

    def encode(self, examples: Sequence[Any], *, part: str = "") -> Encoded:
        """Return examples as token sequences. part: name of their split in errors."""
        run = self._run
        return encode_examples(self.task, examples, run.tokenizer, self.limit, run.model.family.input_format, part=part)

    def predict(self, encoded: Encoded) -> SplitPredictions:
        """Return the outputs of every row, in order. The mesh of the run must be in use."""
        run = self._run
        return predict_split(
            self._step, run.params, encoded, run.mesh, batch_size=self.batch_size, lengths=self._lengths
        )

    def lines(
        self, examples: Sequence[Any], *, first: int = 0, inputs: bool = False, top_k: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the lines of predictions of examples, and the number of truncated examples.

        Args:
          first: `index` of the first line. inputs: whether lines have the columns of the row and its gold label.
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
                    "weights are not finite, or overflow in bfloat16; use another checkpoint (RUN@STEP), or leave the "
                    "row out"
                )
        predicted, _ = found.predicted(task, encoded)
        lines = []
        for number, (example, scores) in enumerate(zip(examples, scores_of(task, predicted, top_k), strict=True)):
            line = {"index": first + number, "prediction": predicted.lines[number][0], "scores": scores}
            if task.kind == "tagging":
                line["tokens"] = list(example.tokens)
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
