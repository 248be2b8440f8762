"""A split of a task as rows of tokens: what all kinds share, and the kinds that read whole texts.

Batches are built, and outputs put in order, independently of the kind. `encode_split` serves every kind of task.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Example, TaskData
from jaxlm.tasks.input_formats import FORMATS
from jaxlm.tasks.task import Task
from jaxlm.text.characters import PADDING, character_ids
from jaxlm.wording import counted

if TYPE_CHECKING:
    from jaxlm.data.batch import ExampleBatch
    from jaxlm.tasks.kinds.texts import TextTask
    from jaxlm.text import Tokenizer


class Size(NamedTuple):
    """The lengths that the rows of a batch are padded to.

    source: of the source, 0 for models that read one sequence. length: of the sequence itself.
    """

    source: int
    length: int

    def holds(self, source: int, length: int) -> bool:
        """Return True if a row with these lengths fits."""
        return source <= self.source and length <= self.length


@dataclass(frozen=True, kw_only=True)
class Encoded(abc.ABC):
    """A split of a task as rows of tokens: one row per example, or per window of a question's text.

    `len` counts rows. part: the name of the split. truncated: number of truncated examples. longest: int32 (rows,), the
    longest sequence of each row. length: the limit. pad: the padding id. num_sequences: sequences per row.
    source_limit: the maximum length of a source that is read apart, 0 for models that read one sequence.
    """

    part: str = ""
    labelled: bool
    truncated: int
    longest: np.ndarray
    length: int
    pad: int
    num_sequences: int = 1
    source_limit: int = 0

    def __len__(self) -> int:
        return len(self.longest)

    @property
    def largest(self) -> Size:
        """The size that every row fits."""
        return Size(self.source_limit, self.length)

    @property
    def longest_source(self) -> np.ndarray:
        """The length of the source of each row, int32 (rows,); 0 for models that read one sequence."""
        return np.zeros(len(self), np.int32)

    @property
    def num_examples(self) -> int:
        """The number of examples, from which the number of steps of a run is computed."""
        return len(self)

    def example_of(self, row: int) -> int:
        """Return the number of the example of a row."""
        return row

    @abc.abstractmethod
    def described(self, batch: Any) -> str:
        """Return the sizes of a batch in words, and how many of its positions are tokens."""

    @abc.abstractmethod
    def batch(self, rows: np.ndarray, size: Size, batch_size: int) -> Any:
        """Return these rows padded to `size`, and rows of weight 0 up to `batch_size`."""


class Spelling(NamedTuple):
    """The spelling of the tokens of a split.

    words: the different ones. numbers: int32 (total,), the number of each token in `words`. table: int32
    (words + 1, C), the characters of each word (`jaxlm/text/characters.py`), and at last padding.
    """

    words: tuple[str, ...]
    numbers: np.ndarray
    table: np.ndarray


def spelling_of(words: Iterable[str]) -> Spelling:
    """Return the characters of the tokens of a split."""
    known: dict[str, int] = {}
    numbers = [known.setdefault(word, len(known)) for word in words]
    table = character_ids([*known, ""])
    table[-1] = PADDING
    return Spelling(tuple(known), np.array(numbers, np.int32), table)


@dataclass(frozen=True, kw_only=True)
class LabelledRows(Encoded):
    """Rows with numbers as labels, whose batches are `ExampleBatch`.

    labels: the loss targets of the kind, zeros where unlabelled.
    """

    labels: np.ndarray

    @abc.abstractmethod
    def sequences(self, row: int) -> list[np.ndarray]:
        """Return the token sequences of a row."""

    @abc.abstractmethod
    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return `extract`, `second` and `labels` of a batch that begins with these rows; see `ExampleBatch`."""

    def described(self, batch: "ExampleBatch") -> str:
        _, sequences, length = batch.ids.shape
        used, positions = int(batch.lengths.sum()), batch.ids.size
        return f"of {counted(sequences, 'sequence')}, length {length}, {used:,} of {positions:,} positions are tokens"

    def batch(self, rows: np.ndarray, size: Size, batch_size: int) -> "ExampleBatch":
        from jaxlm.data.batch import ExampleBatch  # it needs JAX, without which a command line is parsed

        ids = np.full((batch_size, self.num_sequences, size.length), self.pad, np.int32)
        lengths = np.zeros(ids.shape[:2], np.int32)
        for position, row in enumerate(rows):
            for number, sequence in enumerate(self.sequences(int(row))):
                ids[position, number, : len(sequence)] = sequence
                lengths[position, number] = len(sequence)
        weights, index = np.zeros(batch_size, np.float32), np.full(batch_size, -1, np.int32)
        weights[: len(rows)] = 1
        index[: len(rows)] = rows
        marks: dict[str, Any] = self.marks(rows, lengths, size.length)
        return ExampleBatch(ids=ids, lengths=lengths, weights=weights, index=index, **marks)


@dataclass(frozen=True, kw_only=True)
class SpelledRows(LabelledRows):
    """Rows whose batches have the characters of each token, for models that read them.

    spelling: the characters of the tokens in the order of `spelled`; None for models that read ids alone. features:
    float32 (tokens, layers, D) each, features of other models for these tokens (`jaxlm/inference/word_features.py`).
    """

    spelling: Spelling | None = None
    features: tuple[np.ndarray, ...] = ()

    @property
    @abc.abstractmethod
    def borders(self) -> np.ndarray:
        """The first token of each sentence, and the number of tokens, int (sentences + 1,)."""

    def sentences(self) -> list[list[str]]:
        """Return the tokens of each sentence as text."""
        assert self.spelling is not None, "the model reads words"
        words, numbers = self.spelling.words, self.spelling.numbers
        return [[words[i] for i in numbers[low:high]] for low, high in itertools.pairwise(self.borders)]

    @abc.abstractmethod
    def spelled(self, row: int) -> list[tuple[int, int]]:
        """Return the first token of each sequence of a row, and the one after its last, without special tokens."""

    def batch(self, rows: np.ndarray, size: Size, batch_size: int) -> "ExampleBatch":
        found = super().batch(rows, size, batch_size)
        if self.spelling is None:
            return found
        numbers = np.full(found.ids.shape, -1, np.int32)  # padding
        features = tuple(np.zeros((*found.ids.shape, *of.shape[1:]), np.float32) for of in self.features)
        for position, row in enumerate(rows):
            for number, (low, high) in enumerate(self.spelled(int(row))):
                numbers[position, number, : high - low] = self.spelling.numbers[low:high]
                for batch, of_tokens in zip(features, self.features, strict=True):
                    batch[position, number, : high - low] = of_tokens[low:high]
        return dataclasses.replace(found, characters=self.spelling.table[numbers], features=features)


@dataclass(frozen=True, kw_only=True)
class EncodedSplit(SpelledRows):
    """The token sequences of n examples, C per example, concatenated.

    ids: int32 (total,). starts: int64 (n * C + 1,): sequence c of example i is ids[starts[s] : starts[s + 1]] with
    s = i * C + c. second: int32 (n * C,), the index at which the second segment of each sequence begins. reads_last:
    whether the head reads the last token of a sequence; otherwise the first. labels: int32 (n,), float32 (n,) or
    float32 (n, labels). groups: the group of each example, or empty where there are none.
    """

    ids: np.ndarray
    starts: np.ndarray
    second: np.ndarray
    reads_last: bool
    groups: tuple[str, ...] = ()

    def sequences(self, row: int) -> list[np.ndarray]:
        return [self.ids[low:high] for low, high in self.spelled(row)]

    @property
    def borders(self) -> np.ndarray:
        return self.starts

    def spelled(self, row: int) -> list[tuple[int, int]]:
        first = row * self.num_sequences
        bounds = self.starts[first : first + self.num_sequences + 1].tolist()
        return list(itertools.pairwise(bounds))

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        extract = np.maximum(lengths - 1, 0) if self.reads_last else np.zeros_like(lengths)
        second = np.zeros_like(lengths)
        second[: len(rows)] = self.second.reshape(-1, self.num_sequences)[rows]
        labels = np.zeros((len(lengths), *self.labels.shape[1:]), self.labels.dtype)
        labels[: len(rows)] = self.labels[rows]
        return {"extract": extract, "second": second, "labels": labels}


def empty_row(task: Task, input_format: str, length: int) -> Any:
    """Return a batch of one empty row of `length`, for measurements: its shapes are those of a batch of the task."""
    return task.empty_row(FORMATS[input_format], length)


_CHUNK = 4096  # examples tokenized at a time


def encode_split(
    task: Task, data: TaskData, part: str, tokenizer: "Tokenizer", length: int, input_format: str = "gpt1"
) -> Encoded:
    """Return one split of a task as token sequences of at most `length`, for a decoder (`gpt1`) or an encoder (`bert`).

    Raises:
      InputError: a span or tagging task for a decoder; a length without room; a vocabulary without CLS or SEP.
    """
    return encode_examples(task, data.splits[part].examples, tokenizer, length, input_format, part=part)


def encode_examples(
    task: Task,
    examples: Sequence,
    tokenizer: "Tokenizer",
    length: int,
    input_format: str = "gpt1",
    *,
    part: str = "",
) -> Encoded:
    """Return examples, labelled or not, as token sequences of at most `length`; see `encode_split`."""
    if task.of_tokens and not FORMATS[input_format].every_token:
        raise InputError(
            f"task {task.name} needs an encoder, which attends to the tokens on both sides; start from one"
        )
    return task.encode(tuple(examples), tokenizer, length, input_format, part)


def encode_texts(
    task: "TextTask",
    examples: Sequence[Example],
    tokenizer: "Tokenizer",
    length: int,
    input_format: str,
    part: str,
) -> EncodedSplit:
    """Return `encode_examples` for rows of texts."""
    inputs, specials = FORMATS[input_format], tokenizer.specials
    count = inputs.num_sequences(task)
    pieces: list[np.ndarray] = []
    lengths = np.zeros((len(examples), count), np.int64)
    second = np.zeros((len(examples), count), np.int32)
    truncated, row, source = 0, 0, iter(examples)
    question = task.has_choices and task.second != "beginning"
    while chunk := list(islice(source, _CHUNK)):
        texts = [inputs.read(example, task) for example in chunk]
        encoded = iter(tokenizer.encode_batch([text for parts, choices in texts for text in (*parts, *choices)]))
        for example, (read_texts, read_choices) in zip(chunk, texts, strict=True):
            parts = list(islice(encoded, len(read_texts)))
            choices = list(islice(encoded, len(read_choices)))
            keep = question and len(example.texts) > 1
            sequences, second[row], is_truncated = inputs.arrange(
                parts, choices, task.form, specials, length, special_tokens=task.special_tokens, keep_second=keep
            )
            truncated += is_truncated
            lengths[row] = [len(sequence) for sequence in sequences]
            pieces.append(np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths[row].sum())))
            row += 1
    labelled = bool(examples) and all(example.label is not None for example in examples)
    labels = task.no_targets(len(examples), length)
    if labelled:
        labels[:] = [task.label_number(example.label) for example in examples]  # type: ignore[arg-type]
    groups = tuple(example.group for example in examples)
    return EncodedSplit(
        ids=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int64),
        labels=labels,
        labelled=labelled,
        truncated=truncated,
        num_sequences=count,
        longest=lengths.max(axis=1, initial=0).astype(np.int32),
        length=length,
        pad=specials.get("pad", 0),  # GPT-1's vocabulary has none and pads with id 0; causal attention ignores it
        second=second.reshape(-1),
        reads_last=inputs.reads_last,
        groups=groups if any(groups) else (),
        spelling=spelling_of(_kept_words(examples, lengths, tokenizer)) if inputs.characters else None,
        part=part,
    )


def _kept_words(examples: Sequence[Example], lengths: np.ndarray, tokenizer: "Tokenizer") -> Iterator[str]:
    """Yield the tokens of the texts of examples, of each as many as its sequence has. lengths: (examples, texts)."""
    for first in range(0, len(examples), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        texts = [text for example in examples[chunk] for text in example.texts]
        encoded = tokenizer.encode_batch_with_offsets(texts)
        for text, (_, offsets), length in zip(texts, encoded, lengths[chunk].reshape(-1).tolist(), strict=True):
            for low, high in offsets[:length].tolist():
                yield text[low:high]
