"""Predictions of a model that generates: texts, their log-probabilities, and the loss of the targets.

Texts are the most probable token of each step, or those of a beam search; what follows `options.target_length` tokens
is not generated. The log-probability of a text is that of all its tokens, its end included, in one pass over the whole
rows, by the step that computes the loss of the targets (teacher forcing).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.distributed.mesh import use_mesh
from jaxlm.inference.arguments import Sampling
from jaxlm.inference.decoding import CachedModel, Prompt, filled, for_inference
from jaxlm.inference.rows import longest_first, run_batches
from jaxlm.inference.split_prediction import SplitPredictions
from jaxlm.inference.strategies import ENDED, BeamSearch, Sampler
from jaxlm.tasks import Size, eval_batches
from jaxlm.tasks.kinds.generation import Generated
from jaxlm.tasks.metrics import LOSS
from jaxlm.tasks.text_rows import TextSplit
from jaxlm.text import Tokenizer
from jaxlm.training.program import CompiledStep
from jaxlm.training.text_model import TextLearner


class TextPredictor:
    """The predictor of a model that generates. limit: the most positions of a row. expected_shapes, options: of the
    step that computes log-probabilities."""

    def __init__(
        self,
        learner: TextLearner,
        mesh: Mesh,
        tokenizer: Tokenizer,
        *,
        limit: int,
        expected_shapes: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._mesh, self._tokenizer, self._task_options = mesh, tokenizer, learner.task.options
        self._cached = CachedModel(
            learner.model,
            None,
            mesh=mesh,
            positions=None if learner.model.has_source else limit,
            forbidden=[*tokenizer.specials.values(), *tokenizer.sentinels],
            size=tokenizer.size,
            end=tokenizer.specials["end"],
        )
        search = self._task_options
        self._sampler = Sampler(self._cached, Sampling(temperature=0.0))
        self._search = BeamSearch(self._cached, search.beams, length_penalty=search.length_penalty)

        def step(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            return learner.target_nll(params, batch), jnp.sum(batch.weights, axis=1)

        self._step = CompiledStep("evaluation", jax.jit(step), expected_shapes=expected_shapes, options=options)

    def __call__(
        self,
        params: Any,
        encoded: Any,
        *,
        batch_size: int,
        sizes: Sequence[Size] | None = None,
        needed: str | None = None,
    ) -> SplitPredictions:
        """Return the texts of every row of a `TextSplit`. Nothing is generated if only the loss is needed."""
        loss = None
        if encoded.labelled:
            nll, counts = self._nll(params, encoded, batch_size, sizes)
            loss = float(nll.sum() / (counts.sum() or 1.0))
        if needed == LOSS:
            return SplitPredictions(None, loss)
        tokens = self.tokens(params, encoded, batch_size)
        nll, _ = self._nll(params, encoded.with_targets(tokens), batch_size, sizes)
        texts = [self._tokenizer.decode(ids).strip() for ids in tokens]
        outputs = [Generated(text, -float(value)) for text, value in zip(texts, nll, strict=True)]
        return SplitPredictions(outputs, loss, not_finite=next(iter(np.flatnonzero(~np.isfinite(nll)).tolist()), None))

    def tokens(self, params: Any, encoded: TextSplit, batch_size: int) -> list[list[int]]:
        """Return the generated ids of every row, the one of the end included."""
        most = self._task_options.target_length
        prompts = [Prompt(row.prompt, most, number, row.source) for number, row in enumerate(encoded.rows)]
        order = longest_first([len(prompt.ids) + len(prompt.source) for prompt in prompts])
        found: dict[int, list[int]] = {}
        with use_mesh(self._mesh):
            self._cached.params = for_inference(self._cached.model, params)
            for first in range(0, len(order), batch_size):
                some = order[first : first + batch_size]
                batch = filled([prompts[row] for row in some], batch_size)
                generated = (self._greedy if self._task_options.beams == 1 else self._best)(batch)
                found |= zip(some, generated[: len(some)], strict=True)
            self._cached.params = None
        return [found[row] for row in range(len(prompts))]

    def _greedy(self, batch: Sequence[Prompt]) -> list[list[int]]:
        steps = np.stack([ids[:, 0] for ids in self._sampler(batch)], axis=1)
        return [[i for i in row if i != ENDED] for row in steps.tolist()]

    def _best(self, batch: Sequence[Prompt]) -> list[list[int]]:
        return [hypotheses[0].tokens for hypotheses in self._search(batch)]

    def _nll(
        self, params: Any, encoded: TextSplit, batch_size: int, sizes: Sequence[Size] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the negative log-likelihood of each row's target and its number of ids, float64 (rows,)."""
        nll, counts = np.zeros(len(encoded)), np.zeros(len(encoded))
        batches = ((batch.index, batch) for batch in eval_batches(encoded, batch_size=batch_size, sizes=sizes))
        for index, found in run_batches(self._step, params, batches, self._mesh):
            for values, of_batch in zip((nll, counts), found, strict=True):
                values[index[index >= 0]] = of_batch[index >= 0]
        return nll, counts
