"""Predictions of a split with its metrics, as lines (one dictionary per row), and the files that hold them.

A line has `prediction` and `scores`, after the fields that identify its row. With inputs it also has every column of
the row under its own name, or `input_NAME` where the line has another value of that name, and the gold label as
`label`. Lines are written as JSON lines, CSV or TSV, and those of tagged sentences also as columns (`.conll`).

GLUE's server scores one TSV for each test split: a header `index<TAB>prediction`, the index counting from 0 in each
file, no quoting; words for MNLI, AX, QNLI and RTE, integers for the rest, three decimals between 0 and 5 for STS-B. It
requires all eleven files in one archive.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from jaxlm.errors import InputError
from jaxlm.ranges import Range
from jaxlm.reading.rows import SPREADSHEETS
from jaxlm.tasks.encoding import Encoded
from jaxlm.tasks.task import Task
from jaxlm.wording import counted, finite

SUBMITTED = {
    ("cola", "test"): "CoLA",
    ("sst2", "test"): "SST-2",
    ("mrpc", "test"): "MRPC",
    ("stsb", "test"): "STS-B",
    ("qqp", "test"): "QQP",
    ("mnli", "test_matched"): "MNLI-m",
    ("mnli", "test_mismatched"): "MNLI-mm",
    ("mnli", "ax"): "AX",
    ("qnli", "test"): "QNLI",
    ("rte", "test"): "RTE",
    ("wnli", "test"): "WNLI",
}


@dataclass(frozen=True)
class Predicted:
    """The predictions of one split, in the order of its examples.

    lines: for each example (prediction, scores): a name and a probability for each label; a number and nothing; the
    text of an answer; a list of tags; a generated text and its log-probability. metrics: metric -> value, empty where
    the split has no labels. files: path relative to the run's directory -> text, or a value to be written as JSON.
    ranked: for each question its answers, best first, with `text` and `probability`; empty for other kinds. report:
    computes the details of the metrics as JSON values, in about a second, see `jaxlm.tasks.metrics.classification`;
    empty where the split has no labels.
    """

    lines: list[tuple[Any, dict[str, Any]]]
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    ranked: list[list[dict[str, Any]]] = field(default_factory=list)
    report: Callable[[], dict[str, Any]] = field(default=dict, compare=False)


def predictions(
    task: Task, encoded: Encoded, outputs: Sequence[np.ndarray] | np.ndarray, *, threshold: float | None = None
) -> Predicted:
    """Return the predictions and metrics of these outputs.

    Args:
      outputs: the head's outputs for each row of `encoded`, in order: float (outputs,), or (C,) for choices, or
        (length, outputs) for spans and tags, padded or not.
      threshold: for questions that may have no answer, the score above that of no answer which an answer needs (the
        paper's tau). None: tuned on this split if it is labelled, and returned as the metric `threshold`; else the
        task's own, or 0.
    """
    if len(outputs) != len(encoded):
        raise ValueError(f"outputs must have one entry per row ({len(encoded)}), got {len(outputs)}")
    return task.predicted(encoded, outputs, threshold)


def submission(task: Task, part: str, predictions: Sequence[Any]) -> dict[str, str]:
    """Return `glue/NAME.tsv` -> its text, for a split that GLUE's server scores; empty for another.

    predictions: as `Task.prediction` gives them, in the order of the split.
    """
    name = SUBMITTED.get((task.name, part))
    if name is None:
        return {}
    if task.has_scores:
        predictions = [f"{min(max(float(score), 0.0), 5.0):.3f}" for score in predictions]
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions))
    return {f"glue/{name}.tsv": "index\tprediction\n" + rows}


OutputFormat = Literal["tsv", "csv", "jsonl", "conll"]
WRITTEN: dict[str, OutputFormat] = {".csv": "csv", ".tsv": "tsv", ".conll": "conll"}
DIALECTS = {"csv": csv.excel, "tsv": csv.excel_tab}


def check_top_k(task: Task, top_k: int | None) -> None:
    """Raise InputError for a number of predictions that the task does not have."""
    if top_k is None:
        return
    Range(1).check("--top-k", top_k)
    if not task.is_ranked:
        raise InputError(
            f"--top-k must be left out for a {task.kind} task, got {top_k}; it ranks the labels, choices or answers of "
            "a row"
        )


def check_embeddings(task: Task) -> None:
    """Raise InputError for a task without a head that reads a vector for each row."""
    if task.of_tokens or task.generates:
        reads = "which has no head" if task.generates else "whose head reads every token"
        raise InputError(
            f"--embeddings must be left out for a {task.kind} task, {reads}; python -m jaxlm.evaluate features writes "
            "the states of tokens"
        )


def scores_of(task: Task, predicted: Predicted, top_k: int | None = None) -> list[dict[str, Any]]:
    """Return the scores of each row. top_k: only those of the `top_k` best labels, or answers as `answers`.

    Labels of equal probability keep the order of the task.
    """
    scores = [scores for _, scores in predicted.lines]
    if top_k is None:
        return scores
    if predicted.ranked:
        return [
            own | {"answers": [{name: answer[name] for name in ("text", "probability")} for answer in answers[:top_k]]}
            for own, answers in zip(scores, predicted.ranked, strict=True)
        ]
    return [dict(sorted(own.items(), key=lambda item: -item[1])[:top_k]) for own in scores]


def tokens_of(example: Any) -> dict[str, list[str]]:
    """Return `{"tokens": …}` of a tagged sentence, whose text may have been split into them; empty for other rows."""
    tokens = getattr(example, "tokens", None)
    return {} if tokens is None else {"tokens": list(tokens)}


def with_inputs(line: Mapping[str, Any], task: Task, example: Any) -> dict[str, Any]:
    """Return the line of a prediction with the columns of its row and its gold label before `prediction`.

    example: its `row` holds the columns where a reader kept it; otherwise they are its texts and choices. A row without
    a label has no `label`; where its label is empty it is None.
    """
    if example.row is None:
        inputs, gold = example.fields(task.columns), {} if example.gold is None else {"label": example.gold}
    else:
        inputs, gold = example.row, given_label(task, example.row)
    named: dict[str, Any] = {}
    for name, value in inputs.items():
        if (name in line and line[name] == value) or (name in gold and name in task.columns.label):
            continue
        while name in line or name in gold or name in named:
            name = f"input_{name}"
        named[name] = value
    names = list(line)
    before = names[: names.index("prediction")]
    after = {name: line[name] for name in names if name not in before}
    return {name: line[name] for name in before} | named | gold | after


def given_label(task: Task, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"label": …}` of a row as the task spells it, or as the row does if the task has no such label.

    It is empty if the row has no column of labels. The label is None if that is empty, or an empty list where a row may
    have any number of labels. Of answers it is the list of their texts.
    """
    column = next((name for name in task.columns.label if name in row), None)
    if column is None:
        return {}
    value = row[column]
    if value is None or (not task.columns.label_separator and not str(value).strip()):
        return {"label": None}
    return {"label": task.given_label(value)}


def format_of_output(path: Path | None) -> OutputFormat:
    """Return the format of an --output file: CSV, TSV or CoNLL's columns by its suffix, otherwise JSON lines.

    InputError for formats that cannot be written.
    """
    suffix = "" if path is None else path.suffix.lower()
    if suffix in (*SPREADSHEETS, ".parquet"):
        raise InputError(f"--output must end in .csv, .tsv or .jsonl, got {path}; write one of these and convert it")
    return WRITTEN.get(suffix, "jsonl")


def check_output(task: Task, form: OutputFormat) -> None:
    """Raise InputError for a format in which the predictions of a task cannot be written."""
    if form == "conll" and not task.of_words:
        raise InputError(f"--output must end in .csv, .tsv or .jsonl for a {task.kind} task, got .conll; rename it")


class LineWriter:
    """Writer of lines to a text stream, as JSON lines, as a table with a header, or as columns.

    NaN and infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity".

    In a table, numbers, lists and objects are JSON in a cell, and None is an empty cell. Cells with delimiters, quotes
    or line breaks are quoted as in Python's csv module; rows end in a line feed.

    In columns (`conll`) each word has a line: the word, its gold tag where the line has a `label`, and the predicted
    tag, with TABs between them; an empty line ends a sentence. A word without a tag has the tag `_`.
    """

    def __init__(self, stream: TextIO, form: OutputFormat) -> None:
        self._stream, self._form = stream, form
        self._ascii = (stream.encoding or "utf-8").lower() != "utf-8"  # a standard output in Latin-1, for example
        self._columns: list[str] = []

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write lines. Those of the first call determine the columns of a table.

        InputError if a later line of a table has another column.
        """
        if self._form == "jsonl":
            self._stream.writelines(
                json.dumps(finite(line), ensure_ascii=self._ascii, default=str) + "\n" for line in lines
            )
            return
        if self._form == "conll":
            self._stream.writelines(_sentence(line) for line in lines)
            return
        if not self._columns:
            self._columns = list(dict.fromkeys(name for line in lines for name in line))
            self._stream.write(self._row(self._columns))
        for line in lines:
            if more := [name for name in line if name not in self._columns]:
                raise InputError(
                    f"--output must end in .jsonl for rows with different columns, got .{self._form}; the first rows "
                    f"have no column {more[0]!r}"
                )
            self._stream.write(self._row([_cell(line.get(name)) for name in self._columns]))

    def _row(self, cells: Sequence[str]) -> str:
        # Cells with a carriage return are quoted only if the line terminator has one.
        row = io.StringIO(newline="")
        csv.writer(row, DIALECTS[self._form], lineterminator="\r\n").writerow(cells)
        return row.getvalue().removesuffix("\r\n") + "\n"


class Summary:
    """Counts of written predictions, for one line at the end. most: labels that the line names."""

    def __init__(self, kind: type[Task], most: int = 10) -> None:
        self._kind, self._most = kind, most
        self._rows = 0
        self._labels: Counter[str] = Counter()
        self._values: list[float] = []

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Count lines."""
        self._rows += len(lines)
        if self._kind.of_tokens or self._kind.has_choices or self._kind.generates:
            return
        for found in (line["prediction"] for line in lines):
            if isinstance(found, float):
                self._values.append(found)
            else:
                self._labels.update(map(str, found if isinstance(found, list) else (found,)))

    def text(self, name: str) -> str:
        """Return the line: `labelled.csv: 5 rows; good 3, bad 2`."""
        parts = [f"{label} {count:,}" for label, count in self._labels.most_common(self._most)]
        if (more := len(self._labels) - len(parts)) > 0:
            parts.append(f"{counted(more, 'more label')}")
        if self._values:
            mean = sum(self._values) / len(self._values)
            parts = [f"mean {mean:.4g}", f"from {min(self._values):.4g} to {max(self._values):.4g}"]
        return f"{name}: {counted(self._rows, 'row')}" + (f"; {', '.join(parts)}" if parts else "")


def _sentence(line: Mapping[str, Any]) -> str:
    """Return the lines of a tagged sentence. InputError if its gold tags are not one for each word."""
    words, gold = line["tokens"], line.get("label")
    if gold is not None and (not isinstance(gold, list) or len(gold) != len(words)):
        raise InputError(
            f"row {line['index']} (counted from 0) must have {counted(len(words), 'tag')}, one for each token, got "
            f"{gold!r:.80}; correct the row, or leave out --with-inputs"
        )
    columns = [words, *([] if gold is None else [gold]), line["prediction"]]
    rows = zip(*columns, strict=True)
    # A line break or a TAB inside a word would begin another line or column.
    return "".join("\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) or "_" for cell in row) + "\n" for row in rows) + "\n"


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(finite(value), ensure_ascii=False, default=str)
