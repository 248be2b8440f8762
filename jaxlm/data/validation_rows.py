"""Validation rows: held-out text in batches, each target exactly once and the same in every evaluation."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxlm.data.layouts.layout import IndependentRows, Layout, Reading, Source

SEED = 0


class ValidationRows(Sequence[Any]):
    """Batches of the rows of all sources in order; rows after the last are padding.

    layout: that of the rows. source_rows: number of rows of each source. num_targets: number of targets, or of pairs,
    in all batches of all processes.
    """

    num_targets: int
    _sources: Sequence["Source"] = ()

    def __init__(self, layout: "Layout", source_rows: Sequence[int], reading: "Reading"):
        self._layout, self._length, self._batch_size = layout, reading.length, reading.batch_size
        self._masked, host_rows = reading.masked, reading.host_rows
        self._row_ends = np.cumsum(source_rows, dtype=np.int64)
        self._within = np.arange(reading.batch_size) if host_rows is None else np.asarray(host_rows)

    def __len__(self) -> int:
        rows = int(self._row_ends[-1]) if len(self._row_ends) else 0
        return -(-rows // self._batch_size)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        batch = self._layout.empty(len(self._within), self._length, self._sources)
        numbers = index * self._batch_size + self._within
        for b, row in enumerate(numbers.tolist()):
            source = int(np.searchsorted(self._row_ends, row, side="right"))
            if source < len(self._row_ends):
                first = int(self._row_ends[source - 1]) if source else 0
                self._fill(source, row - first, batch, b)
        if not self._masked or batch.mask_seeds is not None:
            return batch
        from jaxlm.data.batch import mask_seeds

        return replace(batch, mask_seeds=mask_seeds(SEED, numbers))

    @abstractmethod
    def _fill(self, source: int, row: int, batch: Any, b: int) -> None:
        """Write row `row` of a source into row b of the batch."""


class ValidationSections(ValidationRows):
    """Rows of one training epoch of the sections of some stores."""

    def __init__(self, layout: "IndependentRows", reading: "Reading"):
        self._sources = layout.sources(reading.stores, length=reading.length, seed=SEED)
        self.num_targets = sum(source.targets for source in self._sources)
        super().__init__(layout, [source.rows for source in self._sources], reading)

    def _fill(self, source: int, row: int, batch: Any, b: int) -> None:
        self._sources[source].fill(row, batch, b, 0)
