"""Log-probabilities of texts under a language model.

Log-probabilities of tokens are float32, from the devices; their sums are float64, on the host.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import host_rows, to_devices, use_mesh
from jaxlm.inference.padded_sizes import PaddedSizes
from jaxlm.models.model import Inputs, Model
from jaxlm.text import Tokenizer
from jaxlm.training.perplexity import divide

SCORED = (8, 32, 128, 512)  # numbers of scored positions per row; each is a program
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


class TokenScores(NamedTuple):
    """The scored tokens of a sequence: log-probabilities in nats, float32 (n,), and True where one is the likeliest."""

    log_probs: np.ndarray
    greedy: np.ndarray

    @property
    def score(self) -> Score:
        """The total."""
        return Score(float(self.log_probs.sum(dtype=np.float64)), len(self.log_probs))


class _Chunk(NamedTuple):
    """Part of a sequence: the sequence's index in a block, the part's own, and the tokens, scored from `first` on."""

    sequence: int
    part: int
    ids: Sequence[int]
    first: int


@struct.dataclass
class _Rows:
    """ids, positions: int32 (B, L). first: int32 (B,), the first position whose state is read. targets: int32 (B, K),
    the tokens after K positions from `first` on.
    """

    ids: Any
    positions: Any
    first: Any
    targets: Any


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


class Scorer:
    """Log-probabilities of sequences under a model, for any number of parameters of that model.

    Sequences are sorted by length, a block at a time, and split into batches that are padded to a bucket, each a
    compiled program; the output layer is applied to the scored positions only. Neither the other sequences of a batch
    nor the batch size change a score beyond rounding. positions: the number of positions to use; default: all. A longer
    sequence is scored in overlapping chunks: each token is given at least half of that number of tokens before it.
    not_greedy: ids that do not count as predictions.
    """

    def __init__(
        self,
        model: Model,
        *,
        mesh: Mesh,
        batch_size: int,
        positions: int | None = None,
        not_greedy: Sequence[int] = (),
    ) -> None:
        check_batch(batch_size, 1, mesh)
        self.mesh, self.batch_size, self.positions = mesh, batch_size, positions or model.max_length
        self._model, self._step = model, _step(model, mesh, tuple(not_greedy))
        self._rows = host_rows(batch_size, mesh)

    def tokens(
        self, params: Any, sequences: Iterable[Scored], report: Callable[[int], None] | None = None
    ) -> Iterator[TokenScores]:
        """Yield the scores of each sequence's tokens, in order, for any number of sequences, a block at a time.

        report: called with the number of sequences that are done, after each batch. Every process must call this with
        the same sequences.
        """
        source, params = iter(sequences), self._model.by_layer(params)
        sizes, before = PaddedSizes(self.batch_size), 0
        while block := list(itertools.islice(source, BATCHES_SORTED * self.batch_size)):
            chunks = [
                _Chunk(sequence, part, *chunk)
                for sequence, scored in enumerate(block)
                for part, chunk in enumerate(_chunks(scored, self.positions))
            ]
            chunks.sort(key=lambda chunk: -len(chunk.ids))
            batches = [chunks[start : start + self.batch_size] for start in range(0, len(chunks), self.batch_size)]
            found: dict[tuple[int, int], TokenScores] = {}
            late: tuple[list[_Chunk], _Rows, Any] | None = None  # a batch is fetched while the next one runs
            padded = sizes([_least_sizes(batch, self.positions) for batch in batches])
            for batch, size in [*zip(batches, padded, strict=True), ([], ())]:
                running = None
                if batch:
                    rows = _padded(batch, self.batch_size, *size)
                    running = batch, rows, self._run(params, rows)
                if late is not None:
                    found.update(_scores_by_chunk(*late))
                    if report is not None:
                        report(before + len(block) * len(found) // len(chunks))
                late = running
            before += len(block)
            yield from (_joined(found, sequence) for sequence in range(len(block)))

    def __call__(self, params: Any, sequences: Iterable[Scored]) -> Iterator[Score]:
        """Yield the total score of each sequence, in order. See `tokens`."""
        return (scores.score for scores in self.tokens(params, sequences))

    def _run(self, params: Any, rows: _Rows) -> Any:
        rows = jax.tree.map(lambda x: x[self._rows], rows)
        with use_mesh(self.mesh):
            return self._step(params, to_devices(rows, self.mesh, self.batch_size))


def sequence_log_probs(
    model: Model,
    params: Any,
    sequences: Iterable[Scored],
    *,
    mesh: Mesh,
    batch_size: int,
    positions: int | None = None,
) -> Iterator[Score]:
    """Yield the score of each sequence, in order. See `Scorer`."""
    return Scorer(model, mesh=mesh, batch_size=batch_size, positions=positions)(params, sequences)


def batch_length(length: int, longest: int) -> int:
    """Return the length that a batch is padded to: that of its longest row up to 16, then the smallest of 20, 24, 28,
    32, 40, 48, 56, 64, 80, … and `longest` that is at least as long.

    Batches are sorted by length, so short sentences, as those of BLiMP, are hardly padded. `PaddedSizes` chooses the
    lengths that are worth a program.
    """
    step = 1 if length <= 16 else 4
    while length > 8 * step and step > 1:
        step *= 2
    return min(-(-length // step) * step, longest)


@functools.lru_cache(_STEPS)
def _step(model: Model, mesh: Mesh, not_greedy: tuple[int, ...]) -> Any:
    eligible_V = np.ones(model.config.vocab_size, np.bool_)
    eligible_V[list(not_greedy)] = False
    step = functools.partial(_scores_of_batch, model, None if eligible_V.all() else eligible_V)
    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _scores_of_batch(model: Model, eligible_V: Any, params: Any, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each row's targets, float32 (B, K), and True where a target is the likeliest."""
    scored = rows.targets.shape[1]
    outputs = model(params, Inputs(rows.ids, rows.positions))
    h_BKD, b = outputs.states, len(rows.ids)
    if scored < h_BKD.shape[1]:
        where_BK = rows.first[:, None] + jnp.arange(scored)
        h_BKD = jnp.take_along_axis(h_BKD, where_BK[..., None], axis=1)
    most = max(1, _LOGITS // (b * model.config.vocab_size))
    size = next(size for size in range(min(most, scored), 0, -1) if scored % size == 0)

    def scores_of_chunk(inputs):
        h_BCD, targets_BC = inputs
        logits_BCV = model.logits(params, h_BCD, outputs.output)
        right_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        predictions_BCV = logits_BCV if eligible_V is None else jnp.where(eligible_V, logits_BCV, -jnp.inf)
        greedy_BC = right_BC == jnp.max(predictions_BCV, axis=-1)
        return right_BC - jax.nn.logsumexp(logits_BCV, axis=-1), greedy_BC

    def chunked(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(b, scored // size, size, *x.shape[2:]), 1, 0)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, scored)

    log_probs, greedy = jax.lax.map(scores_of_chunk, (chunked(h_BKD), chunked(rows.targets)))
    return whole(log_probs), whole(greedy)


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


def _least_sizes(chunks: Sequence[_Chunk], longest: int) -> tuple[int, int]:
    """Return the bucket of lengths and that of scored positions for a batch of chunks, the longest first."""
    length = batch_length(len(chunks[0].ids) - 1, longest)
    most = max(len(chunk.ids) - chunk.first for chunk in chunks)
    return length, next((size for size in SCORED if most <= size < length), length)


def _padded(chunks: Sequence[_Chunk], batch_size: int, length: int, scored: int) -> _Rows:
    """Return a batch of chunks padded to a length and a number of scored positions."""
    ids, targets = np.zeros((batch_size, length), np.int32), np.zeros((batch_size, scored), np.int32)
    first = np.zeros(batch_size, np.int32)
    for row, chunk in enumerate(chunks):
        first[row] = min(chunk.first - 1, length - scored)
        ids[row, : len(chunk.ids) - 1] = chunk.ids[:-1]
        targets[row, : len(chunk.ids) - 1 - first[row]] = chunk.ids[first[row] + 1 :]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return _Rows(ids, np.ascontiguousarray(positions), first, targets)


def _scores_by_chunk(chunks: Sequence[_Chunk], rows: _Rows, outputs: Any) -> dict[tuple[int, int], TokenScores]:
    log_probs, greedy = (np.asarray(output) for output in outputs)
    found = {}
    for row, chunk in enumerate(chunks):
        begin = chunk.first - 1 - rows.first[row]
        where = row, slice(begin, begin + len(chunk.ids) - chunk.first)
        found[chunk.sequence, chunk.part] = TokenScores(log_probs[where], greedy[where])
    return found


def _joined(found: dict[tuple[int, int], TokenScores], sequence: int) -> TokenScores:
    places = ((sequence, part) for part in itertools.count())
    parts = [found[place] for place in itertools.takewhile(found.__contains__, places)]
    if len(parts) == 1:
        return parts[0]
    empty = TokenScores(np.zeros(0, np.float32), np.zeros(0, np.bool_))
    return TokenScores(*(np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True)))
