"""Batches of token sequences in a few bucket sizes, which are chosen in advance from the data.

Every size is a program to compile and padding is wasted compute: a few bucket sizes are chosen, from the data alone, to
minimise the padding. A size is a pair of lengths: that of the source, which an encoder-decoder reads apart, and that of
the sequence itself. Models that read one sequence have sources of length 0.

`batch = f(seed, step)`: the size of a step depends on the data, the batch size and the epoch; the seed orders the
examples within that plan. So all seeds of a table, and all processes, run the same programs in the same order, and a
run resumes from its step number alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxlm.tasks.encoding import Encoded, Size
from jaxlm.tasks.input_formats import FORMATS

MAX_LENGTHS = 4
MAX_LENGTHS_OF_SOURCE = 2  # lengths beside each length of the source, if there are several
MULTIPLE = 8  # bucket lengths are multiples of it, for alignment
_ORDER, _PLAN, _MASKS = 0, 1, 2  # the first word of a random stream's seed: the purpose of the stream


def choose_lengths(longest: np.ndarray, limit: int, max_lengths: int = MAX_LENGTHS) -> tuple[int, ...]:
    """Return at most `max_lengths` bucket lengths, ascending, that minimise the padding of examples of these lengths.

    Candidates are multiples of 8; `limit` replaces one above it. Exact, by dynamic programming over the histogram:
    cost[k][j] is the least number of positions for all examples up to candidate j with k lengths, the last being j.
    """
    rounded = np.minimum(-(-longest // MULTIPLE) * MULTIPLE, limit)
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


def choose_sizes(encoded: Encoded) -> tuple[Size, ...]:
    """Return bucket sizes, ascending: lengths of the sources by `choose_lengths`, and beside each of these lengths of
    its rows."""
    sources, found = encoded.longest_source, list[Size]()
    source_lengths = choose_lengths(sources, encoded.source_limit)
    most = MAX_LENGTHS if len(source_lengths) == 1 else MAX_LENGTHS_OF_SOURCE
    of_source = np.searchsorted(source_lengths, sources)
    for number, source in enumerate(source_lengths):
        lengths = choose_lengths(encoded.longest[of_source == number], encoded.length, most)
        found += [Size(source, length) for length in lengths]
    return tuple(found)


def standard_sizes(largest: Size) -> tuple[Size, ...]:
    """Return doubling lengths up to a size, for rows that are streamed and cannot be measured in advance."""

    def doubling(most: int) -> tuple[int, ...]:
        return (*(2**power for power in range(5, 20) if 2**power < most), most)

    sources = doubling(largest.source) if largest.source else (0,)
    return tuple(Size(source, length) for source in sources for length in doubling(largest.length))


class TrainBatches:
    """The training batches of a split, by step: `batches[step]`, for any step from 0 on.

    An epoch has floor(n / batch_size) steps, as in GPT-1's code, and every example at most once; all batches are full.
    The n % batch_size examples that an epoch omits are taken from the buckets in proportion to their size, at random
    within each bucket. The remaining examples are ordered from the longest bucket to the shortest, shuffled within each
    bucket, and divided into batches; a batch that crosses a boundary holds the longest of its buckets. The batches of
    an epoch are shuffled too, independently of the seed. A data set smaller than a batch makes one batch per epoch,
    padded with rows of weight 0.

    Args:
      seed: orders the examples. num_steps: `len`.

    Attributes: sizes, those of all batches, ascending; steps_per_epoch.
    """

    def __init__(self, encoded: Encoded, *, batch_size: int, seed: int, num_steps: int) -> None:
        if not len(encoded):
            raise ValueError("a split must have examples to be batched, got none")
        self.encoded, self.batch_size, self.seed = encoded, batch_size, seed
        sizes = choose_sizes(encoded)
        self.steps_per_epoch = max(1, len(encoded) // batch_size)
        self._num_steps = num_steps
        buckets = bucket_of(sizes, encoded)
        # Longest bucket first, file order within: the base order, which every epoch shuffles within the buckets.
        self._members = [np.flatnonzero(buckets == bucket) for bucket in reversed(range(len(sizes)))]
        counts = np.array([len(members) for members in self._members])
        left_out = len(encoded) % batch_size if len(encoded) >= batch_size else 0
        self._taken = counts - _apportion(left_out, counts)
        ordered = np.repeat(np.array(sizes)[::-1], self._taken, axis=0)
        firsts = np.arange(self.steps_per_epoch) * batch_size
        self._batch_sizes = [Size(*ordered[first : first + batch_size].max(axis=0).tolist()) for first in firsts]
        self.sizes = tuple(sorted({*sizes, *self._batch_sizes}))
        self._cached_epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Any:
        if step < 0:
            raise IndexError(f"step must not be negative, got {step}")
        epoch, position = divmod(step, self.steps_per_epoch)
        block = self._plan(epoch)[position]
        rows = self._order(epoch)[block * self.batch_size : (block + 1) * self.batch_size]
        return self.encoded.batch(rows, self._batch_sizes[block], self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return (self[step] for step in range(len(self)))

    def size_at(self, step: int) -> Size:
        """Return the size of a step's batch without building it. It is the same for every seed."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._batch_sizes[self._plan(epoch)[position]]

    def rows_at(self, step: int) -> Encoded:
        """Return the rows that a step's batch is taken from."""
        return self.encoded

    def described(self, step: int) -> str:
        """Return the rows of a step's batch in words."""
        return f"{self.encoded.part} rows {self[step].index.tolist()} (0-based)"

    def _plan(self, epoch: int) -> np.ndarray:
        return _generator(_PLAN, epoch).permutation(self.steps_per_epoch)

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            random = _generator(_ORDER, self.seed, epoch)
            order = [random.permutation(rows)[:taken] for rows, taken in zip(self._members, self._taken, strict=True)]
            self._cached_epoch = (epoch, np.concatenate(order))
        return self._cached_epoch[1]


class AlternatingBatches:
    """Labelled and unlabelled batches in turn, the labelled one first: `batches[step]`, as `TrainBatches`.

    Each class has its own count of steps. An epoch is one pass over the labelled rows. An unlabelled batch is an
    `UnlabelledBatch`. mask_rate: the share of its words that are replaced by MASK in `masked`, a function of the seed
    and the step; 0: it has no such ids.

    Attributes: as those of `TrainBatches`; sizes, those of the labelled batches, then those of the unlabelled ones.
    """

    def __init__(
        self, labelled: TrainBatches, unlabelled: TrainBatches, num_steps: int, mask_rate: float = 0.0
    ) -> None:
        self._both, self._num_steps, self._mask_rate = (labelled, unlabelled), num_steps, mask_rate
        self.sizes = labelled.sizes + unlabelled.sizes
        self.steps_per_epoch = len(self._both) * labelled.steps_per_epoch

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Any:
        from jaxlm.data.batch import UnlabelledBatch  # it needs JAX, without which a command line is parsed

        batches, number = self._turn(step)
        found = batches[number]
        if step % 2 == 0:
            return found
        if self._mask_rate:
            tagged: Any = batches.encoded  # of words, as the head of cross-view training reads them
            random = _generator(_MASKS, batches.seed, number)
            found = replace(found, masked=tagged.masked(found, self._mask_rate, random))
        return UnlabelledBatch(**vars(found))

    def size_at(self, step: int) -> Size:
        """Return the size of a step's batch without building it. It is the same for every seed."""
        batches, number = self._turn(step)
        return batches.size_at(number)

    def rows_at(self, step: int) -> Encoded:
        """Return the rows that a step's batch is taken from."""
        return self._turn(step)[0].encoded

    def described(self, step: int) -> str:
        """Return the rows of a step's batch in words."""
        batches, number = self._turn(step)
        return batches.described(number)

    def _turn(self, step: int) -> tuple[TrainBatches, int]:
        """Return the batches of a step's class, and the number of the step among them."""
        return self._both[step % 2], step // 2


def training_batches(
    labelled: Encoded,
    unlabelled: Encoded | None,
    *,
    batch_size: int,
    seed: int,
    num_steps: int,
    mask_rate: float = 0.0,
) -> TrainBatches | AlternatingBatches:
    """Return the batches of a run, which alternate if it has unlabelled rows. mask_rate: of these."""
    batches = TrainBatches(labelled, batch_size=batch_size, seed=seed, num_steps=num_steps)
    if unlabelled is None:
        return batches
    others = TrainBatches(unlabelled, batch_size=batch_size, seed=seed, num_steps=num_steps)
    return AlternatingBatches(batches, others, num_steps, mask_rate)


def steps_of_epochs(
    input_format: str, encoded: Encoded, *, batch_size: int, num_epochs: float, alternates: bool = False
) -> int:
    """Return the number of updates in `num_epochs` passes over a training split, at least one.

    alternates: True if there is a step on an unlabelled batch after each on a labelled one.

    gpt1: floor(examples / batch) * epochs, as in GPT-1's code (train.py, line 387). bert: int(examples / batch *
    epochs), as in BERT's (run_classifier.py, line 843; run_squad.py, line 1160). Where an example has several rows (the
    windows of a question's text), examples are counted, as there.
    """
    examples = encoded.num_examples
    if FORMATS[input_format].whole_batches:
        steps = int(max(1, examples // batch_size) * num_epochs)
    else:
        steps = int(examples / batch_size * num_epochs)
    return max(1, steps) * (2 if alternates else 1)


def eval_batches(encoded: Encoded, *, batch_size: int, sizes: Sequence[Size] | None = None) -> Iterator[Any]:
    """Yield every example once, from the longest to the shortest; the last batch is padded with rows of weight 0.

    `index` is the example of each row. sizes: bucket sizes to use, such as those of the training batches, so that no
    new program is compiled; chosen from the data by default. If none of them holds the longest source and the longest
    sequence, a size that does is added.
    """
    if not len(encoded):
        return
    sources, lengths = encoded.longest_source, encoded.longest
    known = choose_sizes(encoded) if sizes is None else tuple(sizes)
    if not any(size.holds(sources.max(), lengths.max()) for size in known):
        (source,) = choose_lengths(sources, encoded.source_limit, 1)
        (length,) = choose_lengths(lengths, encoded.length, 1)
        known = (*known, Size(source, length))
    order = np.lexsort((-lengths, -sources))
    for first in range(0, len(encoded), batch_size):
        rows = order[first : first + batch_size]
        longest = sources[rows].max(), lengths[rows].max()
        yield encoded.batch(rows, min((size for size in known if size.holds(*longest)), key=sum), batch_size)


def bucket_of(sizes: Sequence[Size], encoded: Encoded) -> np.ndarray:
    """Return the index in ascending `sizes` of the first one that holds each row, int64 (rows,)."""
    table = np.array(sizes)
    holds = (encoded.longest_source[:, None] <= table[:, 0]) & (encoded.longest[:, None] <= table[:, 1])
    return holds.argmax(axis=1)


def _apportion(total: int, sizes: np.ndarray) -> np.ndarray:
    """Divide `total` in proportion to `sizes`, in integers (largest remainders, the first of equals)."""
    exact = total * sizes / max(1, sizes.sum())
    divided = np.floor(exact).astype(np.int64)
    divided[np.argsort(divided - exact, kind="stable")[: total - divided.sum()]] += 1
    return divided


def _generator(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([word % 2**64 for word in words])))
