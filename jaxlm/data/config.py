"""The data of a run: the stores, their mixture, and the layout of their text in rows.

Each layout is a dataclass with its own fields; `DataConfig` is the union of them, told apart by `layout`.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxlm.errors import InputError

Layout = Literal["windows", "packed", "pairs", "streams"]

_LAYOUT = tyro.conf.arg(
    metavar="{" + ",".join(typing.get_args(Layout)) + "}",
    help="Layout of the text in rows. windows: consecutive tokens, across documents. packed: whole documents, split "
    "where they are longer than a row, none of which attends to another. pairs: sentence pairs for an encoder (Devlin "
    "et al., 2019), several to a row; the store must keep sentences. streams: row b of each "
    "batch continues where row b of the batch before it ended. Each layout has flags of its own: --help lists "
    "those of the layout that is given.",
)


@dataclass(frozen=True)
class Stores:
    """Token stores to train on and to evaluate on: the fields that all layouts share."""

    store: tuple[str, ...] = ()
    """Token stores to train on, made by jaxlm.prepare."""
    validation: tuple[str, ...] = ()
    """Token stores to evaluate on, in rows of the same layout. Every token is predicted once; of pairs, masked tokens
    and the next sentence of every pair, always the same."""
    weights: tuple[float, ...] = ()
    """Weights of the training stores in the mixture, one per store. Default: the weights given at preparation, or the
    numbers of tokens."""

    def check(self) -> None:
        """Raise InputError for weights that do not fit the stores."""
        if self.weights and len(self.weights) != len(self.store):
            raise InputError(
                f"data.weights must have one value per store, got {len(self.weights)} for {len(self.store)} in "
                "data.store; give as many"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise InputError(
                    f"data.weights must be finite numbers above 0, got {weight}; leave a store out instead of 0"
                )


@dataclass(frozen=True)
class Windows(Stores):
    """Rows of consecutive tokens, across documents."""

    layout: Annotated[Literal["windows"], _LAYOUT] = "windows"


@dataclass(frozen=True)
class Packed(Stores):
    """Rows of whole documents, none of which attends to another."""

    layout: Annotated[Literal["packed"], _LAYOUT] = "packed"


@dataclass(frozen=True)
class SentencePairs(Stores):
    """Rows of sentence pairs for an encoder (Devlin et al., 2019, sections 3.1 and A.2)."""

    layout: Annotated[Literal["pairs"], _LAYOUT] = "pairs"
    pairs_per_row: int = 0
    """The most pairs in a row. 1: one pair and padding, as in the original. 0: one per 16 tokens of the length."""
    chunks: Literal["filled", "whole"] = "filled"
    """Text of a pair. filled: sentences until the target length is reached, as in the original; the longer side is
    truncated, front or back, to fit the row. whole: only sentences that fit, so that all text is in a pair in every
    epoch, with more padding."""
    short_target_share: float = 0.1
    """Fraction of pairs with a target length drawn from 2 up to the longest (create_pretraining_data.py:56-58)."""
    short_target_drawn: Literal["chunk", "document"] = "chunk"
    """Unit that a target length is drawn for. chunk: each pair. document: all pairs of a document, as in the
    original's code (:239-241)."""
    random_share: float = 0.5
    """Fraction of pairs whose second part is from a random other document (section 3.1)."""
    random_candidates: int = 16
    """Candidates drawn for a random second part. The one nearest in length to the part it replaces is taken. 1: the
    first one, whose length may give away that the pair is random."""
    one_sentence: Literal["cut", "random"] = "cut"
    """Pair of a text that is a single sentence. cut: the sentence is split. random: always a random pair, as in the
    original's code."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """dynamic: new pairs and masks in every epoch. static: those of the first mask_copies epochs are repeated, as in
    the original's files."""
    mask_copies: int = 10
    """Number of copies of the text with static masks (the original's dupe_factor)."""
    short_length: int = 0
    """Length of the rows in the first short_share of the steps. 0: all steps have the same length (appendix A.2:
    128)."""
    short_share: float = 0.9
    """Fraction of the steps at short_length."""

    def check(self) -> None:
        """Raise InputError for fractions outside [0, 1] and counts that are too small."""
        super().check()
        for name in ("short_target_share", "random_share", "short_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"data.{name} must be from 0 to 1, got {getattr(self, name)}; give a fraction")
        for name, least in (("pairs_per_row", 0), ("random_candidates", 1), ("short_length", 0), ("mask_copies", 1)):
            if getattr(self, name) < least:
                raise InputError(f"data.{name} must be at least {least}, got {getattr(self, name)}; give a larger one")


@dataclass(frozen=True)
class Streams(Stores):
    """Rows that continue those of the batch before, for models that carry a state from batch to batch."""

    layout: Annotated[Literal["streams"], _LAYOUT] = "streams"

    def check(self) -> None:
        """Raise InputError for a mixture, which has no order to read on in."""
        if self.weights:
            raise InputError(
                f"data.weights must be left out with data.layout streams, got {' '.join(map(str, self.weights))}; "
                "the stores are read one after the other"
            )


ShuffledConfig = Windows | Packed | SentencePairs
DataConfig = ShuffledConfig | Streams

# The dataclass of each layout.
MEMBERS: dict[str, type[DataConfig]] = {member.layout: member for member in typing.get_args(DataConfig)}
