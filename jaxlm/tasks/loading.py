"""Examples as batches of token sequences, in a handful of lengths fixed ahead by the data.

Every length is a program to compile and padding is work for nothing: a few bucket lengths are chosen, from the data
alone, such that the least padding is computed. `batch = f(seed, step)`: which length a step has depends on the data,
the batch size and the epoch; the seed orders the examples within that plan. So every seed of a table, and every
process, meets the same programs in the same order, and a run resumes from its step number alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.batch import ExampleBatch
from jaxlm.tasks.inputs import arrange
from jaxlm.tasks.task import Example, Task, TaskData

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer

MAX_LENGTHS = 4
MULTIPLE = 8  # bucket lengths are multiples of it, so that rows stay aligned
_CHUNK = 4096  # examples tokenised at a time
_ORDER, _PLAN = 0, 1  # the first word of a random stream: what it decides


@dataclass(frozen=True)
class EncodedSplit:
    """The token sequences of n examples, C each, end to end.

    ids: int32 (total,). starts: int64 (n * C + 1,): sequence c of example i is ids[starts[s] : starts[s + 1]] with
    s = i * C + c.
    labels: int32 (n,) or float32 (n,), what the loss sees; zeros where unlabelled. truncated: examples that were cut.
    longest: int32 (n,), the longest sequence of each example. length: the limit they were cut to. pad: the padding id.
    """

    ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray
    labelled: bool
    truncated: int
    num_sequences: int
    longest: np.ndarray
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.labels)

    def sequences(self, example: int) -> list[np.ndarray]:
        """The token sequences of one example."""
        first = example * self.num_sequences
        bounds = self.starts[first : first + self.num_sequences + 1]
        return [self.ids[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]

    def batch(self, examples: np.ndarray, length: int, batch_size: int) -> ExampleBatch:
        """These examples padded to `length`, and rows of weight 0 up to `batch_size`."""
        shape = (batch_size, self.num_sequences)
        ids = np.full((*shape, length), self.pad, np.int32)
        lengths = np.zeros(shape, np.int32)
        for row, example in enumerate(examples):
            for place, sequence in enumerate(self.sequences(int(example))):
                ids[row, place, : len(sequence)] = sequence
                lengths[row, place] = len(sequence)
        count = len(examples)
        labels = np.zeros(batch_size, self.labels.dtype)
        labels[:count] = self.labels[examples]
        weights = np.zeros(batch_size, np.float32)
        weights[:count] = 1
        index = np.full(batch_size, -1, np.int32)
        index[:count] = examples
        return ExampleBatch(
            ids=ids,
            lengths=lengths,
            extract=np.maximum(lengths - 1, 0),
            second=lengths,
            labels=labels,
            weights=weights,
            index=index,
        )


def encode_split(task: Task, data: TaskData, split: str, tokenizer: "Tokenizer", length: int) -> EncodedSplit:
    """One part of a task as token sequences of at most `length`."""
    return encode_examples(task, data.splits[split].examples, tokenizer, length)


def encode_examples(task: Task, examples: Sequence[Example], tokenizer: "Tokenizer", length: int) -> EncodedSplit:
    """Examples, labelled or not, as token sequences of at most `length` (GPT-1's transformations)."""
    specials, count = tokenizer.specials, task.num_sequences
    pieces: list[np.ndarray] = []
    lengths = np.zeros((len(examples), count), np.int64)
    truncated, row, source = 0, 0, iter(examples)
    while chunk := list(islice(source, _CHUNK)):
        texts = list(chain.from_iterable((*example.texts, *example.choices) for example in chunk))
        encoded = iter(tokenizer.encode_batch(texts))
        for example in chunk:
            parts = list(islice(encoded, len(example.texts)))
            choices = list(islice(encoded, len(example.choices)))
            sequences, cut = arrange(parts, choices, task.form, specials, length)
            truncated += cut
            lengths[row] = [len(sequence) for sequence in sequences]
            pieces.append(np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths[row].sum())))
            row += 1
    labelled = bool(examples) and all(example.label is not None for example in examples)
    numbers = [task.label_number(example.label) if labelled else 0 for example in examples]  # type: ignore[arg-type]
    return EncodedSplit(
        ids=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int64),
        labels=np.asarray(numbers, np.float32 if task.kind == "regression" else np.int32),
        labelled=labelled,
        truncated=truncated,
        num_sequences=count,
        longest=lengths.max(axis=1, initial=0).astype(np.int32),
        length=length,
        pad=specials.get("pad", 0),  # GPT-1's vocabulary has none and pads with id 0; no state before it sees it
    )


def choose_lengths(longest: np.ndarray, limit: int, max_lengths: int = MAX_LENGTHS) -> tuple[int, ...]:
    """At most `max_lengths` bucket lengths, ascending, with the least padding for examples of these lengths.

    Candidates are multiples of 8, `limit` in place of one above it. Exact, by dynamic programming over the histogram:
    cost[k][j] is the least number of positions for all examples up to candidate j with k lengths, j being the last.
    """
    rounded = np.minimum(-(-np.maximum(longest, 1) // MULTIPLE) * MULTIPLE, limit)
    candidates, counts = np.unique(rounded, return_counts=True)
    total = np.concatenate([[0], np.cumsum(counts)])
    size = len(candidates)
    cost = np.full((max_lengths + 1, size + 1), np.inf)
    cost[0, 0] = 0
    before = np.zeros((max_lengths + 1, size + 1), np.int64)
    for k in range(1, max_lengths + 1):
        for j in range(1, size + 1):
            options = cost[k - 1, :j] + (total[j] - total[:j]) * candidates[j - 1]
            before[k, j] = int(options.argmin())
            cost[k, j] = options[before[k, j]]
    k, j, lengths = int(cost[:, size].argmin()), size, []
    while j:
        lengths.append(int(candidates[j - 1]))
        k, j = k - 1, before[k, j]
    return tuple(reversed(lengths))


def standard_lengths(limit: int) -> tuple[int, ...]:
    """Doubling lengths up to `limit`, for rows that stream in and cannot be looked at ahead."""
    return (*(2**power for power in range(5, 20) if 2**power < limit), limit)


class TrainBatches:
    """The training batches of a split, by step: `batches[step]`, for any step from 0 on.

    An epoch has floor(n / batch_size) steps, as in GPT-1's code, and every example at most once; all batches are full.
    The n % batch_size examples that are left out of an epoch are taken from the buckets in proportion to their size,
    and at random within them. Examples then stand from the longest bucket to the shortest, shuffled within each, and
    are cut into batches: one that runs over a border has the longer bucket's length. The batches of an epoch are
    shuffled, too, without the seed. A set smaller than a batch makes one batch an epoch, filled with rows of weight 0.

    Args:
      num_epochs: passes over the data; `len` is floor(steps an epoch * num_epochs), at least one, unless num_steps says
      it. seed: orders the examples.

    Attributes: lengths, the bucket lengths; steps_per_epoch.
    """

    def __init__(
        self, encoded: EncodedSplit, *, batch_size: int, num_epochs: float = 0, seed: int, num_steps: int | None = None
    ) -> None:
        if not len(encoded):
            raise ValueError("a split without examples has no batches")
        self.encoded, self.batch_size, self.seed = encoded, batch_size, seed
        self.lengths = choose_lengths(encoded.longest, encoded.length)
        self.steps_per_epoch = max(1, len(encoded) // batch_size)
        self._num_steps = max(1, int(self.steps_per_epoch * num_epochs)) if num_steps is None else num_steps
        buckets = np.searchsorted(self.lengths, encoded.longest)
        # Longest bucket first, file order within: the base that every epoch shuffles within the buckets.
        self._members = [np.flatnonzero(buckets == bucket) for bucket in reversed(range(len(self.lengths)))]
        sizes = np.array([len(members) for members in self._members])
        left_out = len(encoded) % batch_size if len(encoded) >= batch_size else 0
        self._taken = sizes - _apportion(left_out, sizes)
        firsts = np.arange(self.steps_per_epoch) * batch_size
        place = np.searchsorted(np.cumsum(self._taken), firsts, side="right")
        self._batch_lengths = np.array(self.lengths[::-1])[place]
        self._epoch_at_hand: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> ExampleBatch:
        if step < 0:
            raise IndexError(f"step {step} is below 0")
        epoch, place = divmod(step, self.steps_per_epoch)
        block = self._plan(epoch)[place]
        rows = self._order(epoch)[block * self.batch_size : (block + 1) * self.batch_size]
        return self.encoded.batch(rows, int(self._batch_lengths[block]), self.batch_size)

    def __iter__(self) -> Iterator[ExampleBatch]:
        return (self[step] for step in range(len(self)))

    def length_at(self, step: int) -> int:
        """The length of a step's batch, without making the batch. The same for every seed."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return int(self._batch_lengths[self._plan(epoch)[place]])

    def _plan(self, epoch: int) -> np.ndarray:
        return _generator(_PLAN, epoch).permutation(self.steps_per_epoch)

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch_at_hand is None or self._epoch_at_hand[0] != epoch:
            random = _generator(_ORDER, self.seed, epoch)
            order = [random.permutation(rows)[:taken] for rows, taken in zip(self._members, self._taken, strict=True)]
            self._epoch_at_hand = (epoch, np.concatenate(order))
        return self._epoch_at_hand[1]


def train_batches(
    encoded: EncodedSplit, *, batch_size: int, num_epochs: float = 0, seed: int, num_steps: int | None = None
) -> TrainBatches:
    """The training batches of a split; see `TrainBatches`."""
    return TrainBatches(encoded, batch_size=batch_size, num_epochs=num_epochs, seed=seed, num_steps=num_steps)


def eval_batches(
    encoded: EncodedSplit, *, batch_size: int, lengths: Sequence[int] | None = None
) -> Iterator[ExampleBatch]:
    """Every example once, from the longest to the shortest; the last batch is filled with rows of weight 0.

    `index` says where each row belongs. lengths: bucket lengths to use, such as those of the training batches, so that
    no new program is compiled; the data's own unless given. Where an example is longer than all of them, the longest
    example makes one more.
    """
    if not len(encoded):
        return
    if lengths is None:
        lengths = choose_lengths(encoded.longest, encoded.length)
    if encoded.longest.max() > max(lengths):
        lengths = (*lengths, *choose_lengths(encoded.longest, encoded.length, 1))
    buckets = np.unique(lengths)
    order = np.argsort(-encoded.longest, kind="stable")
    for first in range(0, len(encoded), batch_size):
        rows = order[first : first + batch_size]
        length = buckets[np.searchsorted(buckets, encoded.longest[rows[0]])]
        yield encoded.batch(rows, int(length), batch_size)


def num_eval_batches(encoded: EncodedSplit, batch_size: int) -> int:
    """How many batches `eval_batches` gives."""
    return math.ceil(len(encoded) / batch_size)


def _apportion(total: int, sizes: np.ndarray) -> np.ndarray:
    """`total` dealt out in proportion to `sizes`, in whole numbers (largest remainders, the first of equals)."""
    shares = total * sizes / max(1, sizes.sum())
    dealt = np.floor(shares).astype(np.int64)
    dealt[np.argsort(dealt - shares, kind="stable")[: total - dealt.sum()]] += 1
    return dealt


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([word % 2**64 for word in words])))
