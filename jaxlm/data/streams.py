"""Streams: row b of each batch continues row b of the previous batch.

For models that carry a state from batch to batch: truncated backpropagation through time (Zaremba et al., 2014,
"Recurrent neural network regularization", section 4.1), the memory of Transformer-XL (Dai et al., 2019). As in
the other layouts, the batch is arithmetic on the step; it also depends on the batch size, and on no seed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxlm.data.batch import Batch
from jaxlm.data.origin import RowOrigin
from jaxlm.data.rows import empty_batch
from jaxlm.data.store import Store
from jaxlm.errors import InputError


class Text:
    """Concatenated tokens of several stores. tokens: their number."""

    def __init__(self, stores: Sequence[Store]):
        self._stores = tuple(stores)
        self._starts = np.append(0, np.cumsum([store.num_tokens for store in stores], dtype=np.int64)).tolist()
        self.tokens: int = self._starts[-1]

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the tokens from `start` up to `end`, int32."""
        spans = [
            store.tokens[max(start - first, 0) : end - first]
            for store, first in zip(self._stores, self._starts, strict=False)
            if start < first + store.num_tokens and first < end
        ]
        return np.concatenate(spans, dtype=np.int32)

    def origins(self, start: int, end: int) -> list[RowOrigin]:
        """Return the origins of the tokens from `start` up to `end`, one per section of a store."""
        found = []
        for store, first in zip(self._stores, self._starts, strict=False):
            for section in store.sections:
                own = first + section.first_token
                token, last = max(start, own) - first, min(end, own + section.tokens) - first
                if token < last:
                    document = int(np.searchsorted(store.document_starts, token, side="right")) - 1
                    offset = token - int(store.document_starts[document])
                    found.append(RowOrigin(str(store.path), section.source, document, offset, last - token))
        return found


class StreamRows:
    """Endless rows of a run in streams: row r belongs to stream r % batch_size.

    The T concatenated tokens of the stores are split into B = batch_size streams of S = floor((T - 1) / B)
    inputs: stream b has the inputs b S to b S + S - 1, and the tokens that follow them as targets. Its rows are
    spans of `length` of them, one per step; the last target of a row is the first input of the next. S mod length
    inputs at the end of each stream, and (T - 1) mod B at the end of the text, are in no row. Every epoch has the same
    streams. rows: number of rows per epoch. unused: number of inputs in no row.

    Raises InputError if the text is too short for one row per stream.
    """

    def __init__(self, stores: Sequence[Store], length: int, batch_size: int):
        self._text = Text(stores)
        inputs = max(self._text.tokens - 1, 0)
        if inputs < length * batch_size:
            most = inputs // length
            name, most, got = ("batch_size", most, batch_size) if most else ("length", inputs, length)
            raise InputError(
                f"{name} must be at most {most} for streams of {self._text.tokens:,} tokens in rows of {length}, "
                f"got {got}; give a smaller one, or more text"
            )
        self.length, self.batch_size = length, batch_size
        self._weighted = any(section.weight is not None for store in stores for section in store.sections)
        self._stream = inputs // batch_size
        self.rows_per_stream = self._stream // length
        self.rows = self.rows_per_stream * batch_size
        self.unused = inputs - self.rows * length

    def empty(self, rows: int) -> Batch:
        """Return a batch of padding, (rows, L)."""
        return empty_streams(rows, self.length)

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows of these indices as one batch, (len(indices), L)."""
        batch = self.empty(len(indices))
        for b, index in enumerate(indices):
            start, first = self._place(int(index))
            span = self._text.read(start, start + self.length + 1)
            batch.ids[b] = span[:-1]
            batch.targets[b] = span[1:]
            batch.begins[b] = first
        batch.positions[:] = np.arange(self.length)
        batch.segments[:] = 1
        batch.weights[:] = 1
        return batch

    def origin(self, index: int) -> list[RowOrigin]:
        """Return the origins of a row's tokens, its last target included."""
        start, _ = self._place(index)
        return self._text.origins(start, start + self.length + 1)

    def description(self) -> str:
        """Return one line on the streams for logs."""
        return (
            f"{self.batch_size} streams of {self.rows_per_stream * self.length:,} tokens, {self.rows_per_stream:,} "
            f"steps per epoch; {self.unused:,} tokens, at the ends of the streams and of the text, are in no row"
            + ("; the weights given at preparation are not used" if self._weighted else "")
        )

    def _place(self, index: int) -> tuple[int, bool]:
        """Return the token at which row `index` begins, and whether it is the first row of its stream."""
        step, stream = divmod(index, self.batch_size)
        row = step % self.rows_per_stream
        return stream * self._stream + row * self.length, row == 0


def empty_streams(rows: int, length: int) -> Batch:
    """Return a batch of padding, (rows, length), with `begins` False everywhere."""
    return replace(empty_batch(rows, length), begins=np.zeros(rows, bool))
