"""Sentence pairs: rows for an encoder that predicts masked tokens and next sentences.

Devlin et al. (2019, sections 3.1 and A.2). `jaxlm/data/pairs.py` samples the pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np

from jaxlm.data.layouts.layout import FLAG, IndependentRows, Reading
from jaxlm.errors import InputError
from jaxlm.ranges import Count, Fraction, Natural

if TYPE_CHECKING:
    from jaxlm.data.batch import PairBatch
    from jaxlm.data.pairs import Pairs
    from jaxlm.data.store import Section, Store


@dataclass(frozen=True)
class SentencePairs(IndependentRows):
    """Rows of sentence pairs for an encoder (Devlin et al., 2019, sections 3.1 and A.2)."""

    layout: Annotated[Literal["pairs"], FLAG] = "pairs"
    pairs_per_row: Natural = 0
    """Maximum number of pairs per row. 1: one pair and padding, as in the original. 0: one per 16 tokens of length."""
    chunks: Literal["filled", "whole"] = "filled"
    """Text of a pair. filled: sentences until the target length is reached, as in the original; the longer side is
    truncated, front or back, to fit the row. whole: only sentences that fit, with more padding; all text is in a
    pair in every epoch."""
    short_target_share: Fraction = 0.1
    """Fraction of pairs with a target length sampled from 2 to the maximum (create_pretraining_data.py:56-58)."""
    short_target_drawn: Literal["chunk", "document"] = "chunk"
    """Unit that a target length is sampled for. chunk: each pair. document: all pairs of a document, as in the original
    code (:239-241)."""
    random_share: Fraction = 0.5
    """Fraction of pairs whose second segment is from a random other document (section 3.1)."""
    random_candidates: Count = 16
    """Number of candidates for a random second segment. The one closest in length to the replaced text is used. 1: the
    first one, whose length may reveal that the pair is random."""
    one_sentence: Literal["cut", "random"] = "cut"
    """Pair of a single-sentence text. cut: the sentence is split. random: always a random pair, as in the original
    code."""
    sentence_tokens: Natural = 0
    """Number of tokens that count as a sentence in stores that keep none. 0: refuse such stores."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """Pairs and masks per epoch. dynamic: new ones in every epoch. static: those of the first mask_copies epochs are
    repeated, as in the original files."""
    mask_copies: Count = 10
    """Number of copies of the text with static masks (dupe_factor in the original)."""
    short_length: Natural = 0
    """Length of the rows in the first short_share of all steps. 0: the same length in all steps (appendix A.2: 128)."""
    short_share: Fraction = 0.9
    """Fraction of the steps at short_length."""

    rows_name: ClassVar[str] = "rows of pairs"
    whole_text: ClassVar[bool] = False
    next_sentences: ClassVar[bool] = True
    data_order: ClassVar[list[int]] = [1, 1, 2]  # of the order of rows, of chunks, and of pairs

    def lengths(self, length: int) -> tuple[tuple[int, float], ...]:
        """Return the lengths of short and long rows, and the fraction of the steps after which each ends.

        InputError unless the short length is below `length`.
        """
        if not self.short_length:
            return super().lengths(length)
        if self.short_length >= length:
            raise InputError(
                f"data.short_length must be below length {length}, got {self.short_length}; give a smaller one, or 0 "
                "for a single length"
            )
        return (self.short_length, self.short_share), (length, 1.0)

    def with_one_length(self) -> Self:
        """Return the same layout without short rows."""
        return replace(self, short_length=0)

    def source(self, store: "Store", section: "Section", *, length: int, seed: int, number: int) -> "Pairs":
        """Return the pairs of a section. InputError if it has none."""
        from jaxlm.data.pairs import Pairs

        return Pairs(store, section, self, length=length, seed=seed, number=number)

    def check_validation(self, stores: Sequence["Store"], length: int) -> None:
        """Raise InputError if held-out stores have no pairs."""
        self.validation_rows(Reading(stores, length, 1))

    def empty(self, rows: int, length: int, sources: Sequence[Any] = ()) -> "PairBatch":
        """Return a batch of padding, with as many pairs per row as the sources have, or as a row may have."""
        from jaxlm.data.pairs import chunk_options, empty_pairs

        most = [source.most for source in sources] or [chunk_options(self, length).pairs_per_row]
        return empty_pairs(rows, length, max(most))

    def random_batch(self, rows: int, length: int, vocab_size: int) -> "PairBatch":
        """Return a batch of one pair per row, with the ids 0 and 1 for CLS and SEP."""
        from jaxlm.data.batch import PairBatch

        rng = np.random.default_rng(0)
        positions_BL = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        ids = rng.integers(3, vocab_size, size=(rows, length)).astype(np.int32)
        ids[:, 0], ids[:, [length // 2, -1]] = 0, 1
        return PairBatch(
            ids=ids,
            types=(positions_BL > length // 2).astype(np.int32),
            positions=positions_BL,
            segments=np.ones_like(ids),
            firsts=np.zeros((rows, 1), np.int32),
            next_labels=rng.integers(2, size=(rows, 1)).astype(np.int32),
            pair_weights=np.ones((rows, 1), np.float32),
            mask_seeds=rng.integers(2**32, size=(rows, 2), dtype=np.uint32),
        )

    def mask_slots(self, batch: Any, rate: float) -> int:
        """Return the maximum number of masked tokens in a row of a batch, whose segments are pairs."""
        from jaxlm.data.pairs import mask_slots

        return mask_slots(batch.ids.shape[1], batch.firsts.shape[1], rate)

    def describe_masks(self, next_sentence_coefficient: float) -> str:
        """Return the end of a sentence on the masks: their changes, and the loss of next sentences."""
        copies = f" in {self.mask_copies} copies" if self.masks == "static" else ""
        weight = next_sentence_coefficient
        loss = f"next-sentence loss x {weight:g}" if weight else "no next-sentence loss"
        return f"{self.masks}{copies}; {loss}"

    def describe_sources(self, sources: Sequence[Any]) -> str:
        """Return one line on the pairs."""
        from jaxlm.data.pairs import pair_statistics

        return str(pair_statistics(sources))
