"""Batches of token sequences in a few bucket lengths, which are chosen in advance from the data.

Every length is a program to compile and padding is wasted compute: a few bucket lengths are chosen, from the data
alone, to minimise the padding. `batch = f(seed, step)`: the length of a step depends on the data, the batch size and
the epoch; the seed orders the examples within that plan. So all seeds of a table, and all processes, run the same
programs in the same order, and a run resumes from its step number alone.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxlm.tasks.encoding import Encoded
from jaxlm.tasks.input_formats import FORMATS

if TYPE_CHECKING:
    from jaxlm.data.batch import ExampleBatch


MAX_LENGTHS = 4
MULTIPLE = 8  # bucket lengths are multiples of it, for alignment
_ORDER, _PLAN = 0, 1  # the first word of a random stream's seed: the purpose of the stream


def choose_lengths(longest: np.ndarray, limit: int, max_lengths: int = MAX_LENGTHS) -> tuple[int, ...]:
    """Return at most `max_lengths` bucket lengths, ascending, that minimise the padding of examples of these lengths.

    Candidates are multiples of 8; `limit` replaces one above it. Exact, by dynamic programming over the histogram:
    cost[k][j] is the least number of positions for all examples up to candidate j with k lengths, the last being j.
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
    """Return doubling lengths up to `limit`, for rows that are streamed and cannot be measured in advance."""
    return (*(2**power for power in range(5, 20) if 2**power < limit), limit)


class TrainBatches:
    """The training batches of a split, by step: `batches[step]`, for any step from 0 on.

    An epoch has floor(n / batch_size) steps, as in GPT-1's code, and every example at most once; all batches are full.
    The n % batch_size examples that an epoch omits are taken from the buckets in proportion to their size, at random
    within each bucket. The remaining examples are ordered from the longest bucket to the shortest, shuffled within each
    bucket, and divided into batches; a batch that crosses a boundary has the longer bucket's length. The batches of an
    epoch are shuffled too, independently of the seed. A data set smaller than a batch makes one batch per epoch, padded
    with rows of weight 0.

    Args:
      seed: orders the examples. num_steps: `len`.

    Attributes: lengths, the bucket lengths; steps_per_epoch.
    """

    def __init__(self, encoded: Encoded, *, batch_size: int, seed: int, num_steps: int) -> None:
        if not len(encoded):
            raise ValueError("a split must have examples to be batched, got none")
        self.encoded, self.batch_size, self.seed = encoded, batch_size, seed
        self.lengths = choose_lengths(encoded.longest, encoded.length)
        self.steps_per_epoch = max(1, len(encoded) // batch_size)
        self._num_steps = num_steps
        buckets = np.searchsorted(self.lengths, encoded.longest)
        # Longest bucket first, file order within: the base order, which every epoch shuffles within the buckets.
        self._members = [np.flatnonzero(buckets == bucket) for bucket in reversed(range(len(self.lengths)))]
        sizes = np.array([len(members) for members in self._members])
        left_out = len(encoded) % batch_size if len(encoded) >= batch_size else 0
        self._taken = sizes - _apportion(left_out, sizes)
        firsts = np.arange(self.steps_per_epoch) * batch_size
        position = np.searchsorted(np.cumsum(self._taken), firsts, side="right")
        self._batch_lengths = np.array(self.lengths[::-1])[position]
        self._cached_epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> "ExampleBatch":
        if step < 0:
            raise IndexError(f"step must not be negative, got {step}")
        epoch, position = divmod(step, self.steps_per_epoch)
        block = self._plan(epoch)[position]
        rows = self._order(epoch)[block * self.batch_size : (block + 1) * self.batch_size]
        return self.encoded.batch(rows, int(self._batch_lengths[block]), self.batch_size)

    def __iter__(self) -> Iterator["ExampleBatch"]:
        return (self[step] for step in range(len(self)))

    def length_at(self, step: int) -> int:
        """Return the length of a step's batch without building it. It is the same for every seed."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return int(self._batch_lengths[self._plan(epoch)[position]])

    def _plan(self, epoch: int) -> np.ndarray:
        return _generator(_PLAN, epoch).permutation(self.steps_per_epoch)

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            random = _generator(_ORDER, self.seed, epoch)
            order = [random.permutation(rows)[:taken] for rows, taken in zip(self._members, self._taken, strict=True)]
            self._cached_epoch = (epoch, np.concatenate(order))
        return self._cached_epoch[1]


def steps_of_epochs(input_format: str, encoded: Encoded, *, batch_size: int, num_epochs: float) -> int:
    """Return the number of updates in `num_epochs` passes over a training split, at least one.

    gpt1: floor(examples / batch) * epochs, as in GPT-1's code (train.py, line 387). bert: int(examples / batch *
    epochs), as in BERT's (run_classifier.py, line 843; run_squad.py, line 1160). Where an example has several rows (the
    windows of a question's text), examples are counted, as there.
    """
    examples = encoded.num_examples
    if FORMATS[input_format].whole_batches:
        return max(1, int(max(1, examples // batch_size) * num_epochs))
    return max(1, int(examples / batch_size * num_epochs))


def eval_batches(
    encoded: Encoded, *, batch_size: int, lengths: Sequence[int] | None = None
) -> Iterator["ExampleBatch"]:
    """Yield every example once, from the longest to the shortest; the last batch is padded with rows of weight 0.

    `index` is the example of each row. lengths: bucket lengths to use, such as those of the training batches, so that
    no new program is compiled; chosen from the data by default. If an example is longer than all of them, the length of
    the longest example is added.
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


def _apportion(total: int, sizes: np.ndarray) -> np.ndarray:
    """Divide `total` in proportion to `sizes`, in integers (largest remainders, the first of equals)."""
    exact = total * sizes / max(1, sizes.sum())
    divided = np.floor(exact).astype(np.int64)
    divided[np.argsort(divided - exact, kind="stable")[: total - divided.sum()]] += 1
    return divided


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([word % 2**64 for word in words])))
