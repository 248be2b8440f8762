"""Prediction with a fine-tuned model: encoding, the compiled step, and outputs in the order of the rows.

`jaxlm.tasks.predictions` turns the outputs into predictions and metrics.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxlm.errors import RunError
from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.split_prediction import HeadPredictor, SplitPredictions, SplitPredictor
from jaxlm.inference.text_prediction import TextPredictor
from jaxlm.inference.word_features import with_features, word_features
from jaxlm.tasks import FORMATS, Encoded, Size, encode_examples
from jaxlm.tasks.batches import standard_sizes
from jaxlm.tasks.predicted import check_embeddings, check_top_k, scores_of, tokens_of, with_inputs
from jaxlm.text import Tokenizer

MAX_DOCUMENT_CHUNKS = 8  # a chunk is extended to the end of a tagged document, up to this many times its size
log = logging.getLogger(__name__)


ROWS_AT_A_TIME = 1024  # rows that are sorted by length together, to reduce padding


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


def split_predictor(
    learner: Any,
    mesh: Mesh,
    tokenizer: Tokenizer,
    *,
    limit: int,
    expected_shapes: int,
    options: Mapping[str, Any] | None = None,
    embeddings: bool = False,
) -> SplitPredictor:
    """Return the predictor of a task's learner. limit: the most tokens of a row. expected_shapes, options: of its step.

    embeddings: whether the vector that the head reads is computed too.
    """
    shapes: dict[str, Any] = {"expected_shapes": expected_shapes, "options": options}
    if learner.task.generates:
        return TextPredictor(learner, mesh, tokenizer, limit=limit, **shapes)
    return HeadPredictor(learner, mesh, embeddings=embeddings, **shapes)


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
        self._features = word_features(config.word_features, str(run.path))
        has_source = FORMATS[run.model.family.input_format].has_source
        self._predict = split_predictor(
            learner,
            run.mesh,
            run.tokenizer,
            limit=self.limit,
            expected_shapes=len(standard_sizes(Size(self.limit if has_source else 0, self.limit))),
            embeddings=embeddings,
        )

    def encode(self, examples: Sequence[Any], *, part: str = "") -> Encoded:
        """Return examples as token sequences. part: name of their split in errors."""
        run = self._run
        input_format = run.model.family.input_format
        encoded = encode_examples(self.task, examples, run.tokenizer, self.limit, input_format, part=part)
        return with_features(encoded, self._features, run.mesh)

    def predict(self, encoded: Encoded) -> SplitPredictions:
        """Return the outputs of every row, in order. The mesh of the run must be in use."""
        sizes = standard_sizes(encoded.largest)
        return self._predict(self._run.params, encoded, batch_size=self.batch_size, sizes=sizes)

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
        if found.not_finite is not None:
            raise RunError(
                f"the scores of row {first + found.not_finite} (counted from 0) must be finite, got NaN or infinity; "
                "the weights are not finite, or overflow in 16 bits; use another checkpoint (RUN@STEP), or leave the "
                "row out"
            )
        predicted, _ = found.predicted(task, encoded)
        lines = []
        for number, (example, scores) in enumerate(zip(examples, scores_of(task, predicted, top_k), strict=True)):
            line = {"index": first + number, "prediction": predicted.lines[number][0], "scores": scores}
            line |= tokens_of(example)
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
