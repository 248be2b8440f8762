"""Streams: row b of each batch continues row b of the previous batch, for models with a carry.

`jaxlm/data/streams.py` makes the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np

from jaxlm.data.layouts.layout import FLAG, Layout, Reading
from jaxlm.data.validation_rows import ValidationRows
from jaxlm.errors import InputError
from jaxlm.ranges import Fraction
from jaxlm.wording import counted

if TYPE_CHECKING:
    from jaxlm.data.batch import Batch
    from jaxlm.data.streams import StreamRows

LONGER = 10  # the most tokens by which a varied window exceeds its nominal length (awd-lstm-lm, finetune.py)


@dataclass(frozen=True)
class Streams(Layout):
    """Rows that continue those of the previous batch, for models with a carry."""

    layout: Annotated[Literal["streams"], FLAG] = "streams"
    windows: Literal["fixed", "varied"] = "fixed"
    """Number of tokens that a step reads of each stream. fixed: `length`. varied: sampled for each step from N(length,
    5) and, in 5 % of the steps, from N(length / 2, 5), at least 5 and at most length + 10; the learning rate of the
    step is multiplied by this number / length (Merity et al., 2018, section 4.1)."""
    reset_probability: Fraction = 0.0
    """Probability that a training row begins with an empty carry instead of that of the row before (Melis et al.,
    2018). Without such rows a model learns little about the beginning of a text."""

    rows_name: ClassVar[str] = "streams"
    carries: ClassVar[bool] = True

    def longest_row(self, length: int) -> int:
        return length + LONGER if self.windows == "varied" else length

    def check(self) -> None:
        """Raise InputError for mixture weights, as streams have no mixture."""
        if self.weights:
            raise InputError(
                f"data.weights must be left out with data.layout streams, got {' '.join(map(str, self.weights))}; "
                "the stores are read one after the other"
            )

    def nominal_length(self, length: int) -> int | None:
        """Return `length` if windows vary, otherwise None."""
        return length if self.windows == "varied" else None

    def with_one_length(self) -> Self:
        """Return the same layout with fixed windows."""
        return replace(self, windows="fixed")

    def rows(self, reading: Reading) -> "StreamRows":
        """Return the endless rows of a run; see `StreamRows`."""
        from jaxlm.data.streams import StreamRows

        sizes = (reading.length, reading.batch_size, self.windows, reading.seed, self.reset_probability)
        return StreamRows(reading.stores, *sizes)

    def steps_of_passes(self, reading: Reading, num_epochs: float) -> int:
        return self.rows(reading).windows.steps(num_epochs)

    def validation_rows(self, reading: Reading) -> "ValidationStreams":
        """Return the stores in batch_size streams; see `ValidationStreams`."""
        return ValidationStreams(reading)

    def empty(self, rows: int, length: int, sources: Sequence[Any] = ()) -> "Batch":
        """Return a batch of padding, with `begins` False everywhere."""
        return replace(super().empty(rows, length), begins=np.zeros(rows, bool))

    def random_batch(self, rows: int, length: int, vocab_size: int) -> "Batch":
        """Return a batch of full rows of random ids, with `begins` False everywhere."""
        return replace(super().random_batch(rows, length, vocab_size), begins=np.zeros(rows, bool))

    def describe_rows(self, batch_size: int) -> str:
        """Return a noun phrase for the rows of an evaluation, with the number of streams."""
        return f"{counted(batch_size, 'stream')}, in rows"


class ValidationStreams(ValidationRows):
    """Concatenated stores in batch_size streams of equal length, with each token a target exactly once.

    Row b of a batch continues row b of the previous batch; `begins` is True in the first batch alone. Streams end in
    padding of weight 0. The first token of the text is predicted from the end-of-document id; if the tokenizer has
    none, this token is not predicted.
    """

    def __init__(self, reading: Reading):
        from jaxlm.data.streams import Text

        self._text = Text(reading.stores)
        self._end = reading.stores[0].end if reading.stores else None
        self.num_targets = max(0, self._text.tokens - (self._end is None))
        self._stream = -(-self.num_targets // reading.batch_size)
        rows = [-(-self._stream // reading.length) * reading.batch_size]
        super().__init__(Streams(), rows, reading)

    def _fill(self, source: int, row: int, batch: "Batch", b: int) -> None:
        step, stream = divmod(row, self._batch_size)
        batch.begins[b] = step == 0
        start = stream * self._stream + step * self._length
        slots = min(self._length, (stream + 1) * self._stream - start, self.num_targets - start)
        if slots <= 0:
            return
        first = start + (self._end is None)  # position of the first target in the text; its input is one token earlier
        before = self._text.read(first - 1, first)[0] if first else self._end
        batch.fill_row(b, before, self._text.read(first, first + slots))
