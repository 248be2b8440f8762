"""A split of a task as rows of tokens: the interface of all kinds, and the kinds that read whole texts.

Batches are built, and outputs put in order, independently of the kind.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxlm.data.batch import ExampleBatch


class Encoded(Protocol):
    """A split of a task as rows of tokens: one row per example, or per window of a question's text.

    `len` counts rows. part: the split's name. labels: the loss targets, in the form of the kind. truncated: number of
    truncated examples. longest: int32 (rows,), the longest sequence of each row. length: the limit. num_sequences:
    sequences per row. num_examples: examples, from which the number of steps of a run is computed.
    """

    @property
    def part(self) -> str: ...
    @property
    def labels(self) -> np.ndarray: ...
    @property
    def labelled(self) -> bool: ...
    @property
    def truncated(self) -> int: ...
    @property
    def longest(self) -> np.ndarray: ...
    @property
    def length(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_examples(self) -> int: ...
    def __len__(self) -> int: ...
    def batch(self, examples: np.ndarray, length: int, batch_size: int) -> ExampleBatch:
        """Return these rows padded to `length`, and rows of weight 0 up to `batch_size`."""
        ...


@dataclass(frozen=True)
class EncodedSplit:
    """The token sequences of n examples, C per example, concatenated.

    ids: int32 (total,). starts: int64 (n * C + 1,): sequence c of example i is ids[starts[s] : starts[s + 1]] with
    s = i * C + c. second: int32 (n * C,), the index at which the second segment of each sequence begins. reads_last:
    whether the head reads the last token of a sequence; otherwise the first.
    labels: int32 (n,), float32 (n,) or float32 (n, labels), the loss targets; zeros where unlabelled.
    truncated: number of truncated examples. longest: int32 (n,), the longest sequence of each example.
    length: the maximum length. pad: the padding id. groups: the group of each example, or empty where there are none.
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
    second: np.ndarray
    reads_last: bool
    groups: tuple[str, ...] = ()
    part: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def sequences(self, example: int) -> list[np.ndarray]:
        """Return the token sequences of one example."""
        first = example * self.num_sequences
        bounds = self.starts[first : first + self.num_sequences + 1]
        return [self.ids[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]

    def batch(self, examples: np.ndarray, length: int, batch_size: int) -> ExampleBatch:
        """Return these examples padded to `length`, and rows of weight 0 up to `batch_size`."""
        shape = (batch_size, self.num_sequences)
        ids = np.full((*shape, length), self.pad, np.int32)
        lengths = np.zeros(shape, np.int32)
        for row, example in enumerate(examples):
            for choice, sequence in enumerate(self.sequences(int(example))):
                ids[row, choice, : len(sequence)] = sequence
                lengths[row, choice] = len(sequence)
        extract = np.maximum(lengths - 1, 0) if self.reads_last else np.zeros_like(lengths)
        second = np.zeros_like(lengths)
        second[: len(examples)] = self.second.reshape(-1, self.num_sequences)[examples]
        labels = np.zeros((batch_size, *self.labels.shape[1:]), self.labels.dtype)
        labels[: len(examples)] = self.labels[examples]
        weights, index = filled_rows(examples, batch_size)
        return ExampleBatch(
            ids=ids, lengths=lengths, extract=extract, second=second, labels=labels, weights=weights, index=index
        )


def filled_rows(examples: np.ndarray, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the float32 weights and int32 index of a batch that holds these rows first, then padding rows."""
    weights, index = np.zeros(batch_size, np.float32), np.full(batch_size, -1, np.int32)
    weights[: len(examples)] = 1
    index[: len(examples)] = examples
    return weights, index
