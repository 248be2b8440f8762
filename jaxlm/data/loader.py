"""Loaders of batches: training steps with prefetching threads, and validation text exactly once.

Step s holds rows s * B to (s + 1) * B - 1 for any number of processes, each of which reads only its own rows. The
state of the loader is the number of the step.
"""

import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import grain
import numpy as np

from jaxlm.data.batch import Batch, PairBatch, mask_seeds
from jaxlm.data.config import SentencePairs
from jaxlm.data.origin import PairOrigin, RowOrigin
from jaxlm.data.pairs import Pairs, empty_pairs
from jaxlm.data.phases import PhasedRows
from jaxlm.data.rows import Packed, TrainingRows, empty_batch
from jaxlm.data.store import Store
from jaxlm.data.streams import StreamRows, Text, empty_streams
from jaxlm.data.versions import CURRENT, DataVersions

_THREADS = 2
_VALIDATION_SEED = 0

Rows = TrainingRows | StreamRows | PhasedRows
B = TypeVar("B", Batch, PairBatch)


class _Batches(grain.MapDataset):
    """Grain data set whose element s is this process's rows of step first_step + s."""

    def __init__(self, rows: Rows, batch_size: int, host_rows: np.ndarray, first_step: int):
        super().__init__()
        self._rows, self._batch_size, self._host_rows, self._first_step = rows, batch_size, host_rows, first_step

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size - self._first_step

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return batch_at(self._rows, self._first_step + index, self._batch_size, self._host_rows)


def batches(
    rows: Rows, *, batch_size: int, host_rows: np.ndarray, first_step: int, prefetch: int = 4
) -> Iterator[Batch | PairBatch]:
    """Return the endless batches of steps first_step, first_step + 1, …, with `prefetch` read ahead (0: none).

    batch_size: rows of the global batch. host_rows: indices in it that this process reads, in this order.
    """
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(_Batches(rows, batch_size, np.asarray(host_rows), first_step).to_iter_dataset(options))


def batch_at(rows: Rows, step: int, batch_size: int, host_rows: np.ndarray | None = None) -> Any:
    """Return the batch of a step, or this process's rows of it: a PairBatch for rows of pairs, otherwise a Batch."""
    within = np.arange(batch_size) if host_rows is None else host_rows
    return rows.read([step * batch_size + int(row) for row in within])


def row_origins(rows: Rows, step: int, batch_size: int) -> list[list[RowOrigin] | list[PairOrigin]]:
    """Return the origins of each row of a step's global batch."""
    return [rows.origin(step * batch_size + row) for row in range(batch_size)]


def describe_rows(rows: Rows, step: int, batch_size: int, most: int = 8) -> str:
    """Return one line with the origins of the first `most` rows of a step."""
    named = []
    for row in range(min(batch_size, most)):
        first, *others = rows.origin(step * batch_size + row)
        named.append(f"{first} and {len(others)} more" if others else str(first))
    more = f", and {batch_size - most} more" if batch_size > most else ""
    return f"rows {step * batch_size} to {(step + 1) * batch_size - 1}: {', '.join(named)}{more}"


class _Validation(Sequence[B]):
    """Batches of the rows of all sources in order; rows after the last are padding.

    masked: whether rows of text get seeds for the masks of a masked language model, the same in every evaluation.
    """

    masked = False

    def __init__(self, source_rows: Sequence[int], batch_size: int, host_rows: np.ndarray | None):
        self._row_ends = np.cumsum(source_rows, dtype=np.int64)
        self._batch_size = batch_size
        self._within = np.arange(batch_size) if host_rows is None else np.asarray(host_rows)

    def __len__(self) -> int:
        rows = int(self._row_ends[-1]) if len(self._row_ends) else 0
        return -(-rows // self._batch_size)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        batch = self._empty(len(self._within))
        for b, row in enumerate((index * self._batch_size + self._within).tolist()):
            source = int(np.searchsorted(self._row_ends, row, side="right"))
            if source < len(self._row_ends):
                first = int(self._row_ends[source - 1]) if source else 0
                self._fill(source, row - first, batch, b)
        if self.masked:
            numbers = index * self._batch_size + self._within
            batch = replace(batch, mask_seeds=mask_seeds(_VALIDATION_SEED, numbers))
        return batch

    @abstractmethod
    def _empty(self, rows: int) -> B: ...

    @abstractmethod
    def _fill(self, source: int, row: int, batch: B, b: int) -> None:
        """Write row `row` of a source into row b of the batch."""


class ValidationWindows(_Validation[Batch]):
    """Windows of stores in order, with each token a target exactly once; rows after the end have weight 0.

    Each store begins a new row. Its first token is predicted from the end-of-document id; if the tokenizer has none,
    this token is not predicted. num_tokens: number of targets in all batches of all processes. targets: of each store.
    """

    def __init__(self, stores: Sequence[Store], length: int, batch_size: int, host_rows: np.ndarray | None):
        self._tokens = [store.tokens for store in stores]
        self._length = length
        self._ends: list[int | None] = [store.description["tokenizer"].get("end") for store in stores]
        self.targets = [max(0, store.num_tokens - (end is None)) for store, end in zip(stores, self._ends, strict=True)]
        self.num_tokens = sum(self.targets)
        super().__init__([-(-count // length) for count in self.targets], batch_size, host_rows)

    def _empty(self, rows: int) -> Batch:
        return empty_batch(rows, self._length)

    def _fill(self, source: int, row: int, batch: Batch, b: int) -> None:
        start = row * self._length
        self.fill_targets(source, start, min(self._length, self.targets[source] - start), batch, b)

    def fill_targets(self, source: int, start: int, slots: int, batch: Batch, b: int) -> None:
        """Write `slots` targets of a store, from number `start` on, and their inputs into row b of a batch."""
        tokens, end = self._tokens[source], self._ends[source]
        # If the first token is a target, targets begin at token 0 and inputs one token earlier.
        first = start + (end is None)
        batch.targets[b, :slots] = tokens[first : first + slots]
        batch.ids[b, 1:slots] = batch.targets[b, : slots - 1]
        batch.ids[b, 0] = tokens[first - 1] if first else end
        batch.positions[b, :slots] = np.arange(slots)
        batch.segments[b, :slots] = 1
        batch.weights[b, :slots] = 1


class ValidationSliding(_Validation[Batch]):
    """Overlapping windows of `length` inputs, each moved by `stride`, with each token a target exactly once.

    Only the last `stride` targets of a window have weight 1: each is given at least length - stride tokens before it,
    or all of its store. Windows at the beginning of a store are shorter. Otherwise as `ValidationWindows`.
    """

    def __init__(
        self, stores: Sequence[Store], length: int, stride: int, batch_size: int, host_rows: np.ndarray | None
    ):
        self._windows = ValidationWindows(stores, length, batch_size, host_rows)
        self._length, self._stride, self.num_tokens = length, stride, self._windows.num_tokens
        super().__init__([-(-count // stride) for count in self._windows.targets], batch_size, host_rows)

    def _empty(self, rows: int) -> Batch:
        return empty_batch(rows, self._length)

    def _fill(self, source: int, row: int, batch: Batch, b: int) -> None:
        first, end = row * self._stride, min((row + 1) * self._stride, self._windows.targets[source])
        start = max(0, end - self._length)
        self._windows.fill_targets(source, start, end - start, batch, b)
        batch.weights[b, : first - start] = 0


class ValidationPacked(_Validation[Batch]):
    """Packed rows of stores, with the targets of one training epoch.

    Documents do not attend to each other. Rows after the end have weight 0. num_tokens: number of targets in all
    batches of all processes.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        length: int,
        batch_size: int,
        host_rows: np.ndarray | None,
        versions: DataVersions,
    ):
        self._sources = [Packed(store, section, length, versions) for store in stores for section in store.sections]
        self._length = length
        self.num_tokens = sum(source.pairs for source in self._sources)
        super().__init__([source.rows for source in self._sources], batch_size, host_rows)

    def _empty(self, rows: int) -> Batch:
        return empty_batch(rows, self._length)

    def _fill(self, source: int, row: int, batch: Batch, b: int) -> None:
        self._sources[source].fill(row, batch, b, 0)


class ValidationStreams(_Validation[Batch]):
    """Concatenated stores in batch_size streams of equal length, with each token a target exactly once.

    Row b of a batch continues row b of the previous batch; `begins` is True in the first batch alone. Streams end in
    padding of weight 0. The first token of the text is predicted from the end-of-document id; if the tokenizer has
    none, this token is not predicted. num_tokens: number of targets in all batches of all processes.
    """

    def __init__(self, stores: Sequence[Store], length: int, batch_size: int, host_rows: np.ndarray | None):
        self._text, self._length = Text(stores), length
        self._end = stores[0].end if stores else None
        self.num_tokens = max(0, self._text.tokens - (self._end is None))
        self._stream = -(-self.num_tokens // batch_size)
        super().__init__([-(-self._stream // length) * batch_size], batch_size, host_rows)

    def _empty(self, rows: int) -> Batch:
        return empty_streams(rows, self._length)

    def _fill(self, source: int, row: int, batch: Batch, b: int) -> None:
        step, stream = divmod(row, self._batch_size)
        batch.begins[b] = step == 0
        start = stream * self._stream + step * self._length
        slots = min(self._length, (stream + 1) * self._stream - start, self.num_tokens - start)
        if slots <= 0:
            return
        first = start + (self._end is None)  # position of the first target in the text; its input is one token earlier
        batch.targets[b, :slots] = self._text.read(first, first + slots)
        batch.ids[b, 1:slots] = batch.targets[b, : slots - 1]
        batch.ids[b, 0] = self._text.read(first - 1, first)[0] if first else self._end
        batch.positions[b, :slots] = np.arange(slots)
        batch.segments[b, :slots] = 1
        batch.weights[b, :slots] = 1


class ValidationPairs(_Validation[PairBatch]):
    """Pairs of epoch 0 of some stores, in order and from a fixed seed, with the same pairs and masks in every run.

    Each pair occurs once; rows after the end are padding. num_pairs: number in all batches of all processes.
    pairs_per_row: P.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        data: SentencePairs,
        length: int,
        batch_size: int,
        host_rows: np.ndarray | None,
        versions: DataVersions,
    ):
        sections = [(store, section) for store in stores for section in store.sections]
        self._sources = [
            Pairs(store, section, data, length=length, seed=_VALIDATION_SEED, number=number, versions=versions)
            for number, (store, section) in enumerate(sections)
        ]
        self._length = length
        self.num_pairs = sum(len(source.plan.starts) for source in self._sources)
        self.pairs_per_row = max((source.most for source in self._sources), default=0)
        super().__init__([source.rows for source in self._sources], batch_size, host_rows)

    def _empty(self, rows: int) -> PairBatch:
        return empty_pairs(rows, self._length, self.pairs_per_row)

    def _fill(self, source: int, row: int, batch: PairBatch, b: int) -> None:
        self._sources[source].fill(row, batch, b, 0)


def validation_pairs(
    stores: Sequence[Store],
    data: SentencePairs,
    *,
    length: int,
    batch_size: int,
    host_rows: np.ndarray | None = None,
    versions: DataVersions = CURRENT,
) -> ValidationPairs:
    """Return every pair of epoch 0 of the stores once, in batches of which this process reads `host_rows`."""
    return ValidationPairs(stores, data, length, batch_size, host_rows, versions)


def validation_batches(
    stores: Sequence[Store],
    *,
    length: int,
    batch_size: int,
    host_rows: np.ndarray | None = None,
    layout: Literal["windows", "packed", "streams"] = "windows",
    stride: int | None = None,
    versions: DataVersions = CURRENT,
    masked: bool = False,
) -> ValidationWindows | ValidationSliding | ValidationPacked | ValidationStreams:
    """Return every token of the stores as a target once, in batches of which this process reads `host_rows`.

    layout: windows, across documents and in order; packed, each document by itself; or streams, where each row of a
    batch continues that of the previous batch. stride: of windows that overlap. masked: whether rows get seeds
    for masks.
    """
    found: ValidationWindows | ValidationSliding | ValidationPacked | ValidationStreams
    if layout == "streams":
        found = ValidationStreams(stores, length, batch_size, host_rows)
    elif layout == "packed":
        found = ValidationPacked(stores, length, batch_size, host_rows, versions)
    elif stride is not None:
        found = ValidationSliding(stores, length, stride, batch_size, host_rows)
    else:
        found = ValidationWindows(stores, length, batch_size, host_rows)
    found.masked = masked
    return found
