"""Sentences as rows whose tokens are tagged (Devlin et al. 2019, section 5.3).

A word is tagged at its first token; its other tokens, CLS, SEP and the words around the sentence have no label and no
loss. Where documents are marked a sentence is read together with as many whole neighbours of its document as fit, with
about as many tokens before it as after it. Every word gets a prediction: O where it has no token (a variation selector
alone) or is beyond the limit; no tag, "", where tags are token classes and there is no O.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlm.tasks.batching.bert_inputs import special_ids
from jaxlm.tasks.batching.encoded_split import Encoded
from jaxlm.tasks.entities import entities, spell
from jaxlm.tasks.examples import TaggedSentence
from jaxlm.tasks.task import Task

if TYPE_CHECKING:
    from jaxlm.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TaggedSplit(Encoded):
    """n sentences and their context; a sentence is a row.

    ids: int32 (tokens,), those of all sentences, concatenated. words: int32 (tokens,), the word of its sentence that
    begins with the token, else -1. labels: int32 (tokens,), the tag of that word, -1 where there is none.
    own: int64 (n, 2), a sentence's tokens without those beyond the limit; read: int64 (n, 2), the tokens of its row.
    truncated: number of truncated sentences.
    """

    examples: tuple[TaggedSentence, ...]
    ids: np.ndarray
    words: np.ndarray
    own: np.ndarray
    read: np.ndarray
    cls: int
    sep: int

    def sequences(self, row: int) -> list[np.ndarray]:
        low, high = self.read[row]
        return [np.concatenate([[self.cls], self.ids[low:high], [self.sep]])]

    def marks(self, rows: np.ndarray, lengths: np.ndarray, length: int) -> dict[str, np.ndarray]:
        labels = np.full((len(lengths), length), -1, np.int32)
        for position, row in enumerate(rows):
            low, high = self.own[row]
            begin = 1 + low - self.read[row, 0]
            labels[position, begin : begin + high - low] = self.labels[low:high]
        return {"extract": np.zeros_like(lengths), "second": lengths, "labels": labels}


def encode_sentences(
    task: Task, examples: tuple[TaggedSentence, ...], tokenizer: "Tokenizer", length: int, input_format: str, part: str
) -> TaggedSplit:
    """Return rows of at most `length` tokens for these sentences; `task.options.context` selects their context."""
    cls, sep = special_ids(tokenizer.specials, length)
    encoded = tokenizer.encode_batch_with_offsets([" ".join(example.tokens) for example in examples])
    labelled = bool(examples) and all(example.labelled for example in examples)
    numbers = {label: number for number, label in enumerate(task.labels)}
    ids, words, labels = [], [], []
    for example, (tokens, offsets) in zip(examples, encoded, strict=True):
        starting = first_tokens(example.tokens, offsets)
        tags = np.full(len(example.tokens) + 1, -1, np.int32)  # the last entry serves tokens that begin no word
        if labelled:
            tags[:-1] = [numbers[tag] for tag in _spelt_as(task, example.tags or (), numbers)]
        ids.append(np.array(tokens, np.int32))
        words.append(starting)
        labels.append(tags[starting])
    ends = np.cumsum([0, *(len(tokens) for tokens in ids)])
    room = length - 2
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
        longest=(read[:, 1] - read[:, 0] + 2).astype(np.int32),
        length=length,
        pad=tokenizer.specials.get("pad", 0),
        cls=cls,
        sep=sep,
        part=part,
    )


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
