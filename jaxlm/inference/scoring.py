"""Log-probabilities of texts under a language model, and of one long text under a model that carries a state.

Log-probabilities of tokens are float32, from the devices; their sums are float64, on the host.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.config import check_batch
from jaxlm.distributed.mesh import use_mesh, whole_to_devices
from jaxlm.inference.rows import BATCHES_SORTED, RowStep, batch_length, default_batch_size, padded, run
from jaxlm.models.family import UNLIMITED
from jaxlm.models.model import Inputs, Model, source_inputs
from jaxlm.text import Tokenizer
from jaxlm.training.step import first_carry
from jaxlm.training.validation import divide

SCORED = (8, 32, 128, 512)  # numbers of scored positions per line; each is a program
SHARED = 64  # tokens of a line that short sequences share
_STEPS = 64  # compiled functions that are kept for further calls
_LOGITS = 1 << 26  # logits in memory at a time


class Scored(NamedTuple):
    """A sequence to score: the tokens from index `first` on, each given all tokens before it.

    source: the tokens that an encoder-decoder's encoder reads.
    """

    ids: Sequence[int]
    first: int = 1
    source: Sequence[int] = ()


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


class _Batch(NamedTuple):
    """inputs: of the model, (B, L). where: int32 (B, K), the positions whose states are read. targets: int32 (B, K),
    the tokens after them.
    """

    inputs: Inputs
    where: Any
    targets: Any


def text_sequence(
    tokenizer: Tokenizer, text: str, *, left: Sequence[int], context: str = "", separator: str = " "
) -> Scored:
    """Return `text` as a sequence to score, given `left` (0 or 1 token of `decoding.prefix_token`) and `context`.

    Without a `left` token and without a context nothing predicts the first token of the text, and it is not scored.
    Context and separator + text are encoded separately, so that only tokens of the text are scored.
    """
    if not context:
        return Scored([*left, *tokenizer.encode(text)], max(len(left), 1))
    before = [*left, *tokenizer.encode(context)]
    return Scored([*before, *tokenizer.encode(separator + text)], max(len(before), 1))


class Scorer:
    """Log-probabilities of sequences under a model, for any number of parameters of that model.

    Sequences are run as in `jaxlm.inference.rows`; the output layer is applied to the scored positions only. positions:
    the number of positions to use; default: all. A longer sequence is scored in overlapping chunks: each token is given
    at least half of that number of tokens before it. not_greedy: ids that do not count as predictions.
    """

    def __init__(
        self, model: Model, *, mesh: Mesh, batch_size: int, positions: int | None = None, not_greedy: Sequence[int] = ()
    ) -> None:
        check_batch(batch_size, 1, mesh)
        self.mesh, self.batch_size, self.positions = mesh, batch_size, positions or model.max_length
        self._model = model
        packs = "packed" in model.family.layouts
        self._form = RowStep(
            _step(model, mesh, tuple(not_greedy)),
            rows=functools.partial(_chunks, longest=self.positions),
            length=lambda chunk: len(chunk.ids) - 1,
            sizes=functools.partial(_least_sizes, longest=self.positions),
            flops=lambda length, scored: length * model.forward_flops_per_token(length, scored / length),
            pad=functools.partial(_padded, packs=packs),
            unpad=_unpadded,
            shared=min(SHARED, self.positions) if packs else 0,
        )

    def tokens(
        self, params: Any, sequences: Iterable[Scored], report: Callable[[int], None] | None = None
    ) -> Iterator[TokenScores]:
        """Return the scores of each sequence's tokens, in order, for any number of sequences, a block at a time.

        report: called with the number of sequences that are done, after each batch. Every process must call this with
        the same sequences.
        """
        results = run(
            self._form,
            self._model.by_layer(params),
            sequences,
            mesh=self.mesh,
            batch_size=self.batch_size,
            block=BATCHES_SORTED * self.batch_size,
            report=report,
        )
        return (_joined(chunks) for _, chunks in results)

    def __call__(self, params: Any, sequences: Iterable[Scored]) -> Iterator[Score]:
        """Yield the total score of each sequence, in order. See `tokens`."""
        return (scores.score for scores in self.tokens(params, sequences))


class StreamScorer:
    """Scores a text of any length in rows of `length` tokens, each with the state that the row before left.

    The text is one stream, as in an evaluation over streams with a batch of one row. The other rows that the mesh needs
    are empty.
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


@functools.lru_cache(_STEPS)
def _step(model: Model, mesh: Mesh, not_greedy: tuple[int, ...]) -> Any:
    eligible_V = np.ones(model.config.vocab_size, np.bool_)
    eligible_V[list(not_greedy)] = False
    step = functools.partial(_scores_of_batch, model, None if eligible_V.all() else eligible_V)
    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _scores_of_batch(model: Model, eligible_V: Any, params: Any, batch: _Batch) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each row's targets, float32 (B, K), and True where a target is the likeliest."""
    b, scored = batch.targets.shape
    outputs = model(params, batch.inputs)
    h_BKD = jnp.take_along_axis(outputs.states, batch.where[..., None], axis=1)
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

    log_probs, greedy = jax.lax.map(scores_of_chunk, (chunked(h_BKD), chunked(batch.targets)))
    return whole(log_probs), whole(greedy)


def _chunks(scored: Scored, longest: int) -> Iterator[Scored]:
    """Yield the chunks of a sequence, of at most `longest` inputs each."""
    ids, first = scored.ids, max(scored.first, 1)
    if len(ids) > longest + 1:  # a long context loses its beginning, down to half of the length
        drop = max(0, min(first - 1 - longest // 2, len(ids) - longest - 1))
        ids, first = ids[drop:], first - drop
    end = 0
    while first < len(ids):
        end = min(len(ids), longest + 1 if not end else first + longest - longest // 2)
        begin = max(0, end - longest - 1)
        yield Scored(ids[begin:end], first - begin, scored.source)
        first = end


def _least_sizes(lines: Sequence[Sequence[Scored]], longest: int) -> tuple[int, int]:
    """Return the bucket of lengths and that of scored positions for a batch of lines of chunks."""
    length = batch_length(max(sum(len(chunk.ids) - 1 for chunk in line) for line in lines), longest)
    most = max(sum(len(chunk.ids) - chunk.first for chunk in line) for line in lines)
    return length, next((size for size in SCORED if most <= size < length), length)


def _padded(lines: Sequence[Sequence[Scored]], batch_size: int, length: int, scored: int, *, packs: bool) -> _Batch:
    """Return a batch of lines of chunks, padded to a length and to a number of scored positions.

    packs: True if the chunks of a line are the segments of a packed row; else a line has one chunk.
    """
    ids, positions, segments, where, targets = ([list[int]() for _ in lines] for _ in range(5))
    for row, line in enumerate(lines):
        for number, chunk in enumerate(line, 1):
            before, tokens = len(ids[row]), len(chunk.ids) - 1
            ids[row] += chunk.ids[:-1]
            positions[row] += range(tokens)
            segments[row] += [number] * tokens
            where[row] += range(before + chunk.first - 1, before + tokens)
            targets[row] += chunk.ids[chunk.first :]
    parts = (ids, positions, segments) if packs else (ids, positions)
    inputs = Inputs(*(padded(part, batch_size, length) for part in parts))
    if longest := max((len(chunk.source) for line in lines for chunk in line), default=0):  # one chunk per line
        sources = [line[0].source for line in lines]
        real = [[1] * len(source) for source in sources]
        slots = batch_length(longest, UNLIMITED)
        inputs = inputs._replace(source=source_inputs(*(padded(part, batch_size, slots) for part in (sources, real))))
    return _Batch(inputs, *(padded(part, batch_size, scored) for part in (where, targets)))


def _unpadded(line: Sequence[Scored], outputs: Sequence[np.ndarray], length: int, scored: int) -> Iterator[TokenScores]:
    """Yield the scores of each chunk of a line from the outputs of its row of a batch, see `_padded`."""
    end = 0
    for chunk in line:
        begin, end = end, end + len(chunk.ids) - chunk.first
        yield TokenScores(*(output[begin:end] for output in outputs))


def _joined(chunks: Sequence[TokenScores]) -> TokenScores:
    if len(chunks) == 1:
        return chunks[0]
    empty = TokenScores(np.zeros(0, np.float32), np.zeros(0, np.bool_))
    return TokenScores(*(np.concatenate(arrays) for arrays in zip(empty, *chunks, strict=True)))
