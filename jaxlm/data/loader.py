"""Loader of batches: training steps with prefetching threads.

Step s holds rows s * B to (s + 1) * B - 1 for any number of processes, each of which reads only its own rows. The
state of the loader is the number of the step.
"""

import sys
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.data.origin import PairOrigin, RowOrigin
from jaxlm.data.phases import PhasedRows
from jaxlm.data.rows import TrainingRows
from jaxlm.data.streams import StreamRows

_THREADS = 2

Rows = TrainingRows | StreamRows | PhasedRows


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
