"""The rows of a labelled data set: what one of each kind holds, the parts they stand in, and what is said of them.

Every kind of row has `labelled`, `key` (rows with equal keys are near copies, and stay on one side when a dev part is
held out), `parts` (its texts, to count the empty ones) and `values()` (all that decides what a run sees, as JSON).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Example:
    """One row of a task: its texts, the answers to choose from, and the label as the files spell it.

    texts: one text, or two in the order of the columns (premise, hypothesis; article, question). choices: the answers
    of a choice task. label: a name, for a choice that of the right choice, for regression the score; None: unlabelled.
    group: a name under which figures are given apart too (RACE's middle and high), or empty.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...] = ()
    label: str | float | None = None
    group: str = ""

    @property
    def labelled(self) -> bool:
        return self.label is not None

    @property
    def key(self) -> Any:
        return self.texts, self.choices

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.texts, *self.choices)

    def values(self) -> list[Any]:
        return [self.texts, self.choices, self.label] + ([self.group] if self.group else [])


@dataclass(frozen=True)
class SpanExample:
    """A question about a text. answers: (text, index of its first code point in context), several where people were
    asked several times, none where the text has no answer; None: unlabelled. name: the question's id."""

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None

    @property
    def labelled(self) -> bool:
        return self.answers is not None

    @property
    def key(self) -> Any:
        return self.context

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.question, self.context)

    @property
    def first_place(self) -> tuple[int, int] | None:
        """[start, end) of the first answer in the context, or None where it has none or it does not stand there."""
        if not self.answers:
            return None
        text, start = self.answers[0]
        stands = start >= 0 and text and self.context[start : start + len(text)] == text
        return (start, start + len(text)) if stands else None

    def values(self) -> list[Any]:
        return [self.name, self.question, self.context, self.answers]


@dataclass(frozen=True)
class TaggedSentence:
    """A sentence's tokens and their tags as the file spells them (None: unlabelled).

    document: the number of the document that it stands in, where documents are marked. text: the text that `tokens`
    were cut from, where a text was given. where: file and line of the first token, for messages.
    """

    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    document: int | str | None = None
    text: str = ""
    where: str = field(default="", compare=False)

    @property
    def labelled(self) -> bool:
        return self.tags is not None

    @property
    def key(self) -> Any:
        return self.tokens if self.document is None else self.document

    @property
    def parts(self) -> tuple[str, ...]:
        return self.tokens

    def values(self) -> list[Any]:
        return [self.tokens, self.tags, self.document]


@dataclass(frozen=True)
class Split:
    """The examples of one part, and what was met on the way.

    examples: `Example`, `SpanExample` or `TaggedSentence`, by the kind of the task. rows_read counts rows of data, the
    header not among them; dropped holds (line number, why); empty_fields counts the texts and choices that are empty
    once blanks at their edges are gone (such rows are kept); notes are what else is to be said of the part.
    """

    examples: tuple[Any, ...]
    rows_read: int = 0
    dropped: tuple[tuple[int, str], ...] = ()
    empty_fields: int = 0
    notes: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        return bool(self.examples) and self.examples[0].labelled


@dataclass(frozen=True)
class TaskData:
    """The parts of a task: `train`, `dev` and, where there is one, `test` (MNLI has two of each of the last).

    labels are the task's (for a choice, the names of the choices; empty for scores and spans). held_out is a sentence
    that says which rows became the dev part, or None where the files bring their own.
    """

    splits: Mapping[str, Split]
    labels: tuple[str, ...] = ()
    held_out: str | None = None

    def fingerprint(self) -> str:
        """sha256 over every example of every part, in order: two runs with the same one saw the same data."""
        digest = hashlib.sha256()
        for name, split in self.splits.items():
            digest.update(json.dumps([name, len(split.examples)]).encode())
            for example in split.examples:
                digest.update(json.dumps(example.values()).encode())
        return digest.hexdigest()

    def report(self) -> list[str]:
        """One line a part: rows read, dropped (with line numbers) and empty fields, and how the labels are spread."""
        lines = []
        for name, split in self.splits.items():
            line = f"{name}: {len(split.examples)} examples of {split.rows_read} rows read"
            if split.dropped:
                shown = ", ".join(f"line {number} ({why})" for number, why in split.dropped[:10])
                more = f" and {len(split.dropped) - 10} more" if len(split.dropped) > 10 else ""
                line += f"; {len(split.dropped)} dropped: {shown}{more}"
            if split.empty_fields:
                line += f"; {split.empty_fields} empty fields"
            line += "; " + (_spread(split.examples, self.labels) if split.labelled else "no labels")
            lines += [line, *(f"{name}: {note}" for note in split.notes)]
        return lines + ([self.held_out] if self.held_out else [])


def _spread(examples: tuple[Any, ...], labels: tuple[str, ...]) -> str:
    """How the labels are spread, in words."""
    if isinstance(examples[0], SpanExample):
        answerable = sum(bool(example.answers) for example in examples)
        without = len(examples) - answerable
        return f"{answerable} questions with an answer" + (f", {without} without" if without else "")
    if isinstance(examples[0], TaggedSentence):
        tokens = sum(len(example.tokens) for example in examples)
        documents = len({example.document for example in examples if example.document is not None})
        tags = Counter(tag for example in examples for tag in example.tags)
        spread = ", ".join(f"{tag}: {tags[tag]}" for tag in sorted(tags))
        return f"{tokens} tokens" + (f" in {documents} documents" if documents else "") + f"; tags {spread}"
    if isinstance(examples[0].label, float):
        scores = np.array([example.label for example in examples])
        return f"scores {scores.min():g} to {scores.max():g}, mean {scores.mean():.4g}"
    counts = dict.fromkeys(labels, 0)
    for example in examples:
        counts[str(example.label)] += 1
    return "labels " + ", ".join(f"{label}: {count}" for label, count in counts.items())
