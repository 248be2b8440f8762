"""Data configs of a run: stores, their mixture, and the layout of text in rows.

Each layout is a dataclass with its own fields; `DataConfig` is their union, discriminated by `layout`.
"""

import typing
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxlm.errors import InputError

Layout = Literal["windows", "packed", "pairs", "streams"]
LONGER = 10  # the most tokens by which a varied window exceeds its nominal length (awd-lstm-lm, finetune.py)

_LAYOUT = tyro.conf.arg(
    metavar="{" + ",".join(typing.get_args(Layout)) + "}",
    help="Layout of the text in rows. windows: consecutive tokens, across documents. packed: whole documents that do "
    "not attend to each other; longer ones are split. pairs: several sentence pairs per row for an encoder (Devlin et "
    "al., 2019); the store must keep sentences. streams: row b of each batch continues row b of the previous batch. "
    "Each layout has its own flags; --help lists those of the given layout.",
)


@dataclass(frozen=True)
class Stores:
    """Token stores to train and evaluate on: the fields shared by all layouts."""

    store: tuple[str, ...] = ()
    """Token stores to train on, made by jaxlm.prepare."""
    validation: tuple[str, ...] = ()
    """Token stores to evaluate on, in the same layout. Every token is predicted once. Of pairs, the masked tokens and
    every next sentence are predicted, the same in every evaluation."""
    weights: tuple[float, ...] = ()
    """Weights of the training stores in the mixture, one per store. Default: the weights given at preparation, or the
    numbers of tokens."""

    def longest_row(self, length: int) -> int:
        """Return the tokens of a row, with padding, of a run with rows of `length`."""
        return length

    def check(self) -> None:
        """Raise InputError unless there is one positive weight per store, or none."""
        if self.weights and len(self.weights) != len(self.store):
            raise InputError(
                f"data.weights must have one value per store, got {len(self.weights)} for {len(self.store)} in "
                "data.store; give one each"
            )
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise InputError(
                    f"data.weights must be finite numbers above 0, got {weight}; omit a store instead of giving it 0"
                )


@dataclass(frozen=True)
class Windows(Stores):
    """Rows of consecutive tokens, across documents."""

    layout: Annotated[Literal["windows"], _LAYOUT] = "windows"


@dataclass(frozen=True)
class Packed(Stores):
    """Rows of whole documents that do not attend to each other."""

    layout: Annotated[Literal["packed"], _LAYOUT] = "packed"


@dataclass(frozen=True)
class SentencePairs(Stores):
    """Rows of sentence pairs for an encoder (Devlin et al., 2019, sections 3.1 and A.2)."""

    layout: Annotated[Literal["pairs"], _LAYOUT] = "pairs"
    pairs_per_row: int = 0
    """Maximum number of pairs per row. 1: one pair and padding, as in the original. 0: one per 16 tokens of length."""
    chunks: Literal["filled", "whole"] = "filled"
    """Text of a pair. filled: sentences until the target length is reached, as in the original; the longer side is
    truncated, front or back, to fit the row. whole: only sentences that fit, with more padding; all text is in a
    pair in every epoch."""
    short_target_share: float = 0.1
    """Fraction of pairs with a target length sampled from 2 to the maximum (create_pretraining_data.py:56-58)."""
    short_target_drawn: Literal["chunk", "document"] = "chunk"
    """Unit that a target length is sampled for. chunk: each pair. document: all pairs of a document, as in the original
    code (:239-241)."""
    random_share: float = 0.5
    """Fraction of pairs whose second segment is from a random other document (section 3.1)."""
    random_candidates: int = 16
    """Number of candidates for a random second segment. The one closest in length to the replaced text is used. 1: the
    first one, whose length may reveal that the pair is random."""
    one_sentence: Literal["cut", "random"] = "cut"
    """Pair of a single-sentence text. cut: the sentence is split. random: always a random pair, as in the original
    code."""
    sentence_tokens: int = 0
    """Number of tokens that count as a sentence in stores that keep none. 0: refuse such stores."""
    masks: Literal["dynamic", "static"] = "dynamic"
    """Pairs and masks per epoch. dynamic: new ones in every epoch. static: those of the first mask_copies epochs are
    repeated, as in the original files."""
    mask_copies: int = 10
    """Number of copies of the text with static masks (dupe_factor in the original)."""
    short_length: int = 0
    """Length of the rows in the first short_share of all steps. 0: the same length in all steps (appendix A.2: 128)."""
    short_share: float = 0.9
    """Fraction of the steps at short_length."""

    def check(self) -> None:
        """Raise InputError for fractions outside [0, 1] and counts that are too small."""
        super().check()
        for name in ("short_target_share", "random_share", "short_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"data.{name} must be from 0 to 1, got {getattr(self, name)}; give a fraction")
        for name, least in (
            ("pairs_per_row", 0),
            ("random_candidates", 1),
            ("sentence_tokens", 0),
            ("short_length", 0),
            ("mask_copies", 1),
        ):
            if getattr(self, name) < least:
                raise InputError(f"data.{name} must be at least {least}, got {getattr(self, name)}; give a larger one")


@dataclass(frozen=True)
class Streams(Stores):
    """Rows that continue those of the previous batch, for models with a carry."""

    layout: Annotated[Literal["streams"], _LAYOUT] = "streams"
    windows: Literal["fixed", "varied"] = "fixed"
    """Number of tokens that a step reads of each stream. fixed: `length`. varied: drawn for each step from N(length, 5)
    and, in 5 % of the steps, from N(length / 2, 5), at least 5 and at most length + 10; the learning rate of the step
    is multiplied by this number / length (Merity et al., 2018, section 4.1)."""
    reset_probability: float = 0.0
    """Probability that a training row begins with an empty carry instead of that of the row before (Melis et al.,
    2018). Without such rows a model learns little about the beginning of a text."""

    def longest_row(self, length: int) -> int:
        """Return the tokens of a row, with padding, of a run with rows of `length`."""
        return length + LONGER if self.windows == "varied" else length

    def check(self) -> None:
        """Raise InputError for mixture weights, as streams have no mixture, and for no probability."""
        if self.weights:
            raise InputError(
                f"data.weights must be left out with data.layout streams, got {' '.join(map(str, self.weights))}; "
                "the stores are read one after the other"
            )
        if not 0 <= self.reset_probability <= 1:
            raise InputError(
                f"data.reset_probability must be from 0 to 1, got {self.reset_probability}; give a fraction"
            )


ShuffledConfig = Windows | Packed | SentencePairs
DataConfig = ShuffledConfig | Streams

# Dataclass of each layout.
MEMBERS: dict[str, type[DataConfig]] = {member.layout: member for member in typing.get_args(DataConfig)}
