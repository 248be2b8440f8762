"""Windows: rows of consecutive tokens, across documents."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxlm.data.layouts.layout import FLAG, IndependentRows, Reading
from jaxlm.data.validation_rows import ValidationRows

if TYPE_CHECKING:
    from jaxlm.data.batch import Batch
    from jaxlm.data.store import RowOrigin, Section, Store


@dataclass(frozen=True)
class Windows(IndependentRows):
    """Rows of consecutive tokens, across documents."""

    layout: Annotated[Literal["windows"], FLAG] = "windows"

    rows_name: ClassVar[str] = "windows"
    overlaps: ClassVar[bool] = True

    def source(self, store: "Store", section: "Section", *, length: int, seed: int, number: int) -> "WindowsOfSection":
        """Return the windows of a section."""
        return WindowsOfSection(store, section, length)

    def validation_rows(self, reading: Reading) -> "ValidationWindows":
        """Return the windows of the stores in order; see `ValidationWindows`."""
        return ValidationWindows(reading)

    def mask_slots(self, batch: Any, rate: float) -> int:
        """Return the maximum number of masked tokens in a row, which is one segment."""
        from jaxlm.data.pairs import mask_slots

        return mask_slots(batch.ids.shape[1], 1, rate)


class WindowsOfSection:
    """Windows of a section; the last row may be short."""

    def __init__(self, store: "Store", section: "Section", length: int):
        self.store, self.section, self._length = store, section, length
        self._tokens = store.tokens  # not np.asarray, which would read and check all of it
        self.targets = max(section.tokens - 1, 0)
        self.rows = -(-self.targets // length)

    def fill(self, row: int, batch: "Batch", b: int, epoch: int) -> None:
        """Write row `row` into row b of a batch."""
        start = row * self._length
        slots = min(self._length, self.targets - start)
        start += self.section.first_token
        span = self._tokens[start : start + slots + 1]
        batch.fill_row(b, span[0], span[1:])

    def origin(self, row: int, epoch: int) -> "list[RowOrigin]":
        """Return the origin of a row's tokens, its last target included."""
        start = row * self._length
        token, tokens = self.section.first_token + start, min(self._length, self.targets - start) + 1
        return [self.store.origin(self.section, token, token + tokens)]


class ValidationWindows(ValidationRows):
    """Windows of stores in order, with each token a target exactly once; rows after the end have weight 0.

    Each store begins a new row. Its first token is predicted from the end-of-document id; if the tokenizer has none,
    this token is not predicted. stride: move each window by `stride` tokens, so that they overlap, instead of by its
    length. Only the last `stride` targets of a window then have weight 1: each is given at least length - stride tokens
    before it, or all of its store. Windows at the beginning of a store are shorter.
    """

    def __init__(self, reading: Reading, *, stride: int | None = None):
        stores = reading.stores
        self._tokens = [store.tokens for store in stores]
        self._overlap = stride is not None
        self._stride = reading.length if stride is None else stride
        self._ends: list[int | None] = [store.description["tokenizer"].get("end") for store in stores]
        self._targets = [
            max(0, store.num_tokens - (end is None)) for store, end in zip(stores, self._ends, strict=True)
        ]
        self.num_targets = sum(self._targets)
        rows = [-(-count // self._stride) for count in self._targets]
        super().__init__(Windows(), rows, reading)

    def _fill(self, source: int, row: int, batch: "Batch", b: int) -> None:
        begin, past = row * self._stride, min((row + 1) * self._stride, self._targets[source])
        start = max(0, past - self._length) if self._overlap else begin
        slots = past - start
        tokens, end = self._tokens[source], self._ends[source]
        # If the first token is a target, targets begin at token 0 and inputs one token earlier.
        first = start + (end is None)
        batch.fill_row(b, tokens[first - 1] if first else end, tokens[first : first + slots])
        batch.weights[b, : begin - start] = 0
