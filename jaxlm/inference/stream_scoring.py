"""Log-probabilities of one long text under a model that carries a state, such as an LSTM or a Transformer-XL."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.distributed.mesh import use_mesh, whole_to_devices
from jaxlm.inference.prediction import default_batch_size
from jaxlm.inference.rows import padded
from jaxlm.inference.scoring import Score
from jaxlm.models.model import Inputs, Model
from jaxlm.training.step import first_carry


class StreamScorer:
    """Scores a text of any length in rows of `length` tokens, each with the state that the row before left.

    The text is one stream, as in an evaluation over streams with a batch of one row. The rows that the mesh needs
    beside it are empty.
    """

    def __init__(self, model: Model, *, mesh: Mesh, length: int) -> None:
        self.mesh, self.length = mesh, length
        self._model, self._rows = model, default_batch_size(1, mesh)
        self._step = jax.jit(self._nll)

    def __call__(self, params: Any, parts: Iterable[Sequence[int]]) -> Iterator[Score]:
        """Yield the score of each row of the ids, which come in parts. The first id of all is given, not scored.

        Every process must call this with the same ids.
        """
        params = self._model.by_layer(params)
        with use_mesh(self.mesh):
            carry = first_carry(lambda rows: self._model.stream_carry(rows, cached=True), self._rows, self.mesh)
        ids, last = itertools.chain.from_iterable(parts), list[int]()
        while new := list(itertools.islice(ids, self.length + 1 - len(last))):
            row, last = [*last, *new], new[-1:]
            if scored := len(row) - 1:
                with use_mesh(self.mesh):
                    nll, carry = self._step(params, self._batch(row), carry)
                yield Score(-float(nll), scored)

    def _batch(self, row: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return ids, targets and weights, (B, L) each, with `row` first."""
        scored = len(row) - 1
        ids, targets, scores = (padded([one], self._rows, self.length) for one in (row[:-1], row[1:], [1] * scored))
        return whole_to_devices((ids, targets, scores.astype(np.float32)), self.mesh)

    def _nll(self, params: Any, batch: Any, carry: Any) -> tuple[jax.Array, Any]:
        ids, targets, weights = batch
        positions = jnp.asarray(np.broadcast_to(np.arange(self.length, dtype=np.int32), ids.shape))
        outputs = self._model(params, Inputs(ids, positions), carry)
        nll, _ = self._model.loss(params, outputs.states, outputs.output, targets, weights)
        return nll, outputs.carry
