"""Prediction of examples with a fine-tuned run: encoding, the compiled step, and its outputs in order."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxlm.inference.loaded_run import LoadedRun
from jaxlm.inference.prediction import SplitPredictions, make_predict_step, predict_split
from jaxlm.tasks import Encoded, encode_examples
from jaxlm.tasks.batching.batches import standard_lengths
from jaxlm.training.program import CompiledStep


class Predictor:
    """A fine-tuned run that encodes and predicts examples of its task.

    command: named in the InputError for a run that is not fine-tuned. batch_size: sequences in a batch. limit: tokens
    of the longest sequence.
    """

    def __init__(self, run: LoadedRun, command: str, *, batch_size: int):
        self.task, config, learner = run.tuned(command)
        self.limit = config.length or run.model.max_length
        self.batch_size = batch_size
        self._run = run
        self._lengths = standard_lengths(self.limit)
        step = jax.jit(make_predict_step(learner))
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
