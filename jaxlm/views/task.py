"""View of a labelled task before anything is trained: lengths, labels, duplicates, overlap and empty texts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlm.tasks import Task, TaskData, encode_examples
from jaxlm.text import Tokenizer
from jaxlm.views.text import indented, truncated

UNLIMITED = 1 << 30  # a length that truncates nothing
NOT_TEXT = ("id", "document")  # fields of an example that a model does not read


@dataclasses.dataclass(frozen=True)
class Reader:
    """The tokenizer and the input form of a model, and the tokens of its longest sequence."""

    tokenizer: Tokenizer
    input_format: str
    length: int


def task_lines(task: Task, data: TaskData, reader: Reader | None, count: int) -> Iterator[str]:
    """Yield the labels of a task, the rows of each split, and the first `count` examples of train.

    reader: measures the rows in tokens; None: in characters only.
    """
    kind = task.kind if task.form == task.kind else f"{task.kind}, {task.form}"
    yield f"task {task.name}: {kind}, metric {task.metric}"
    if task.labels:
        yield f"  {len(task.labels)} labels: {truncated(', '.join(map(repr, task.labels)))}"
    train = _golds(data.splits["train"].examples)
    reports = data.report()
    for name, split in data.splits.items():
        yield from (line for line in reports if line.startswith(f"{name}: "))
        for column, lengths in _characters(task, split.examples).items():
            yield f"  {column}, characters: {_distribution(lengths)}"
        if reader is not None:
            yield from _token_lines(task, split.examples, reader)
        yield f"  {_repeats(split.examples)}"
        if name != "train":
            yield f"  {_overlap(split.examples, train)}"
        texts = [text for example in split.examples for text in example.parts]
        yield f"  empty texts: {sum(not text.strip() for text in texts):,} of {len(texts):,}"
    for number, example in enumerate(data.splits["train"].examples[:count]):
        yield ""
        yield f"example {number} of train, label {example.gold!r}"
        for column, value in example.fields(task.columns).items():
            yield from indented(f"{column}: {truncated(_text(value))}")


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _characters(task: Task, examples: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the characters of each column, int (n,)."""
    found: dict[str, list[int]] = {}
    for example in examples:
        for name, value in example.fields(task.columns).items():
            if name not in NOT_TEXT:
                found.setdefault(name, []).append(len(_text(value)))
    return {name: np.array(lengths) for name, lengths in found.items()}


def _token_lines(task: Task, examples: Sequence[Any], reader: Reader) -> Iterator[str]:
    """Yield the tokens of the examples as the model reads them, and how many are truncated or split."""
    # The context of a sentence fills the length, whatever it is.
    alone = dataclasses.replace(task, options=dataclasses.replace(task.options, context="sentence"))
    whole = encode_examples(alone, examples, reader.tokenizer, UNLIMITED, reader.input_format)
    yield f"  tokens, with special tokens: {_distribution(whole.longest)}"
    fitted = encode_examples(alone, examples, reader.tokenizer, reader.length, reader.input_format)
    total, what = len(examples), "examples"
    if task.of_windows:
        what = "questions"
        long = int((whole.longest > reader.length).sum())
        yield f"  texts longer than a window of {reader.length} tokens: {_share(long, total)}; {len(fitted):,} windows"
    yield f"  truncated {what} at {reader.length} tokens: {_share(fitted.truncated, total)}"


def _golds(examples: Sequence[Any]) -> dict[tuple[str, ...], list[Any]]:
    """Return texts -> the labels that they have."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for example in examples:
        found.setdefault(example.parts, []).append(example.gold)
    return found


def _repeats(examples: Sequence[Any]) -> str:
    groups = _golds(examples).values()
    repeats = sum(len(golds) - 1 for golds in groups)
    other = sum(gold not in (None, golds[0]) for golds in groups for gold in golds)
    return f"duplicates: {_share(repeats, len(examples))}" + (
        f", {other:,} of them with another label" if other else ""
    )


def _overlap(examples: Sequence[Any], train: dict[tuple[str, ...], list[Any]]) -> str:
    shared = [example for example in examples if example.parts in train]
    other = sum(example.gold is not None and example.gold not in train[example.parts] for example in shared)
    found = f"also in train: {_share(len(shared), len(examples))}"
    return found + (f", {other:,} of them with another label there" if other else "")


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})"


def _distribution(values: np.ndarray) -> str:
    low, middle, most, high = np.percentile(values, [0, 50, 95, 100])
    return f"{low:,.0f} to {high:,.0f}, mean {values.mean():,.1f}, median {middle:,.0f}, 95 % at most {most:,.0f}"
