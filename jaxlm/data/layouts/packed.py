"""Packed rows: whole documents that do not attend to each other; longer ones are split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np

from jaxlm.data.layouts.layout import FLAG, IndependentRows
from jaxlm.data.packing import PackingPlan
from jaxlm.data.store import RowOrigin

if TYPE_CHECKING:
    from jaxlm.data.batch import Batch
    from jaxlm.data.store import Section, Store


@dataclass(frozen=True)
class Packed(IndependentRows):
    """Rows of whole documents that do not attend to each other."""

    layout: Annotated[Literal["packed"], FLAG] = "packed"

    rows_name: ClassVar[str] = "packed rows"
    of_documents: ClassVar[bool] = True
    data_order: ClassVar[int | list[int]] = 2

    def source(self, store: "Store", section: "Section", *, length: int, seed: int, number: int) -> "PackedSection":
        """Return the packed documents of a section."""
        return PackedSection(store, section, length)

    def describe_validation(self, lengths: str, stores: Sequence["Store"]) -> str:
        """Return a noun phrase for the rows of the validation stores, and the tokens that are not predicted."""
        rows = super().describe_validation(lengths, stores)
        begun = all(store.end is not None for store in stores)
        return rows if begun else f"{rows}, the first token of a document is not predicted"


class PackedSection:
    """Packed rows of a section: segments number the documents, positions restart, no target crosses a boundary.

    The first input of a document is the end-of-document id, so that each of its tokens is a target. If the tokenizer
    has no such id, the first input is the first token, which is not a target.
    """

    def __init__(self, store: "Store", section: "Section", length: int):
        self.store, self.section = store, section
        self._begin, self._tokens = store.end, store.tokens
        self._plan = PackingPlan(store, section, length)
        self.targets, self.rows = self._plan.pairs, self._plan.rows

    def fill(self, row: int, batch: "Batch", b: int, epoch: int) -> None:
        """Write row `row` into row b of a batch."""
        ids, targets = batch.ids[b], batch.targets[b]
        at = 0
        sizes, begins = [], []
        for start, slots in self._plan.row(row):
            end = at + slots
            if self._begin is not None and start == 0:
                targets[at:end] = self._tokens[:slots]
                ids[at] = self._begin
                ids[at + 1 : end] = targets[at : end - 1]
            else:
                # Before it is the last target of the span before, or the end-of-document id of the document before.
                start -= self._begin is not None
                span = self._tokens[start : start + slots + 1]
                ids[at:end] = span[:-1]
                targets[at:end] = span[1:]
            sizes.append(slots)
            begins.append(at)
            at = end
        batch.segments[b, :at] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        batch.positions[b, :at] = np.arange(at) - np.repeat(begins, sizes)
        batch.weights[b, :at] = 1

    def origin(self, row: int, epoch: int) -> list[RowOrigin]:
        """Return the origins of the documents of a row, in order."""
        more = self._begin is None  # the first token of a span is its input, and a target in the previous span
        return [self.store.origin(self.section, start, start + slots + more) for start, slots in self._plan.row(row)]
