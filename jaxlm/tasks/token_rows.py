"""Rows whose labels are of tokens: questions as windows over their texts, and sentences with a tag for each word.

CLS question SEP window SEP (Devlin et al. 2019, section 4.2): a text that does not fit is read in several windows,
whose starts are `options.stride` tokens apart; the question keeps its first `options.question_length` tokens. Every
window is a training row: one without the whole answer has its start and end at CLS, in SQuAD 1.1 too (`run_squad.py`,
lines 409 to 420). A position in several windows is scored in the one where it has the most context on its shorter side
(the original's maximum context).

CLS sentence SEP (section 5.3), or the sentence alone for a network over words: a word is tagged at its first token; its
other tokens, CLS, SEP and the words around the sentence have no label and no loss. Where documents are marked a
sentence is read together with as many whole neighbours of its document as fit, with about as many tokens before it as
after it. Every word gets a prediction: O where it has no token (a variation selector alone) or is beyond the limit; no
tag, "", where tags are token classes and there is no O.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.encoding import LabelledRows, SpelledRows, spelling_of
from jaxlm.tasks.examples import SpanExample, TaggedSentence
from jaxlm.tasks.input_formats import FORMATS, special_ids
from jaxlm.tasks.metrics.tags import entities, spell
from jaxlm.tasks.task import Task

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SpanSplit(LabelledRows):
    """The windows of all questions, in order; a window is a row.

    examples: the questions. question_ids: the tokens of each, truncated. contexts, offsets: for each distinct text its
    tokens, int32 (tokens,), and their offsets, int64 (tokens, 2): [start, end) in code points. context_of: the text of
    each question. question_of, first, count: int64 (rows,): a row's question, and the first token and the number of
    tokens of its window. labels: int32 (rows, 2), first and last token of the answer in the row, (0, 0) without one.
    truncated: number of truncated questions.
    """

    examples: tuple[SpanExample, ...]
    question_ids: tuple[np.ndarray, ...]
    contexts: tuple[np.ndarray, ...]
    offsets: tuple[np.ndarray, ...]
    context_of: np.ndarray
    question_of: np.ndarray
    first: np.ndarray
    count: np.ndarray
    cls: int
    sep: int

    @property
    def num_examples(self) -> int:
        """The number of questions."""
        return len(self.examples)

    def example_of(self, row: int) -> int:
        return int(self.question_of[row])

    def rows_of(self, question: int) -> range:
        """Return the rows that are a question's windows."""
        low, high = np.searchsorted(self.question_of, [question, question + 1])
        return range(int(low), int(high))

    def begin(self, row: int) -> int:
        """Return the index at which the window, and with it the second segment, begins in its row."""
        return len(self.question_ids[self.question_of[row]]) + 2

    def sequences(self, row: int) -> list[np.ndarray]:
        question = self.question_of[row]
        context = self.contexts[self.context_of[question]]
        window = context[self.first[row] : self.first[row] + self.count[row]]
        return [np.concatenate([[self.cls], self.question_ids[question], [self.sep], window, [self.sep]])]

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        second, labels = np.zeros_like(lengths), np.zeros((len(lengths), 2), np.int32)
        second[: len(rows), 0] = [self.begin(int(row)) for row in rows]
        labels[: len(rows)] = self.labels[rows]
        return {"extract": np.zeros_like(lengths), "second": second, "labels": labels}


def encode_questions(
    task: Task, examples: tuple[SpanExample, ...], tokenizer: "Tokenizer", length: int, input_format: str, part: str
) -> SpanSplit:
    """Return the windows of these questions, each of at most `length` tokens, for any format with a head for spans.

    Raises:
      InputError: a vocabulary without CLS or SEP; a question that leaves no room for its text.
    """
    cls, sep = special_ids(tokenizer.specials, length)
    asked = tokenizer.encode_batch([example.question for example in examples])
    limit = task.options.question_length
    questions = tuple(np.array(ids[:limit], np.int32) for ids in asked)
    texts = {example.context: None for example in examples}
    numbers = {text: number for number, text in enumerate(texts)}
    encoded = tokenizer.encode_batch_with_offsets(list(texts))
    contexts = tuple(np.array(ids, np.int32) for ids, _ in encoded)
    offsets = tuple(spans for _, spans in encoded)
    context_of = np.array([numbers[example.context] for example in examples], np.int64)
    rows: list[tuple[int, int, int]] = []
    labels: list[tuple[int, int]] = []
    for question, example in enumerate(examples):
        room = length - len(questions[question]) - 3
        if room < 1:
            raise InputError(
                f"length must exceed the {len(questions[question]) + 3} tokens of a question with its special tokens, "
                f"got {length}; give a longer length or a shorter options.question_length"
            )
        number = context_of[question]
        answer = _answer_tokens(example, offsets[number])
        for start, count in windows(len(contexts[number]), room, task.options.stride):
            rows.append((question, start, count))
            begin = len(questions[question]) + 2 - start
            inside = answer is not None and start <= answer[0] and answer[1] < start + count
            labels.append((answer[0] + begin, answer[1] + begin) if inside and answer is not None else (0, 0))
    table = np.array(rows, np.int64).reshape(-1, 3)
    asked_lengths = np.array([len(ids) for ids in questions], np.int64)
    return SpanSplit(
        examples=examples,
        question_ids=questions,
        contexts=contexts,
        offsets=offsets,
        context_of=context_of,
        question_of=table[:, 0],
        first=table[:, 1],
        count=table[:, 2],
        labels=np.array(labels, np.int32).reshape(-1, 2),
        labelled=bool(examples) and all(example.labelled for example in examples),
        truncated=sum(len(ids) > limit for ids in asked),
        longest=(asked_lengths[table[:, 0]] + table[:, 2] + 3).astype(np.int32),
        length=length,
        pad=tokenizer.specials.get("pad", 0),
        cls=cls,
        sep=sep,
        part=part,
    )


def windows(total: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return (first token, tokens) of each window over a text of `total` tokens; one of none for an empty text."""
    found, start = [], 0
    while True:
        count = min(room, total - start)
        found.append((start, count))
        if start + count >= total:
            return found
        start += min(count, stride)


def most_context(rows: list[tuple[int, int]]) -> list[np.ndarray]:
    """Return, for each window (first token, tokens) of one text, a mask of the tokens with their most context in it.

    The score of a token is the smaller of the numbers of tokens before and after it in the window, plus a hundredth of
    the window's tokens; the first of equal windows wins (`run_squad.py`, `_check_is_max_context`).
    """
    if len(rows) == 1:
        return [np.ones(rows[0][1], bool)]
    end = max(first + count for first, count in rows)
    best, owner = np.full(end, -1.0), np.zeros(end, np.int64)
    for number, (first, count) in enumerate(rows):
        position = np.arange(count)
        score = np.minimum(position, count - 1 - position) + 0.01 * count
        better = score > best[first : first + count]
        best[first : first + count][better] = score[better]
        owner[first : first + count][better] = number
    return [owner[first : first + count] == number for number, (first, count) in enumerate(rows)]


def _answer_tokens(example: SpanExample, offsets: np.ndarray) -> tuple[int, int] | None:
    """Return the first and last token that overlap the first answer."""
    span = example.answer_span
    if span is None:
        return None
    touched = np.flatnonzero((offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0]))
    return (int(touched[0]), int(touched[-1])) if len(touched) else None


@dataclass(frozen=True, kw_only=True)
class TaggedSplit(SpelledRows):
    """n sentences and their context; a sentence is a row.

    ids: int32 (tokens,), those of all sentences, concatenated. words: int32 (tokens,), the word of its sentence that
    begins with the token, else -1. labels: int32 (tokens,), the tag of that word, 0 in unlabelled sentences, -1 where
    there is no word.
    own: int64 (n, 2), a sentence's tokens without those beyond the limit; read: int64 (n, 2), the tokens of its row.
    truncated: number of truncated sentences. before, after: the special tokens around a row's sentences. mask: the id
    of MASK, None in a vocabulary without it.
    """

    examples: tuple[TaggedSentence, ...]
    ids: np.ndarray
    words: np.ndarray
    own: np.ndarray
    read: np.ndarray
    before: tuple[int, ...]
    after: tuple[int, ...]
    mask: int | None = None

    def sequences(self, row: int) -> list[np.ndarray]:
        low, high = self.read[row]
        return [np.concatenate([self.before, self.ids[low:high], self.after]).astype(np.int32)]

    @property
    def borders(self) -> np.ndarray:
        return np.append(self.own[:, 0], len(self.ids))

    def spelled(self, row: int) -> list[tuple[int, int]]:
        low, high = self.read[row].tolist()
        return [(low, high)]

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        labels = np.full((len(lengths), length), -1, np.int32)
        for position, row in enumerate(rows):
            labels[position, self._place(row)] = self.labels[slice(*self.own[row])]
        return {"extract": np.zeros_like(lengths), "second": lengths, "labels": labels}

    def masked(self, batch: Any, rate: float, random: np.random.Generator) -> np.ndarray:
        """Return the ids of a batch of these rows, int32 (B, 1, L), with some of the words replaced by MASK.

        Each word of a sentence itself, not of its context, is chosen with probability `rate`, with all of its tokens.
        """
        ids = np.array(batch.ids)
        for position, row in enumerate(batch.index[batch.index >= 0]):
            word = np.cumsum(self.words[slice(*self.own[row])] >= 0)  # the number of each token's word, from 1
            chosen = random.random(len(word) + 1) < rate
            ids[position, 0, self._place(row)][chosen[word]] = self.mask
        return ids

    def _place(self, row: int) -> slice:
        """Return the place of a sentence's own tokens in its row."""
        low, high = self.own[row]
        begin = len(self.before) + low - self.read[row, 0]
        return slice(begin, begin + high - low)


def encode_sentences(
    task: Task, examples: tuple[TaggedSentence, ...], tokenizer: "Tokenizer", length: int, input_format: str, part: str
) -> TaggedSplit:
    """Return rows of at most `length` tokens for these sentences; `task.options.context` selects their context."""
    inputs = FORMATS[input_format]
    assert inputs.around is not None, "checked by encode_examples"
    before, after = inputs.around(tokenizer.specials, length)
    texts = [" ".join(example.tokens) for example in examples]
    encoded = tokenizer.encode_batch_with_offsets(texts)
    labelled = bool(examples) and all(example.labelled for example in examples)
    numbers = {label: number for number, label in enumerate(task.labels)}
    ids, words, labels = [], [], []
    for example, (tokens, offsets) in zip(examples, encoded, strict=True):
        starting = first_tokens(example.tokens, offsets)
        tags = np.zeros(len(example.tokens) + 1, np.int32)
        tags[-1] = -1  # of tokens that begin no word
        if labelled:
            tags[:-1] = [numbers[tag] for tag in _spelt_as(task, example.tags or (), numbers)]
        ids.append(np.array(tokens, np.int32))
        words.append(starting)
        labels.append(tags[starting])
    ends = np.cumsum([0, *(len(tokens) for tokens in ids)])
    room = length - len(before) - len(after)
    own = np.stack([ends[:-1], np.minimum(ends[1:], ends[:-1] + room)], axis=1).astype(np.int64)
    read = own.copy()
    if task.options.context == "document":
        documents = [example.document for example in examples]
        for row in np.flatnonzero(np.diff(ends) < room):
            first, last = sentence_context(documents, ends, int(row), room)
            read[row] = ends[first], ends[last]
    return TaggedSplit(
        examples=examples,
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        words=np.concatenate(words) if words else np.zeros(0, np.int32),
        labels=np.concatenate(labels).astype(np.int32) if labels else np.zeros(0, np.int32),
        own=own,
        read=read,
        labelled=labelled,
        truncated=int((np.diff(ends) > room).sum()),
        longest=(read[:, 1] - read[:, 0] + length - room).astype(np.int32),
        length=length,
        pad=tokenizer.specials.get("pad", 0),
        before=tuple(before),
        after=tuple(after),
        mask=tokenizer.specials.get("mask"),
        spelling=spelling_of(_tokens(texts, encoded)) if inputs.characters else None,
        part=part,
    )


def _tokens(texts: Sequence[str], encoded: Sequence[tuple[list[int], np.ndarray]]) -> Iterator[str]:
    """Yield the text of each token. encoded: ids and offsets of each text."""
    for text, (_, offsets) in zip(texts, encoded, strict=True):
        for low, high in offsets.tolist():
            yield text[low:high]


def _spelt_as(task: Task, tags: Sequence[str], known: Container[str]) -> Sequence[str]:
    """Return tags as the model's labels spell them: BIO, or with the other mark if an imported model has only that."""
    if task.scheme == "none":
        return tags
    other = {"B": "I", "I": "B"}
    spelt = spell(entities(tags), len(tags))
    return [tag if tag in known else other.get(tag[0], tag[0]) + tag[1:] for tag in spelt]


def first_tokens(words: Sequence[str], offsets: np.ndarray) -> np.ndarray:
    """Return int32 (tokens,): the word that begins with a token, else -1, for words that were joined by blanks.

    offsets: int (tokens, 2), the offsets of the tokens in the joined text. A token that is only the blank before a word
    begins none.
    """
    lengths = np.array([len(word) for word in words], np.int64)
    starts = np.cumsum(lengths + 1) - lengths - 1
    word = np.searchsorted(starts, np.maximum(offsets[:, 1] - 1, 0), side="right") - 1
    inside = (offsets[:, 1] > offsets[:, 0]) & (word >= 0)
    inside &= offsets[:, 1] - 1 < (starts + lengths)[word] if len(words) else False
    found = np.full(len(offsets), -1, np.int32)
    tokens = np.flatnonzero(inside)
    _, first = np.unique(word[tokens], return_index=True)
    found[tokens[first]] = word[tokens[first]]
    return found


def sentence_context(documents: Sequence[Any], ends: np.ndarray, row: int, room: int) -> tuple[int, int]:
    """Return the sentences [first, last) that are read with sentence `row`: as many of its document as fit, whole.

    Sentences are added one at a time on the side with fewer tokens so far, or on the other side if the next does not
    fit. documents: the document of each sentence, None if unknown. ends: (n + 1,), token boundaries of the sentences.
    """
    first, last = row, row + 1
    open_before = open_after = documents[row] is not None
    while open_before or open_after:
        left = room - (ends[last] - ends[first])
        fewer_before = ends[row] - ends[first] <= ends[last] - ends[row + 1]
        if open_before and (fewer_before or not open_after):
            open_before = first > 0 and documents[first - 1] == documents[row] and ends[first] - ends[first - 1] <= left
            first -= open_before
        else:
            open_after = (
                last < len(documents) and documents[last] == documents[row] and ends[last + 1] - ends[last] <= left
            )
            last += open_after
    return first, last
