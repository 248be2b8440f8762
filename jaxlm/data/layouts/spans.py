"""Corrupted text: rows with a source, from which parts of a text are left out, and the parts as a target.

Raffel et al. (2020, sections 3.1.4 and 3.3). `jaxlm/data/spans.py` leaves the parts out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxlm.data.layouts.layout import FLAG, IndependentRows
from jaxlm.ranges import Range

if TYPE_CHECKING:
    import numpy as np

    from jaxlm.data.batch import Batch, RandomNumbers
    from jaxlm.data.spans import CorruptedSection
    from jaxlm.data.store import Section, Store
    from jaxlm.text import Tokenizer


@dataclass(frozen=True)
class Spans(IndependentRows):
    """Rows of corrupted text for an encoder-decoder; `length` is that of the source (Raffel et al., 2020)."""

    layout: Annotated[Literal["spans"], FLAG] = "spans"
    corruption: Literal["spans", "tokens", "prefix"] = "spans"
    """Parts of a text that are left out. spans: spans of mean_span tokens on average. tokens: single tokens. prefix:
    the end of the text, from a random place on (table 4 of the paper)."""
    noise_density: Annotated[float, Range(above=0, most=0.9, fix="give 0.15, as published")] = 0.15
    """Fraction of the tokens that are left out; not used by prefix."""
    mean_span: Annotated[float, Range(1, fix="give 3, as published")] = 3.0
    """Mean length of a span in tokens, with corruption spans."""

    rows_name: ClassVar[str] = "rows of corrupted text"
    whole_text: ClassVar[bool] = False
    shortest_row: ClassVar[int] = 3  # a token that is kept, a sentinel and the end
    data_order: ClassVar[int] = 1

    def with_special_tokens(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """Return the tokenizer with sentinels."""
        from jaxlm.data.spans import SENTINELS

        return tokenizer.with_sentinels(SENTINELS)

    def text_length(self, length: int) -> int:
        """Return the tokens of the text of a row."""
        from jaxlm.data.spans import longest_text

        if self.corruption in ("tokens", "prefix"):
            return length - 1  # room for the end token, if each token that is left out has a sentinel
        return longest_text(length, self.noise_density, self.mean_span)

    def target_length(self, length: int) -> int:
        """Return the slots of a target."""
        from jaxlm.data.spans import num_noise

        if self.corruption == "prefix":
            return length
        return num_noise(self.text_length(length), self.noise_density) + self.most_sentinels(length) + 1

    def most_sentinels(self, length: int) -> int:
        """Return the most sentinels in a row."""
        from jaxlm.data.spans import num_noise, num_spans

        text = self.text_length(length)
        if self.corruption == "prefix":
            return 0
        if self.corruption == "tokens":
            return num_noise(text, self.noise_density)
        return num_spans(text, self.noise_density, self.mean_span)

    def row_tokens(self, length: int) -> int:
        """Return the slots of a row, those of the source and of the target."""
        return length + self.target_length(length)

    def corrupt(
        self, text: "np.ndarray", random: "RandomNumbers", sentinels: "np.ndarray", end: int
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Return the source and the target of a text of at least two tokens, int64."""
        import numpy as np

        from jaxlm.data.spans import corrupted, span_mask, token_mask

        if self.corruption == "prefix":
            middle = 1 + random.below(len(text) - 1)
            return np.append(text[:middle], end), np.append(text[middle:], end)
        if self.corruption == "tokens":
            mask = token_mask(len(text), self.noise_density, random)
        else:
            mask = span_mask(len(text), self.noise_density, self.mean_span, random)
        return corrupted(text, mask, sentinels, end)

    def source(self, store: "Store", section: "Section", *, length: int, seed: int, number: int) -> "CorruptedSection":
        """Return the rows of a section. InputError for a tokenizer with fewer sentinels than a row has spans."""
        from jaxlm.data.spans import CorruptedSection

        return CorruptedSection(store, section, self, length=length, seed=seed, number=number)

    def empty(self, rows: int, length: int, sources: Sequence[Any] = ()) -> "Batch":
        """Return a batch of padding, with sources of `length` slots."""
        import numpy as np

        source, segments = np.zeros((2, rows, length), np.int32)
        batch = super().empty(rows, self.target_length(length))
        return replace(batch, source=source, source_segments=segments)

    def random_batch(self, rows: int, length: int, vocab_size: int) -> "Batch":
        """Return a batch of full rows of random ids, for measurements."""
        import numpy as np

        batch = super().random_batch(rows, self.target_length(length), vocab_size)
        source = np.random.default_rng(1).integers(vocab_size, size=(rows, length)).astype(np.int32)
        ones = np.ones_like(source)
        return replace(batch, segments=np.ones_like(batch.targets), source=source, source_segments=ones)

    def describe_validation(self, lengths: str, stores: Sequence["Store"]) -> str:
        """Return a noun phrase for the rows of the validation stores, which are corrupted alike in all evaluations."""
        return f"{self.rows_name} of {lengths}, corrupted alike in every evaluation"
