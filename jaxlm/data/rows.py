"""Training rows: row r of a run is a pure function of its stores, its layout, its seed and r.

Each section of a store is a source of rows. In every epoch of a section each of its rows occurs once, in an order
derived from (seed, section, epoch): see `jaxlm/data/order.py`. Sections are interleaved evenly by their weights. All of
this is arithmetic on r, so rows have random access: resuming costs nothing, and any number of processes divide the work
by index.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.data.layouts.layout import IndependentRows, Source
from jaxlm.data.order import ORDERS
from jaxlm.data.store import PairOrigin, RowOrigin, Store
from jaxlm.errors import InputError

# Sum of the integers that weights become unless they are row counts, so that mixing is exact arithmetic.
_WEIGHT_SUM = 1 << 40
_ORDER = 1  # version of the order of rows, part of its key


@dataclass(frozen=True)
class _Part:
    """Rows of one source that are shuffled together: `rows` rows from `first` on."""

    source: Source
    first: int
    rows: int
    number: int


class TrainingRows:
    """Endless rows of a run.

    A section with more rows than its order is limited to is ordered in parts that are interleaved evenly.
    data: their layout. sources: one per section. rows: number per pass.
    """

    def __init__(
        self,
        data: IndependentRows,
        sources: Sequence[Source],
        weights: Sequence[int],
        length: int,
        seed: int,
    ):
        self._data, self.length = data, length
        self.sources, self.rows = tuple(sources), sum(source.rows for source in sources)
        self._seed, self._order = seed % 2**64, ORDERS[data.order]
        self._parts: list[_Part] = []
        self._weights: list[int] = []
        counts = [-(-source.rows // self._order.most_rows) for source in sources]
        for source, weight, count in zip(sources, weights, counts, strict=True):
            edges = [source.rows * k // count for k in range(count + 1)]
            for first, end in itertools.pairwise(edges):
                self._parts.append(_Part(source, first, end - first, len(self._parts)))
                self._weights.append(weight * math.lcm(*counts) // count)
        self._total = sum(self._weights)

    def empty(self, rows: int) -> Batch | PairBatch:
        """Return a batch of padding, (rows, L)."""
        return self._data.empty(rows, self.length, self.sources)

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch | PairBatch:
        """Return the rows of these indices as one batch, (len(indices), L)."""
        batch: Any = self.empty(len(indices))

        def fill(b: int) -> None:
            part, row, epoch = self._place(int(indices[b]))
            part.source.fill(row, batch, b, epoch)

        # The rows of a store at a URL wait for answers, so they are read side by side.
        remote = next((source.store.remote for source in self.sources if source.store.remote), None)
        for _ in (remote.pool.map if remote else map)(fill, range(len(indices))):
            pass
        return batch

    def origin(self, index: int) -> list[RowOrigin] | list[PairOrigin]:
        """Return the origins of the tokens of a row, in order."""
        part, row, epoch = self._place(index)
        return part.source.origin(row, epoch)

    def inputs(self, steps: int) -> int:
        """Return the slots of one row of the batch in the first `steps` steps."""
        return steps * self._data.row_tokens(self.length)

    def description(self) -> str | None:
        """Return one line on the rows for logs, or None if there is nothing to say."""
        return self._data.describe_sources(self.sources)

    def _place(self, index: int) -> tuple[_Part, int, int]:
        """Return the part of row `index`, the row in its source, and the epoch of that part."""
        part, taken = self._part_of(index)
        epoch, at = divmod(taken, part.rows)
        # A tuple and not a sum, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
        key = (_ORDER, self._seed, part.number, epoch)
        return part, part.first + self._order.row_at(at, part.rows, key), epoch

    def _part_of(self, index: int) -> tuple[_Part, int]:
        """Return the part that row `index` belongs to, and the number of earlier rows of that part.

        Of the first k rows that reach a part, floor(k * rest / all) go on to the parts after it, where `rest` is the
        sum of their weights and `all` includes the part's own: the rows of each part are spread evenly without end.
        """
        before, after, remaining = index, index + 1, self._total
        for part, weight in zip(self._parts[:-1], self._weights, strict=False):
            rest = remaining - weight
            on_before, on_after = before * rest // remaining, after * rest // remaining
            if on_before == on_after:
                return part, before - on_before
            before, after, remaining = on_before, on_after, rest
        return self._parts[-1], before


def training_rows(stores: Sequence[Store], data: IndependentRows, *, length: int, seed: int) -> TrainingRows:
    """Return the endless, index-addressed rows of a run.

    Row r depends on the stores, layout, weights, length, seed and r alone.
    Raises InputError if a section has no rows, or the weights do not fit the stores.
    """
    data.check()
    sources = data.sources(stores, length=length, seed=seed)
    for source in sources:
        if source.rows == 0:
            section = source.section
            raise InputError(
                f"{source.store.place}: source {section.source} holds {section.tokens} tokens in {section.documents} "
                "documents, too few for an input and a target; prepare the store without it"
            )
    return TrainingRows(data, sources, mixture_weights(sources, stores, data.weights), length, seed)


def mixture_weights(sources: Sequence[Source], stores: Sequence[Store], weights: Sequence[float]) -> list[int]:
    """Return the integer weight of each section in the mixture of rows.

    A store's weight is its value in data.weights, or its number of rows if there are none. Within a store, it is
    divided in proportion to the sections' weights from preparation, or to their numbers of rows if they have none.
    """
    if not weights and all(section.weight is None for store in stores for section in store.sections):
        return [source.rows for source in sources]
    mixture: list[float] = []
    for number, store in enumerate(stores):
        rows = [source.rows for source in sources if source.store is store]
        given = [section.weight for section in store.sections]
        own = [float(weight) for weight in given if weight is not None] if None not in given else rows
        of_store = weights[number] if weights else sum(rows)
        mixture += [of_store * weight / sum(own) for weight in own]
    return [max(1, round(_WEIGHT_SUM * weight / sum(mixture))) for weight in mixture]
