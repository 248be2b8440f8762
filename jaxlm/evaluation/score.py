"""`evaluate score`: log-probabilities of sentences and choices, and predictions for [MASK].

The rows of a file are sentences or choices; the accuracy is that of the most likely choice.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.errors import InputError
from jaxlm.evaluation.arguments import RowsToScore, Scoring
from jaxlm.evaluation.opening import batch_size_for, opened
from jaxlm.evaluation.output import output_file, progress_of, say, values_json
from jaxlm.inference.scoring import Score, Scored
from jaxlm.inference.text_scoring import MaskedText, candidates_json, candidates_text, text_scorer
from jaxlm.reading.lines import Lines
from jaxlm.reading.rows import SUFFIXES
from jaxlm.tasks import Columns
from jaxlm.tasks.row_reader import RowReader


@dataclass(frozen=True)
class ScoredRow:
    """Row of a file: its sentence or named choices, the encoded sequences, and the name of the correct choice."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    sequences: tuple[Any, ...]
    label: str | None


def rows_to_score(arguments: RowsToScore, encode: Callable[[str, str, str], Any]) -> Iterator[ScoredRow]:
    """Yield the rows of the input, without blank lines of a text file.

    encode: (text, context, separator) -> encoded sequence.
    """
    if not arguments.fields and arguments.choice_list is None:
        for _, text in Lines(arguments.input, arguments.errors):
            if text.strip():
                yield ScoredRow((text,), ("text",), (encode(text, "", arguments.separator),), None)
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
                f"{reader.where(number)}: the label must be one of the {len(texts)} choices, {', '.join(names)}, "
                f"got {label!r}; give the label of each choice, in order, with --label-names"
            )
        before = example.texts[0] if arguments.context else ""
        sequences = tuple(encode(text, before, arguments.separator) for text in texts)
        if texts:
            yield ScoredRow(texts, names, sequences, label)


def row_result(index: int, row: ScoredRow, found: Sequence[Score], by: str, several: bool) -> dict[str, Any]:
    """Return a line of the output: log-probability and tokens of the sentence, or of each choice by name."""
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
    """Accuracy of the most likely choice; n equally likely choices count 1/n each."""

    rows: int = 0
    right: dict[str, float] = dataclasses.field(default_factory=lambda: {"sum": 0.0, "per-token": 0.0})

    def add(self, row: ScoredRow, found: Sequence[Score]) -> None:
        """Count one labelled row."""
        self.rows += 1
        for by in self.right:
            merits = [_merit(score, by) for score in found]
            first = [name for name, merit in zip(row.names, merits, strict=True) if merit == max(merits)]
            self.right[by] += (row.label in first) / len(first)

    def accuracies(self) -> dict[str, float]:
        """Return the accuracies by the sum and by the mean over tokens; empty without labelled rows."""
        return {by: right / self.rows for by, right in self.right.items()} if self.rows else {}


def row_text(line: dict[str, Any], row: ScoredRow, found: Sequence[Score], several: bool) -> str:
    """Return the line of a row as text."""
    if not several:
        return f"{found[0].log_probability:12.4f} {found[0].per_token:9.4f} per token  {row.texts[0]}"
    parts = (f"{name} {score.log_probability:.4f}" for name, score in zip(row.names, found, strict=True))
    return f"{line['index']:6d}  {line['most_likely']}  ({', '.join(parts)})"


def check_rows(arguments: RowsToScore) -> None:
    """Raise InputError for conflicting arguments."""
    suffix = Path(arguments.input).suffix.lower()
    if arguments.fields and arguments.choice_list:
        raise InputError("--fields and --choice-list must not both be given; leave one out")
    rows = bool(arguments.fields or arguments.choice_list)
    if not rows and suffix in SUFFIXES:
        raise InputError(
            f"--fields must be given for {arguments.input}; name the field to score, or several as choices"
        )
    if not rows and (arguments.label or arguments.context):
        raise InputError("--label and --context need --fields; give the field or fields to score")
    if arguments.label and len(arguments.fields) == 1:
        raise InputError("--label needs several choices, got one of --fields; give two or more")
    if len(set(arguments.fields)) < len(arguments.fields):
        raise InputError(f"--fields must be distinct, got {' '.join(arguments.fields)}; leave out the duplicate")


def evaluate_score(arguments: Scoring) -> dict[str, Any]:
    """Return the sum of log-probabilities and the accuracies, writing one line per row."""
    check_rows(arguments)
    run = opened(arguments)
    run.require_one_text("evaluate score")
    batch_size = batch_size_for(arguments.batch_size, run)
    positions = run.positions(beyond=arguments.beyond_length)
    scorer = text_scorer(run, batch_size=batch_size, positions=positions, top=arguments.top)
    pending: collections.deque[ScoredRow] = collections.deque()
    longer = 0

    def sequences() -> Iterator[Any]:
        nonlocal longer
        for row in rows_to_score(arguments, scorer.encode):
            pending.append(row)
            longer += sum(_positions(one) > positions for one in row.sequences)
            yield from row.sequences

    answered = scorer.score(sequences())
    tally = Tally()
    total, tokens, index = 0.0, 0, 0
    several = len(arguments.fields) > 1 or arguments.choice_list is not None
    with output_file(arguments.output) as file, progress_of("rows", active=arguments.output is not None) as progress:
        for first in answered:
            row = pending.popleft()
            found = [first, *(next(answered) for _ in row.sequences[1:])]
            scores = [one.score for one in found]
            total += sum(score.log_probability for score in scores)
            tokens += sum(score.tokens for score in scores)
            if first.candidates and not several:
                line: dict[str, Any] = {"index": index, "fillings": candidates_json(run.tokenizer, first.candidates)}
                text = candidates_text(row.texts[0], line["fillings"])
            else:
                line = row_result(index, row, scores, arguments.by, several)
                text = row_text(line, row, scores, several)
            if row.label is not None:
                tally.add(row, scores)
            if arguments.output is not None:
                file.write(values_json(line) + "\n")
            else:
                say(text)
            index += 1
            progress.count(None)
    mean, right = total / tokens if tokens else math.nan, tally.accuracies()
    what = "rows of choices" if several else "sentences"
    given = "their context" if arguments.context and not run.model.family.is_encoder else scorer.given
    say(
        f"{run.name} on {arguments.input}: {index:,} {what}, {tokens:,} tokens scored given {given}",
        f"  log-probability {mean:.4f} nats per token, {total:.2f} in total",
        *([f"  accuracy        {right['sum']:.4f} by sum, {right['per-token']:.4f} per token"] if right else []),
        *([f"  {longer:,} texts scored in chunks: {run.limit}"] if longer and positions < run.model.max_length else []),
    )
    values: dict[str, Any] = {"rows": index, "tokens": tokens, "log_probability": total, "per_token": mean}
    if right:
        values |= {"accuracy": right[arguments.by]}
        values |= {f"accuracy_{by.replace('-', '_')}": value for by, value in right.items()}
    return {"run": run.name, "input": arguments.input} | values


def _merit(score: Score, by: str) -> float:
    value = score.log_probability if by == "sum" else score.per_token
    return value if score.tokens else -math.inf


def _positions(one: Scored | MaskedText) -> int:
    """Return the number of positions of a sequence: all but the last token in a decoder, with CLS and SEP in an
    encoder.
    """
    return len(one.ids) - 1 if isinstance(one, Scored) else len(one.ids) + 2
