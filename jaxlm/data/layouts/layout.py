"""The layout of text in rows: the fields that all layouts share, and the questions that a layout answers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

import tyro

from jaxlm.errors import InputError
from jaxlm.ranges import Range

if TYPE_CHECKING:
    import numpy as np

    from jaxlm.data.rows import TrainingRows
    from jaxlm.data.store import PairOrigin, RowOrigin, Section, Store
    from jaxlm.data.validation_rows import ValidationRows
    from jaxlm.text import Tokenizer

FLAG = tyro.conf.arg(
    metavar="{windows,packed,pairs,streams,spans,sentence_streams}",
    help="Layout of the text in rows. windows: consecutive tokens, across documents. packed: whole documents that do "
    "not attend to each other; longer ones are split. pairs: several sentence pairs per row for an encoder (Devlin et "
    "al., 2019); the store must keep sentences. streams: row b of each batch continues row b of the previous batch. "
    "spans: texts with spans left out, and the spans, for an encoder-decoder (Raffel et al., 2020). sentence_streams: "
    "shuffled sentences one after the other, and others backward, for a bidirectional language model (Peters et al., "
    "2018); the store must keep sentences. Each layout has its own flags; --help lists those of the given layout.",
)


@dataclass(frozen=True)
class Reading:
    """Stores that are read in rows.

    length: slots per row. batch_size: rows of a batch over all processes, of which this process reads `host_rows`, or
    all. seed: the run's; validation has one of its own. masked: True if rows of text get seeds for the masks of a
    masked language model. characters: number of characters of each token that rows of sentences have; 0: none.
    """

    stores: Sequence["Store"]
    length: int
    batch_size: int
    seed: int = 0
    host_rows: "np.ndarray | None" = None
    masked: bool = False
    characters: int = 0


@dataclass(frozen=True, kw_only=True)
class StoreCache:
    """The cache of what is read of token stores at URLs."""

    cache: str = ""
    """Directory for what is read of stores at URLs. Several processes may share it. Default: among the user's."""
    cache_size: Annotated[float, Range(above=0, fix="leave it out for 64")] = 64.0
    """Largest size in GB of what is kept of each store at a URL."""

    def open(self, place: str) -> "Store":
        """Open a token store in a directory or at a URL. InputError if there is none."""
        from jaxlm.data.remote_store import Cache
        from jaxlm.data.store import open_store

        return open_store(place, Cache(self.cache, int(self.cache_size * 1e9)))


@dataclass(frozen=True)
class Layout(StoreCache):
    """Token stores to train and evaluate on: the fields shared by all layouts, and the defaults of their properties.

    A layout also has `rows`, `steps_of_passes` and `validation_rows`: see `IndependentRows`.
    """

    store: tuple[str, ...] = ()
    """Token stores to train on, made by jaxlm.prepare: directories, or URLs at gs:// or s3://."""
    validation: tuple[str, ...] = ()
    """Token stores to evaluate on, in the same layout. Every token is predicted once. Of pairs, the masked tokens and
    every next sentence are predicted, the same in every evaluation."""
    weights: tuple[Annotated[float, Range(above=0, fix="leave out a store instead of giving it 0")], ...] = ()
    """Weights of the training stores in the mixture, one per store. Default: the weights given at preparation, or the
    numbers of tokens."""

    rows_name: ClassVar[str]
    """Name of its rows, for messages."""
    carries: ClassVar[bool] = False
    """True if row b of a batch continues row b of the previous batch, so that a model keeps its state."""
    whole_text: ClassVar[bool] = True
    """True if each token of a text has a target."""
    next_sentences: ClassVar[bool] = False
    """True if rows have labels of next sentences."""
    of_documents: ClassVar[bool] = False
    """True if each segment of a row is a document, truncated if it is longer than a row."""
    overlaps: ClassVar[bool] = False
    """True if the rows of an evaluation can overlap, moved by a stride."""
    shortest_row: ClassVar[int] = 1
    """The fewest tokens of a row that the layout can fill."""
    data_order: ClassVar[int | list[int]] = 1
    """Versions of the schemes that make its rows, as config.json records them. One changes when the same store, config
    and seed may give other rows."""

    def check(self) -> None:
        """Raise InputError unless there is one weight per store, or none."""
        if self.weights and len(self.weights) != len(self.store):
            raise InputError(
                f"data.weights must have one value per store, got {len(self.weights)} for {len(self.store)} in "
                "data.store; give one each"
            )

    def longest_row(self, length: int) -> int:
        """Return the tokens of a row, with padding, of a run with rows of `length`."""
        return length

    def row_tokens(self, length: int) -> int:
        """Return the slots of a row of a run with rows of `length`, those of a source included."""
        return length

    def with_special_tokens(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """Return a store's tokenizer with the special tokens that the rows have besides its own."""
        return tokenizer

    def lengths(self, length: int) -> tuple[tuple[int, float], ...]:
        """Return the length of the rows of each phase of a run, and the fraction of its steps after which it ends."""
        return ((length, 1.0),)

    def nominal_length(self, length: int) -> int | None:
        """Return the length by which losses of rows of varied lengths are scaled, or None if all rows have it."""
        return None

    def with_one_length(self) -> Self:
        """Return the same layout with rows of one length in all steps, for measurements."""
        return self

    def check_validation(self, stores: Sequence["Store"], length: int) -> None:
        """Raise InputError if held-out stores have no rows of this layout. Text of any length has."""

    def empty(self, rows: int, length: int, sources: Sequence[Any] = ()) -> Any:
        """Return a batch of padding, (rows, length). sources: those of the rows, if they are known."""
        from jaxlm.data.batch import empty_batch

        return empty_batch(rows, length)

    def random_batch(self, rows: int, length: int, vocab_size: int) -> Any:
        """Return a batch of full rows of random ids, for measurements."""
        from jaxlm.data.batch import random_text

        return random_text(rows, length, vocab_size)

    def mask_slots(self, batch: Any, rate: float) -> int:
        """Return the maximum number of masked tokens in a row of a batch. Each segment has at least one."""
        from jaxlm.data.pairs import mask_slots

        length = batch.ids.shape[1]
        return mask_slots(length, length, rate)

    def describe_rows(self, batch_size: int) -> str:
        """Return a noun phrase for the rows of an evaluation in batches of `batch_size`."""
        return self.rows_name

    def describe_validation(self, lengths: str, stores: Sequence["Store"]) -> str:
        """Return a noun phrase for the rows of the validation stores. lengths: those of the rows, as text."""
        return f"{self.rows_name} of {lengths}"

    def describe_masks(self, next_sentence_coefficient: float) -> str:
        """Return the end of a sentence on the masks: their changes, and the loss of next sentences."""
        return "dynamic; no next-sentence loss, since rows are not pairs"

    def describe_sources(self, sources: Sequence[Any]) -> str | None:
        """Return one line on the rows of these sources for logs, or None if there is nothing to say."""
        return None


@dataclass(frozen=True)
class IndependentRows(Layout, ABC):
    """A layout whose rows are independent, and in a random order in each epoch; it gives those of a section."""

    order: Literal["rows", "blocks"] = "rows"
    """Order of the rows of an epoch. rows: a permutation of single rows. blocks: a permutation of blocks of 512 rows,
    which up to 1,024 lanes read side by side, each permuted over two blocks at a time. A store on object storage is
    then read a block at a time; for windows and spans, whose rows are consecutive text."""

    @abstractmethod
    def source(self, store: "Store", section: "Section", *, length: int, seed: int, number: int) -> "Source":
        """Return the rows of a section. number: its index in the run."""

    def sources(self, stores: Sequence["Store"], *, length: int, seed: int) -> "list[Source]":
        """Return the rows of all sections of the stores, in order."""
        sections = ((store, section) for store in stores for section in store.sections)
        return [
            self.source(store, section, length=length, seed=seed, number=number)
            for number, (store, section) in enumerate(sections)
        ]

    def rows(self, reading: Reading) -> "TrainingRows":
        """Return the endless, index-addressed rows of a run. InputError if the stores are too short for a row."""
        from jaxlm.data.rows import training_rows

        return training_rows(reading.stores, self, length=reading.length, seed=reading.seed)

    def steps_of_passes(self, reading: Reading, num_epochs: float) -> int:
        """Return the number of steps of num_epochs passes over the stores, summed over the phases."""
        from jaxlm.data.loader import phases

        passes = 0.0  # per step
        for phase in phases(self, length=reading.length, num_steps=1_000_000):
            fraction = (phase.end_step - phase.first_step) / 1_000_000
            passes += fraction * reading.batch_size / self.rows(replace(reading, length=phase.length)).rows
        return max(1, math.ceil(num_epochs / passes - 1e-9))

    def validation_rows(self, reading: Reading) -> "ValidationRows":
        """Return every token of the stores as a target once, or every pair, in batches and the same in every run."""
        from jaxlm.data.validation_rows import ValidationSections

        return ValidationSections(self, reading)


class Source(Protocol):
    """Rows of one section of a store. rows: number per epoch. targets: number of targets in them, or of pairs."""

    store: "Store"
    section: "Section"
    rows: int
    targets: int

    def fill(self, row: int, batch: Any, b: int, epoch: int) -> None:
        """Write row `row` of an epoch into row b of a batch."""

    def origin(self, row: int, epoch: int) -> "list[RowOrigin] | list[PairOrigin]":
        """Return the origins of the tokens of a row, in order."""
