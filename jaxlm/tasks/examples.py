"""Examples of a labelled data set: one class per kind of row, its splits, and their summary.

Every kind of row has `labelled`, `key` (rows with equal keys are near copies, and stay together when a dev split is
held out), `parts` (its texts, to count the empty ones), `gold` (its label as JSON, None if unlabelled), `fields()` (its
inputs by the names of the columns) and `values()` (everything that decides what a run sees, as JSON). `row` is the row
of the file with all its fields, for readers that are asked to keep it. For `jaxlm.show` it has `shown` (its texts),
`head_reads` (the positions that the head reads), `shown_label` (its label, as in the file and as numbers of the loss)
and `shown_pieces` (tokens with their labels). `distribution` describes the labels of several, and `same` names what
rows with equal keys share.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxlm.wording import counted

if TYPE_CHECKING:
    from jaxlm.tasks.task import Columns


class Row:
    """The answers that are alike for most kinds of rows."""

    same: ClassVar[str] = "texts"
    head_reads: ClassVar[str] = "position {extract}"
    gold: Any
    parts: Any

    @property
    def labelled(self) -> bool:
        return self.gold is not None

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def shown_pieces(self, pieces: list[str], labels: np.ndarray) -> list[str]:
        return pieces


@dataclass(frozen=True)
class Example(Row):
    """One row of a task: its texts, the answers to choose from, and the label as the files spell it.

    texts: one text, or two in the order of the columns (premise, hypothesis; article, question). choices: the answers
    of a choice task. label: a class name, the name of the correct choice, the score for regression, or the names of any
    number of labels; None: unlabelled. group: a name under which metrics are also reported separately (RACE's middle
    and high), or empty.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...] = ()
    label: str | float | tuple[str, ...] | None = None
    group: str = ""
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def gold(self) -> str | float | list[str] | None:
        """The label, a score, or a list of labels."""
        return list(self.label) if isinstance(self.label, tuple) else self.label

    def fields(self, columns: "Columns") -> dict[str, Any]:
        """Return the texts and choices by the first name of their columns."""
        texts = columns.whole[:1] or [names[0] for names in columns.texts]
        choices: dict[str, Any] = dict(zip((names[0] for names in columns.choices), self.choices, strict=False))
        if not columns.choices and columns.choice_list:
            choices = {columns.choice_list[0]: list(self.choices)}
        return dict(zip(texts, self.texts, strict=False)) | choices

    @property
    def key(self) -> Any:
        return self.texts, self.choices

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.texts, *self.choices)

    def values(self) -> list[Any]:
        return [self.texts, self.choices, self.label] + ([self.group] if self.group else [])

    def shown_label(self, labels: np.ndarray) -> str:
        if isinstance(self.label, tuple):
            return f"labels {', '.join(map(repr, self.label)) or 'none'}, as numbers {labels.astype(int).tolist()}"
        return f"label {self.label!r}, as a number {labels:g}"

    @staticmethod
    def distribution(examples: Sequence["Example"], labels: tuple[str, ...]) -> str:
        if isinstance(examples[0].label, float):
            scores = np.array([example.label for example in examples])
            return f"scores {scores.min():g} to {scores.max():g}, mean {scores.mean():.4g}"
        counts = dict.fromkeys(labels, 0)
        for example in examples:
            for label in example.label if isinstance(example.label, tuple) else (str(example.label),):
                counts[label] += 1
        if unlabelled := sum(example.label == () for example in examples):
            counts["none of them"] = unlabelled
        return "labels " + ", ".join(f"{label}: {count}" for label, count in counts.items())


@dataclass(frozen=True)
class TextPair(Example):
    """A source text and its target texts: `texts` holds the source, `label` the target, or several of them."""

    same: ClassVar[str] = "source"

    @property
    def targets(self) -> tuple[str, ...]:
        """The target texts, the first of which is trained on; none of an unlabelled row."""
        return self.label if isinstance(self.label, tuple) else () if self.label is None else (str(self.label),)

    def shown_label(self, labels: np.ndarray) -> str:
        return f"targets {', '.join(map(repr, self.targets)) or 'none'}"

    @staticmethod
    def distribution(examples: Sequence["TextPair"], labels: tuple[str, ...]) -> str:  # type: ignore[override]
        targets = [text for example in examples for text in example.targets]
        of_source = np.mean([len(example.texts[0].split()) for example in examples])
        several = f" in {counted(len(targets), 'target')}" if len(targets) > len(examples) else ""
        of_target = np.mean([len(text.split()) for text in targets])
        return f"{of_source:.1f} words per source and {of_target:.1f} per target{several}"


@dataclass(frozen=True)
class SpanExample(Row):
    """A question about a text. answers: (text, index of its first code point in context), several where several people
    were asked, none where the text has no answer; None: unlabelled. name: the question's id."""

    name: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None = None
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    same: ClassVar[str] = "text"
    head_reads: ClassVar[str] = "all positions"

    @property
    def gold(self) -> list[str] | None:
        """The texts of the answers, an empty list for no answer."""
        return None if self.answers is None else [text for text, _ in self.answers]

    def fields(self, columns: "Columns") -> dict[str, Any]:
        """Return the id, the context and the question."""
        context, question = (names[0] for names in columns.texts)
        return {"id": self.name, context: self.context, question: self.question}

    @property
    def key(self) -> Any:
        return self.context

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.question, self.context)

    @property
    def answer_span(self) -> tuple[int, int] | None:
        """[start, end) of the first answer in the context; None if there is none or its text is not at its offset."""
        if not self.answers:
            return None
        text, start = self.answers[0]
        matches = start >= 0 and text and self.context[start : start + len(text)] == text
        return (start, start + len(text)) if matches else None

    def values(self) -> list[Any]:
        return [self.name, self.question, self.context, self.answers]

    def shown_label(self, labels: np.ndarray) -> str:
        answers = ", ".join(repr(text) for text, _ in self.answers or ()) or "none"
        return f"answers {answers}, in this window tokens {labels[0]} to {labels[1]}"

    @staticmethod
    def distribution(examples: Sequence["SpanExample"], labels: tuple[str, ...]) -> str:
        answerable = sum(bool(example.answers) for example in examples)
        unanswerable = len(examples) - answerable
        return f"{counted(answerable, 'question')} with an answer" + (
            f", {unanswerable} without" if unanswerable else ""
        )


@dataclass(frozen=True)
class TaggedSentence(Row):
    """A sentence's tokens and their tags as the file spells them (None: unlabelled).

    document: the number or name of the sentence's document, where documents are marked. text: the text that was split
    into `tokens`, where a text was given. where: file and line of the first token, for messages.
    """

    tokens: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    document: int | str | None = None
    text: str = ""
    where: str = field(default="", compare=False)
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    same: ClassVar[str] = "tokens, or of the same document,"
    head_reads: ClassVar[str] = "the tagged positions"

    @property
    def gold(self) -> list[str] | None:
        """The tags."""
        return None if self.tags is None else list(self.tags)

    def fields(self, columns: "Columns") -> dict[str, Any]:
        """Return the tokens, and the document where documents are marked."""
        tokens = {columns.texts[0][0]: list(self.tokens)}
        return tokens if self.document is None else tokens | {"document": self.document}

    @property
    def key(self) -> Any:
        return self.tokens if self.document is None else self.document

    @property
    def parts(self) -> tuple[str, ...]:
        return self.tokens

    def values(self) -> list[Any]:
        return [self.tokens, self.tags, self.document]

    def without_tags(self) -> "TaggedSentence":
        """Return the sentence unlabelled."""
        return replace(self, tags=None)

    @property
    def shown(self) -> tuple[str, ...]:
        return (" ".join(self.tokens),)

    def shown_label(self, labels: np.ndarray) -> str:
        return "no tags" if self.tags is None else f"{int((labels >= 0).sum())} tags"

    def shown_pieces(self, pieces: list[str], labels: np.ndarray) -> list[str]:
        """Return the tokens, followed by the number of their tag after a slash where they have one."""
        if self.tags is None:
            return pieces
        return [
            piece if tag < 0 else f"{piece}/{tag}" for piece, tag in zip(pieces, labels[: len(pieces)], strict=True)
        ]

    @staticmethod
    def distribution(examples: Sequence["TaggedSentence"], labels: tuple[str, ...]) -> str:
        tokens = sum(len(example.tokens) for example in examples)
        documents = len({example.document for example in examples if example.document is not None})
        tags = Counter(tag for example in examples for tag in example.tags or ())
        distribution = ", ".join(f"{tag}: {tags[tag]}" for tag in sorted(tags))
        return (
            counted(tokens, "token")
            + (f" in {counted(documents, 'document')}" if documents else "")
            + f"; tags {distribution}"
        )


@dataclass(frozen=True)
class Split:
    """The examples of one split, and counts from reading it.

    examples: `Example`, `SpanExample` or `TaggedSentence`, by the kind of the task. rows_read counts data rows without
    the header; dropped holds (line number, reason); empty_fields counts the texts and choices that are empty after
    stripping (such rows are kept); notes are further remarks on the split.
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
    """The splits of a task: `train`, `dev` and optionally `test` (MNLI has two each of dev and test).

    labels are the task's (the names of the choices for a choice task; empty for scores and spans). held_out is a
    sentence that describes the held-out dev rows, or None where the files have a dev split. left_out: the training rows
    that are not in a sample.
    """

    splits: Mapping[str, Split]
    labels: tuple[str, ...] = ()
    held_out: str | None = None
    left_out: tuple[Any, ...] = ()

    def fingerprint(self) -> str:
        """Return the sha256 of every example of every split, in order; runs with equal values saw the same data."""
        digest = hashlib.sha256()
        for name, split in self.splits.items():
            digest.update(json.dumps([name, len(split.examples)]).encode())
            for example in split.examples:
                digest.update(json.dumps(example.values()).encode())
        return digest.hexdigest()

    def report(self) -> list[str]:
        """Return a line per split: rows read, dropped (with line numbers), empty fields, and the label distribution."""
        lines = []
        for name, split in self.splits.items():
            line = f"{name}: {counted(len(split.examples), 'example')} of {counted(split.rows_read, 'row')} read"
            if split.dropped:
                shown = ", ".join(f"line {number} ({why})" for number, why in split.dropped[:10])
                more = f" and {len(split.dropped) - 10} more" if len(split.dropped) > 10 else ""
                line += f"; {len(split.dropped)} dropped: {shown}{more}"
            if split.empty_fields:
                line += f"; {counted(split.empty_fields, 'empty field')}"
            line += "; " + (
                split.examples[0].distribution(split.examples, self.labels) if split.labelled else "no labels"
            )
            lines += [line, *(f"{name}: {note}" for note in split.notes)]
        return lines + ([self.held_out] if self.held_out else [])
