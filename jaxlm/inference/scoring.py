"""Log-probabilities of texts under a language model.

Sums over tokens are computed in float32 on the devices, one batch at a time, and in float64 across batches on the host.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.data.batch import Batch
from jaxlm.distributed.mesh import check_batch, host_rows, to_devices, use_mesh
from jaxlm.inference.decoding import length_bucket
from jaxlm.models.family import Inputs, Model
from jaxlm.text import Tokenizer
from jaxlm.training.perplexity import divide

SMALLEST_BUCKET = 16
BATCHES_SORTED = 64  # batches of sequences that are sorted by length together
_STEPS = 64  # compiled functions that are kept for further calls
_LOGITS = 1 << 26  # logits in memory at a time


class Scored(NamedTuple):
    """A sequence to score: the tokens from index `first` on, each given all tokens before it."""

    ids: Sequence[int]
    first: int = 1


class Score(NamedTuple):
    """The total log-probability of a sequence's scored tokens, in nats, and their number."""

    log_probability: float
    tokens: int

    @property
    def per_token(self) -> float:
        """The mean log-probability per token; nan if no token was scored."""
        return divide(self.log_probability, self.tokens)


def text_sequence(
    tokenizer: Tokenizer, text: str, *, left: Sequence[int], context: str = "", separator: str = " "
) -> Scored:
    """Return `text` as a sequence to score, given `left` (0 or 1 token of `decoding.left_context`) and `context`.

    Without a `left` token and without a context nothing predicts the first token of the text, and it is not scored.
    Context and separator + text are encoded separately, so that only tokens of the text are scored.
    """
    if not context:
        return Scored([*left, *tokenizer.encode(text)], max(len(left), 1))
    before = [*left, *tokenizer.encode(context)]
    return Scored([*before, *tokenizer.encode(separator + text)], max(len(before), 1))


def sequence_log_probs(
    model: Model,
    params: Any,
    sequences: Iterable[Scored],
    *,
    mesh: Mesh,
    batch_size: int,
    positions: int | None = None,
) -> Iterator[Score]:
    """Yield the score of each sequence, in order, for any number of them, a block at a time.

    A block is sorted by length and split into batches that are padded to a bucket, each a compiled program. Neither the
    other sequences of a batch nor the batch size change a score beyond rounding. positions: the number of positions to
    use; default: all. A longer sequence is scored in overlapping chunks: each token is given at least half of that
    number of tokens before it.
    Every process must call this with the same sequences.
    """
    check_batch(batch_size, 1, mesh)
    step, rows = _step(model, mesh), host_rows(batch_size, mesh)
    longest = positions or model.max_length
    source = iter(sequences)
    while block := list(islice(source, BATCHES_SORTED * batch_size)):
        chunks = [(number, *chunk) for number, scored in enumerate(block) for chunk in _chunks(scored, longest)]
        chunks.sort(key=lambda chunk: -len(chunk[1]))
        totals, counts = np.zeros(len(block)), np.zeros(len(block), np.int64)
        late: tuple[list, Any] | None = None  # a batch is fetched while the next one runs
        for start in range(0, len(chunks), batch_size):
            some = chunks[start : start + batch_size]
            bucket = length_bucket(len(some[0][1]) - 1, longest, smallest=SMALLEST_BUCKET)
            batch = _padded([(ids, first) for _, ids, first in some], batch_size, bucket)
            batch = jax.tree.map(lambda x: x[rows], batch)
            with use_mesh(mesh):
                found = step(params, to_devices(batch, mesh, batch_size))
            if late is not None:
                _add(*late, totals, counts)
            late = some, found
        if late is not None:
            _add(*late, totals, counts)
        yield from (Score(float(total), int(count)) for total, count in zip(totals, counts, strict=True))


@functools.lru_cache(_STEPS)
def _step(model: Model, mesh: Mesh) -> Any:
    return jax.jit(functools.partial(_row_log_probs, model), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _row_log_probs(model: Model, params: Any, batch: Batch) -> jax.Array:
    """Return the weighted sum of log-probabilities of each row's targets, float32 (B,), chunk by chunk."""
    outputs = model(params, Inputs(batch.ids, batch.positions))
    h_BLD = outputs.states
    b, length, d = h_BLD.shape
    most = max(1, _LOGITS // (b * model.config.vocab_size))
    size = next(size for size in range(min(most, length), 0, -1) if length % size == 0)

    def log_probs_of_chunk(inputs):
        h_BCD, targets_BC, weights_BC = inputs
        logits_BCV = model.logits(params, h_BCD, outputs.output)
        right_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return jnp.sum(weights_BC * (right_BC - jax.nn.logsumexp(logits_BCV, axis=-1)), axis=-1)

    def chunked(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(b, length // size, size, *x.shape[2:]), 1, 0)

    chunks = chunked(h_BLD), chunked(batch.targets), chunked(batch.weights)
    return jnp.sum(jax.lax.map(log_probs_of_chunk, chunks), axis=0)


def _chunks(scored: Scored, longest: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield (ids, first scored) of the chunks of a sequence, of at most `longest` inputs each."""
    ids, first = scored.ids, max(scored.first, 1)
    if len(ids) > longest + 1:  # a long context loses its beginning, down to half of the length
        drop = max(0, min(first - 1 - longest // 2, len(ids) - longest - 1))
        ids, first = ids[drop:], first - drop
    end = 0
    while first < len(ids):
        end = min(len(ids), longest + 1 if not end else first + longest - longest // 2)
        begin = max(0, end - longest - 1)
        yield ids[begin:end], first - begin
        first = end


def _padded(chunks: Sequence[tuple[Sequence[int], int]], batch_size: int, length: int) -> Batch:
    ids, targets = np.zeros((batch_size, length), np.int32), np.zeros((batch_size, length), np.int32)
    weights = np.zeros((batch_size, length), np.float32)
    for row, (sequence, first) in enumerate(chunks):
        ids[row, : len(sequence) - 1] = sequence[:-1]
        targets[row, : len(sequence) - 1] = sequence[1:]
        weights[row, first - 1 : len(sequence) - 1] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return Batch(ids, targets, positions, (ids >= 0).astype(np.int32), weights)


def _add(chunks: list, found: Any, totals: np.ndarray, counts: np.ndarray) -> None:
    for (number, ids, first), log_probability in zip(chunks, np.asarray(found), strict=False):
        totals[number] += log_probability
        counts[number] += len(ids) - first
