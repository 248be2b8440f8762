"""A split of a task as rows of tokens: what all kinds share, and the kinds that read whole texts.

Batches are built, and outputs put in order, independently of the kind.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxlm.data.batch import ExampleBatch


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A split of a task as rows of tokens: one row per example, or per window of a question's text.

    `len` counts rows. part: the name of the split. labels: the loss targets of the kind, zeros where unlabelled.
    truncated: number of truncated examples. longest: int32 (rows,), the longest sequence of each row. length: the
    limit. pad: the padding id. num_sequences: sequences per row.
    """

    part: str = ""
    labels: np.ndarray
    labelled: bool
    truncated: int
    longest: np.ndarray
    length: int
    pad: int
    num_sequences: int = 1

    def __len__(self) -> int:
        return len(self.longest)

    @property
    def num_examples(self) -> int:
        """The number of examples, from which the number of steps of a run is computed."""
        return len(self)

    def example_of(self, row: int) -> int:
        """Return the number of the example of a row."""
        return row

    def sequences(self, row: int) -> list[np.ndarray]:
        """Return the token sequences of a row."""
        raise NotImplementedError

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return `extract`, `second` and `labels` of a batch that begins with these rows; see `ExampleBatch`."""
        raise NotImplementedError

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> "ExampleBatch":
        """Return these rows padded to `length`, and rows of weight 0 up to `batch_size`."""
        from jaxlm.data.batch import ExampleBatch  # it needs JAX, without which a command line is parsed

        ids = np.full((batch_size, self.num_sequences, length), self.pad, np.int32)
        lengths = np.zeros(ids.shape[:2], np.int32)
        for position, row in enumerate(rows):
            for number, sequence in enumerate(self.sequences(int(row))):
                ids[position, number, : len(sequence)] = sequence
                lengths[position, number] = len(sequence)
        weights, index = np.zeros(batch_size, np.float32), np.full(batch_size, -1, np.int32)
        weights[: len(rows)] = 1
        index[: len(rows)] = rows
        marks = self.marks(rows, lengths, length)
        return ExampleBatch(ids=ids, lengths=lengths, weights=weights, index=index, **marks)


@dataclass(frozen=True, kw_only=True)
class EncodedSplit(Encoded):
    """The token sequences of n examples, C per example, concatenated.

    ids: int32 (total,). starts: int64 (n * C + 1,): sequence c of example i is ids[starts[s] : starts[s + 1]] with
    s = i * C + c. second: int32 (n * C,), the index at which the second segment of each sequence begins. reads_last:
    whether the head reads the last token of a sequence; otherwise the first. labels: int32 (n,), float32 (n,) or
    float32 (n, labels). groups: the group of each example, or empty where there are none.
    """

    ids: np.ndarray
    starts: np.ndarray
    second: np.ndarray
    reads_last: bool
    groups: tuple[str, ...] = ()

    def sequences(self, row: int) -> list[np.ndarray]:
        first = row * self.num_sequences
        bounds = self.starts[first : first + self.num_sequences + 1]
        return [self.ids[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        extract = np.maximum(lengths - 1, 0) if self.reads_last else np.zeros_like(lengths)
        second = np.zeros_like(lengths)
        second[: len(rows)] = self.second.reshape(-1, self.num_sequences)[rows]
        labels = np.zeros((len(lengths), *self.labels.shape[1:]), self.labels.dtype)
        labels[: len(rows)] = self.labels[rows]
        return {"extract": extract, "second": second, "labels": labels}
