"""Streams of sentences: each row of a batch continues a stream of shuffled sentences, one for each direction.

For a bidirectional language model (Peters et al., 2018, "Deep contextualized word representations", section 3.4).
`jaxlm/data/sentence_streams.py` makes the rows.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from jaxlm.data.layouts.layout import FLAG, Layout, Reading
from jaxlm.data.validation_rows import ValidationRows
from jaxlm.errors import InputError
from jaxlm.wording import counted

if TYPE_CHECKING:
    from jaxlm.data.batch import Batch
    from jaxlm.data.sentence_streams import SentenceStreamRows
    from jaxlm.data.store import Store
    from jaxlm.text import Tokenizer

MARKS = ("start", "end")  # the roles of <S> and </S>


@dataclass(frozen=True)
class SentenceStreams(Layout):
    """Rows of shuffled sentences, one after the other, and of others backward, for a model with a carry."""

    layout: Annotated[Literal["sentence_streams"], FLAG] = "sentence_streams"

    rows_name: ClassVar[str] = "streams of sentences"
    carries: ClassVar[bool] = True
    whole_text: ClassVar[bool] = False
    data_order: ClassVar[int] = 1

    def check(self) -> None:
        """Raise InputError for mixture weights, as the sentences of all stores are shuffled together."""
        if self.weights:
            raise InputError(
                f"data.weights must be left out with data.layout {self.layout}, got "
                f"{' '.join(map(str, self.weights))}; the sentences of all stores are shuffled together"
            )

    def with_special_tokens(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """Return the tokenizer with tokens that begin and end a sentence."""
        return tokenizer.with_marks(MARKS)

    def rows(self, reading: Reading) -> "SentenceStreamRows":
        """Return the endless rows of a run; see `SentenceStreamRows`."""
        from jaxlm.data.sentence_streams import SentenceStreamRows

        return SentenceStreamRows(self, reading)

    def steps_of_passes(self, reading: Reading, num_epochs: float) -> int:
        """Return the number of steps of num_epochs passes over the sentences, in each direction."""
        return self.rows(reading).windows.steps(num_epochs)

    def validation_rows(self, reading: Reading) -> "ValidationSentences":
        """Return the sentences of the stores in order; see `ValidationSentences`."""
        return ValidationSentences(self, reading)

    def check_validation(self, stores: Sequence["Store"], length: int) -> None:
        """Raise InputError if a held-out store keeps no sentences."""
        self.validation_rows(Reading(stores, length, 1))

    def empty(self, rows: int, length: int, sources: Sequence[Any] = ()) -> "Batch":
        """Return a batch of padding in both directions, with the characters that the sentences in `sources` have."""
        from jaxlm.text.characters import PADDING

        batch = super().empty(rows, length)
        if characters := max((source.characters for source in sources), default=0):
            batch = replace(batch, characters=np.full((rows, length, characters), PADDING, np.int32))
        return replace(batch, begins=np.zeros(rows, bool), backward=copy.deepcopy(batch))

    def random_batch(self, rows: int, length: int, vocab_size: int) -> "Batch":
        """Return a batch of full rows of random ids in both directions, without characters."""
        batch = super().random_batch(rows, length, vocab_size)
        return replace(batch, begins=np.zeros(rows, bool), backward=batch)

    def describe_rows(self, batch_size: int) -> str:
        """Return a noun phrase for the rows of an evaluation, with the number of streams."""
        return f"{counted(batch_size, 'stream')} of sentences in each direction, in rows"


class ValidationSentences(ValidationRows):
    """The sentences of stores in order, in batch_size streams of equal length: each of their targets exactly once in
    each direction.

    Row b of a batch continues row b of the previous batch; `begins` is True in the first batch alone. Streams end in
    padding of weight 0. num_targets: number of targets of each direction.
    """

    def __init__(self, layout: SentenceStreams, reading: Reading):
        from jaxlm.data.sentence_streams import Direction, Sentences

        sentences = Sentences(layout, reading.stores, reading.characters)
        order = np.arange(len(sentences))
        self._sources: Any = (sentences,)
        self._directions = [Direction(sentences, order, backward) for backward in (False, True)]
        self.num_targets = sentences.targets
        self._stream = -(-self.num_targets // reading.batch_size)
        super().__init__(layout, [math.ceil(self._stream / reading.length) * reading.batch_size], reading)

    def _fill(self, source: int, row: int, batch: "Batch", b: int) -> None:
        step, stream = divmod(row, self._batch_size)
        batch.begins[b] = step == 0
        start = stream * self._stream + step * self._length
        end = min(start + self._length, (stream + 1) * self._stream, self.num_targets)
        if start < end:
            for direction in self._directions:
                direction.fill(np.arange(start, end), batch, (b, slice(end - start)))
