"""What a run reads: the stores, how they are mixed, and how their text is laid out in rows."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.errors import InputError


@dataclass(frozen=True)
class DataConfig:
    """Token stores to train on and to be held against."""

    store: tuple[str, ...] = ()
    """Token stores to train on, made by jaxlm.prepare."""
    validation: tuple[str, ...] = ()
    """Token stores to evaluate on, in rows as data.layout says: every token is predicted once; of pairs, masked tokens
    and the next sentence of every pair, always the same."""
    weights: tuple[float, ...] = ()
    """Shares of the training stores in the mixture, one a store; without them the weights given at preparation, or
    the numbers of tokens."""
    layout: Literal["windows", "packed", "pairs"] = "windows"
    """windows: each row a stretch of the text as it stands, across documents. packed: whole documents (cut where they
    are longer) packed into rows, none seeing another. pairs: pairs of sentences for an encoder (Devlin et al., 2019),
    several to a row; the store must keep sentences. The fields below are for pairs alone."""
    pairs_per_row: int = 0
    """The most pairs in a row; 1 is the original's, one pair and padding. 0: one for every 16 slots."""
    chunks: Literal["filled", "whole"] = "filled"
    """What a pair is made of. filled: sentences until the target length is reached, as the original; what is over a
    row's length is cut from the longer side, front or back. whole: only sentences that fit, so that all text is in a
    pair in every epoch and more of each row is padding."""
    short_target_share: float = 0.1
    """Share of pairs whose target length is drawn from 2 up to the longest (create_pretraining_data.py:56-58)."""
    short_target_drawn: Literal["chunk", "document"] = "chunk"
    """What a target length is drawn for: each pair, or a whole document, as in the original's code (:239-241)."""
    random_share: float = 0.5
    """Share of pairs whose second part is from a random other document (section 3.1)."""
    random_candidates: int = 16
    """Stretches of other documents that are drawn for a random second part; the one whose length is nearest to that of
    the part it stands in for is taken. 1: the first one, whose length may tell that the pair is random."""
    one_sentence: Literal["cut", "random"] = "cut"
    """A pair's text that is a single sentence: parted within, or always a random pair, as in the original's code."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """dynamic: other pairs and masks in every epoch. static: those of the first mask_copies epochs again and again, as
    the original's files have it."""
    mask_copies: int = 10
    """With static masks, how many there are of each text (the original's dupe_factor)."""
    short_length: int = 0
    """Rows of this length for the first short_share of the steps; 0: all steps are alike (appendix A.2: 128)."""
    short_share: float = 0.9
    """Share of the steps at short_length."""

    def check(self) -> None:
        """Refuse weights that do not fit the stores, and shares that are none."""
        if self.weights and len(self.weights) != len(self.store):
            raise InputError(
                f"data.weights has {len(self.weights)} values, data.store {len(self.store)}: give one a store"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise InputError(
                    f"data.weights holds {weight}; a weight is a number above 0 (leave the store out instead)"
                )
        for name in ("short_target_share", "random_share", "short_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"data.{name} {getattr(self, name)}: a share from 0 to 1")
        for name, least in (("pairs_per_row", 0), ("random_candidates", 1), ("short_length", 0), ("mask_copies", 1)):
            if getattr(self, name) < least:
                raise InputError(f"data.{name} {getattr(self, name)}: {least} or more")
        if self.short_length and self.layout != "pairs":
            raise InputError(f"data.short_length {self.short_length}: only rows of pairs change their length in a run")
