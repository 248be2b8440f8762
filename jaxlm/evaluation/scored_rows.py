"""Rows of a file whose sentences or choices a language model scores, and how often it likes the right choice best."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.errors import InputError
from jaxlm.inference.scoring import Score
from jaxlm.tasks import Columns
from jaxlm.tasks.reading.files import Errors, numbered_lines, open_input
from jaxlm.tasks.reading.rows import JSON_SUFFIXES, RowReader
from jaxlm.tasks.task import Quoting


@dataclass(frozen=True, kw_only=True)
class RowsToScore:
    """Which of a file's fields are scored, and what stands before them."""

    input: str
    """A text file with a sentence a line; or a JSONL, CSV or TSV file with --fields. - is standard input."""
    fields: tuple[str, ...] = ()
    """The field or column to score. Several are choices, of which the most likely is named."""
    choice_list: str | None = None
    """Of JSONL, a field that holds the choices as a list, in place of --fields; they are called 0, 1, …"""
    context: str | None = None
    """A field that stands before each, and is not scored itself."""
    separator: str = " "
    """What parts the context from what follows."""
    label: str | None = None
    """A field that says which choice is right; then accuracies are reported."""
    label_names: tuple[str, ...] = ()
    """How the label spells each choice, in their order; the names of the fields unless given."""
    by: Literal["sum", "per-token"] = "sum"
    """Which choice is the most likely: by the sum over its tokens, or by their mean."""
    quoting: Quoting = "none"
    """Of a TSV: fields are taken as they are, or may be wrapped in double quotes (csv)."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: stop and name them, or put U+FFFD in their place."""


@dataclass(frozen=True)
class ScoredRow:
    """A row of a file: its sentence or its choices by name, what is to be scored of each, and the right one's name."""

    line: int
    texts: tuple[str, ...]
    names: tuple[str, ...]
    sequences: tuple[Any, ...]
    label: str | None


def rows_to_score(arguments: RowsToScore, encode: Callable[[str, str, str], Any]) -> Iterator[ScoredRow]:
    """The rows of the input, as they come. Blank lines of a text file are left out.

    encode: (text, context, separator) -> what is to be scored, as the model takes it.
    """
    if not arguments.fields and arguments.choice_list is None:
        name = "standard input" if arguments.input == "-" else arguments.input
        with open_input(arguments.input) as stream:
            for number, text in numbered_lines(stream, name, arguments.errors):
                if text.strip():
                    yield ScoredRow(number, (text,), ("text",), (encode(text, "", arguments.separator),), None)
        return
    one = len(arguments.fields) == 1
    context = ((arguments.context,),) if arguments.context else ()
    columns = Columns(
        texts=(*context, (arguments.fields[0],)) if one else context,
        choices=() if one else tuple((name,) for name in arguments.fields),
        choice_list=(arguments.choice_list,) if arguments.choice_list else (),
        label=(arguments.label,) if arguments.label else (),
    )
    rule: Literal["required", "ignored"] = "required" if arguments.label else "ignored"
    reader = RowReader(
        arguments.input, columns, label=rule, quoting=arguments.quoting, errors=arguments.errors, blank_lines="refuse"
    )
    for number, example in reader:
        texts = (example.texts[-1],) if one else example.choices
        names = arguments.label_names or arguments.fields or tuple(str(k) for k in range(len(texts)))
        label = None if example.label is None else str(example.label)
        if len(names) != len(texts) or (label is not None and label not in names):
            raise InputError(
                f"{reader.name} line {number}: the label {label!r} is none of the {len(texts)} choices, "
                f"{', '.join(names)}; say how the label spells them, in their order, with --label-names"
            )
        before = example.texts[0] if arguments.context else ""
        sequences = tuple(encode(text, before, arguments.separator) for text in texts)
        if texts:
            yield ScoredRow(number, texts, names, sequences, label)


def row_result(index: int, row: ScoredRow, found: Sequence[Score], by: str, several: bool) -> dict[str, Any]:
    """A line of the output: log-probability and tokens of the sentence, or of each choice by its name."""
    if not several:
        return {"index": index, "log_probability": found[0].log_probability, "tokens": found[0].tokens}
    best = int(np.argmax([_merit(score, by) for score in found]))
    line: dict[str, Any] = {
        "index": index,
        "log_probability": {name: score.log_probability for name, score in zip(row.names, found, strict=True)},
        "tokens": {name: score.tokens for name, score in zip(row.names, found, strict=True)},
        "most_likely": row.names[best],
    }
    return line if row.label is None else line | {"label": row.label}


@dataclass
class Tally:
    """How often the right choice was the most likely; where n are equally likely it counts 1/n."""

    rows: int = 0
    right: dict[str, float] = dataclasses.field(default_factory=lambda: {"sum": 0.0, "per-token": 0.0})

    def add(self, row: ScoredRow, found: Sequence[Score]) -> None:
        """Count one labelled row."""
        self.rows += 1
        for by in self.right:
            merits = [_merit(score, by) for score in found]
            first = [name for name, merit in zip(row.names, merits, strict=True) if merit == max(merits)]
            self.right[by] += (row.label in first) / len(first)

    @property
    def by_sum(self) -> float:
        """Accuracy by the sum over tokens."""
        return self.right["sum"] / self.rows

    @property
    def by_mean(self) -> float:
        """Accuracy by the mean over tokens."""
        return self.right["per-token"] / self.rows


def _merit(score: Score, by: str) -> float:
    value = score.log_probability if by == "sum" else score.per_token
    return value if score.tokens else -math.inf


def row_text(line: dict[str, Any], row: ScoredRow, found: Sequence[Score], several: bool) -> str:
    """The same for people."""
    if not several:
        return f"{found[0].log_probability:12.4f} {found[0].per_token:9.4f} a token  {row.texts[0]}"
    parts = (f"{name} {score.log_probability:.4f}" for name, score in zip(row.names, found, strict=True))
    return f"{line['index']:6d}  {line['most_likely']}  ({', '.join(parts)})"


def check_rows(arguments: RowsToScore) -> None:
    """Refuse settings that do not go together."""
    suffix = Path(arguments.input).suffix.lower()
    if arguments.fields and arguments.choice_list:
        raise InputError("--fields and --choice-list: give one of them")
    rows = bool(arguments.fields or arguments.choice_list)
    if not rows and suffix in (*JSON_SUFFIXES, ".csv", ".tsv"):
        raise InputError(f"{arguments.input} has fields: name the one to score with --fields, or several as choices")
    if not rows and (arguments.label or arguments.context):
        raise InputError("--label and --context name fields: give --fields too, the field or fields to score")
    if arguments.label and len(arguments.fields) == 1:
        raise InputError("--label says which of several choices is right: give two --fields or more")
    if len(set(arguments.fields)) < len(arguments.fields):
        raise InputError(f"--fields {' '.join(arguments.fields)}: a field is named twice")
