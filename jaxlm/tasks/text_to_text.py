"""Tasks with labels as text to text (Raffel et al. 2020, section 2.4 and appendix D).

The source names the task and each of its texts, in the order of their names (T5's preprocessors.py, `glue`); the target
is the label in words, a score rounded to the nearest 0.2, the name of a choice, or an answer. The names of texts and
labels are those of T5's mixture, which are TFDS's. For questions, punctuation stands between blanks (`squad`). A
prediction that is not a label is wrong: it counts as another class than the correct one, or as the score -1, as in T5's
evaluation, and `no_label` is their fraction.
"""

import dataclasses
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.examples import Example, Split, TaskData, TextPair
from jaxlm.tasks.kinds.generation import Generated, Generation
from jaxlm.tasks.metrics import LOSS
from jaxlm.tasks.metrics.answers import answer_scores
from jaxlm.tasks.metrics.classification import compute_metrics
from jaxlm.tasks.predicted import Predicted
from jaxlm.tasks.task import Rows, Task
from jaxlm.tasks.text_rows import TextSplit

NO_LABEL = "no_label"
# The names of the texts in T5's mixture, where the first names of the columns are others.
_TEXT_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mnli", "snli", "snli_counterfactual", "scitail"), ("premise", "hypothesis")),
    "mrpc": ("sentence1", "sentence2"),
}
_SCORE_STEPS = 5  # per unit of a score


class TextForm(NamedTuple):
    """The text form of a kind of task.

    source: (task, example) -> the source. targets: (task, example) -> one or more targets. label: (task, text) -> the
    label that a text spells, None for a text that is no label. measure: (task, labels or None, examples) -> metrics.
    """

    source: Callable[[Task, Any], str]
    targets: Callable[[Task, Any], tuple[str, ...]]
    label: Callable[[Task, str], Any]
    measure: Callable[[Task, Sequence[Any], Sequence[Any]], dict[str, float]]


@dataclass(frozen=True)
class LabelledPair(TextPair):
    """A source and its targets, with the example that they were made of."""

    original: Any = None

    @property
    def gold(self) -> Any:
        return self.original.gold

    def fields(self, columns: Any) -> dict[str, Any]:
        """Return the fields of the example."""
        found: dict[str, Any] = self.original.fields(columns)
        return found


def _stream(path: Path | str, task: "LabelledText", **reading: Any) -> Iterator[LabelledPair]:
    return map(task.pair, task.original.rows.stream(path, task.original, **reading))


def _of_records(rows: Any, unit: str, task: "LabelledText", keep: bool = False) -> Iterator[LabelledPair]:
    return map(task.pair, task.original.rows.of_records(rows, unit, task.original, keep=keep))


def _read(path: Path, task: "LabelledText", **reading: Any) -> Split:
    return task.converted(task.original.rows.read(path, task.original, **reading))


@dataclass(frozen=True, kw_only=True)
class LabelledText(Generation):
    """A task with labels as text to text. original: the task itself."""

    original: Task
    rows = Rows(_read, _stream, _of_records)

    @property
    def text_form(self) -> TextForm:
        """The text form of the task's kind."""
        return FORMS[self.original.kind]

    @property
    def reads(self) -> Task:
        return self.original

    def converted(self, split: Split) -> Split:
        """Return the split with the examples as text to text."""
        return dataclasses.replace(split, examples=tuple(map(self.pair, split.examples)))

    def pair(self, example: Any) -> LabelledPair:
        """Return an example, labelled or not, as text to text."""
        form = self.text_form
        targets = form.targets(self.original, example) if example.labelled else ()
        label = targets[0] if len(targets) == 1 else targets or None
        return LabelledPair((form.source(self.original, example),), (), label, row=example.row, original=example)

    def selectable(self, examples: Sequence[Any]) -> tuple[str, ...]:
        return (*self.metrics, LOSS)

    def selected_by(self, data: TaskData, name: str) -> "LabelledText":
        return Task.selected_by(self, data, name)

    def checked(self, splits: Mapping[str, Split], *, strict: bool = False) -> dict[str, Split]:
        return dict(splits)

    def predicted(self, encoded: TextSplit, outputs: Sequence[Generated], threshold: float | None) -> Predicted:
        """Return the labels, or texts that are none, their log-probabilities, and the metrics of the task."""
        labels = [self.text_form.label(self.original, one.text) for one in outputs]
        lines: list[tuple[Any, dict[str, Any]]] = [
            (one.text if label is None else label, {"log_probability": one.log_probability})
            for label, one in zip(labels, outputs, strict=True)
        ]
        if not encoded.labelled or not len(encoded):
            return Predicted(lines)
        pairs: Sequence[Any] = encoded.examples
        examples = [pair.original for pair in pairs]
        metrics = self.text_form.measure(self.original, labels, examples)
        return Predicted(lines, metrics | {NO_LABEL: sum(label is None for label in labels) / len(labels)})

    def is_right(self, prediction: Any, label: Any) -> bool:
        return self.original.is_right(prediction, label)


def as_text(task: Task, data: TaskData) -> tuple[LabelledText, TaskData]:
    """Return a task and its splits as text to text. InputError for a kind of task that has no text form."""
    if task.kind not in FORMS or task.no_answer:
        raise InputError(
            f"--as-text must be left out for the task {task.name} of kind {task.kind}, got it; it is for "
            f"{', '.join(FORMS)} tasks, whose questions all have an answer"
        )
    converted = LabelledText(
        name=task.name,
        metric=task.metric,
        metrics=task.metrics,
        columns=task.columns,
        quoting=task.quoting,
        papers=task.papers,
        selects=task.selects,
        options=task.options,
        original=task,
    )
    splits = {part: converted.converted(split) for part, split in data.splits.items()}
    return converted, dataclasses.replace(data, splits=splits, labels=())


def _named_texts(task: Task, example: Example) -> dict[str, str]:
    """Return the texts of an example by their names, choices as choice1, choice2, …"""
    names = _TEXT_NAMES.get(task.name) or [column[0] for column in task.columns.texts]
    choices = {f"choice{number}": text for number, text in enumerate(example.choices, 1)}
    return dict(zip(names, example.texts, strict=False)) | choices


def named_source(task: Task, example: Example) -> str:
    """Return the source of a row of texts: the name of the task, and each text after its name, the names sorted."""
    texts = sorted(_named_texts(task, example).items())
    return " ".join([task.name, *(f"{name}: {text}" for name, text in texts)])


def _words(task: Task) -> tuple[str, ...]:
    """Return the labels in words, in the task's order."""
    return task.spellings[0] if task.spellings else task.labels


def _choice_words(task: Task) -> tuple[str, ...]:
    return tuple(f"choice{number}" for number in range(1, len(task.labels) + 1))


def _by_words(words: Callable[[Task], tuple[str, ...]]) -> TextForm:
    """Return the form of a task whose label is one of several, each with a word."""

    def target(task: Task, example: Example) -> tuple[str, ...]:
        return (words(task)[task.labels.index(str(example.label))],)

    def label(task: Task, text: str) -> str | None:
        found = dict(zip(words(task), task.labels, strict=True))
        return found.get(text.strip())

    def measure(task: Task, labels: Sequence[Any], examples: Sequence[Any]) -> dict[str, float]:
        targets = np.array([task.labels.index(str(example.label)) for example in examples])
        wrong = (targets + 1) % len(task.labels)
        pairs = zip(labels, wrong.tolist(), strict=True)
        return compute_metrics(
            task, np.array([k if one is None else task.labels.index(one) for one, k in pairs]), targets
        )

    return TextForm(named_source, target, label, measure)


def _score_target(task: Task, example: Example) -> tuple[str, ...]:
    return (f"{round(float(str(example.label)) * _SCORE_STEPS) / _SCORE_STEPS:.1f}",)  # half to even, as there


def _score(task: Task, text: str) -> float | None:
    try:
        score = float(text)
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def _measure_scores(task: Task, labels: Sequence[Any], examples: Sequence[Any]) -> dict[str, float]:
    scores = np.array([-1.0 if label is None else label for label in labels])
    return compute_metrics(task, scores, np.array([float(example.label) for example in examples]))


def spaced(text: str) -> str:
    """Return a text with blanks around each character that is not a letter, digit, underscore or accent."""

    def around(found: re.Match[str]) -> str:
        return found[0] if unicodedata.category(found[0]).startswith("M") else f" {found[0]} "

    return re.sub(r"\s+", " ", re.sub(r"[^\w\s]", around, text)).strip()


def _question(task: Task, example: Any) -> str:
    return f"question: {spaced(example.question)} context: {spaced(example.context)}"


def _measure_answers(task: Task, labels: Sequence[Any], examples: Sequence[Any]) -> dict[str, float]:
    pairs = zip(labels, examples, strict=True)
    table = np.array([answer_scores(text or "", example.gold, no_answer=False) for text, example in pairs])
    return {"f1": float(table[:, 1].mean()), "exact_match": float(table[:, 0].mean())}


FORMS: Mapping[str, TextForm] = {
    "classification": _by_words(_words),
    "choice": _by_words(_choice_words),
    "regression": TextForm(named_source, _score_target, _score, _measure_scores),
    "span": TextForm(
        _question,
        lambda task, example: tuple(spaced(text) for text in example.gold),
        lambda task, text: text.strip() or None,
        _measure_answers,
    ),
}
"""The text form of each kind of task that has one."""
