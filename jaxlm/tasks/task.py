"""What a labelled data set is to the rest of the program: a task, its examples, and how labels become numbers and back.

Labels go by name. The number of a label is its place in `Task.labels`, and the task, with that mapping, is saved with
a fine-tune run (`task.json`), so that predictions are spelt as in the files the run was trained on. Id orders differ
between programs (TREC's classes 4 and 5 change places between two public copies): no number is taken on trust.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxlm.errors import InputError

Kind = Literal["classification", "regression", "choice"]
Form = Literal["single", "entailment", "similarity", "choice"]
Quoting = Literal["none", "csv"]


@dataclass(frozen=True)
class Example:
    """One row of a task: its texts, the answers to choose from, and the label as the files spell it.

    texts: one text, or two in the order of the columns (premise, hypothesis; article, question). choices: the answers
    of a choice task. label: a name, for a choice that of the right choice, for regression the score; None: unlabelled.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...] = ()
    label: str | float | None = None


@dataclass(frozen=True)
class Split:
    """The examples of one part, and what was met on the way.

    rows_read counts rows of data, the header not among them; dropped holds (line number, why); empty_fields counts the
    texts and choices that are empty once blanks at their edges are gone (such rows are kept).
    """

    examples: tuple[Example, ...]
    rows_read: int = 0
    dropped: tuple[tuple[int, str], ...] = ()
    empty_fields: int = 0

    @property
    def labelled(self) -> bool:
        return bool(self.examples) and self.examples[0].label is not None


@dataclass(frozen=True)
class TaskData:
    """The parts of a task: `train`, `dev` and, where there is one, `test`.

    labels are the task's (for a choice, the names of the choices; empty for regression). held_out is a sentence that
    says which rows became the dev part, or None where the files bring their own.
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
                digest.update(json.dumps([example.texts, example.choices, example.label]).encode())
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
            if not split.labelled:
                line += "; no labels"
            elif isinstance(split.examples[0].label, float):
                scores = np.array([example.label for example in split.examples])
                line += f"; scores {scores.min():g} to {scores.max():g}, mean {scores.mean():.4g}"
            else:
                counts = dict.fromkeys(self.labels, 0)
                for example in split.examples:
                    counts[str(example.label)] += 1
                line += "; labels " + ", ".join(f"{label}: {count}" for label, count in counts.items())
            lines.append(line)
        return lines + ([self.held_out] if self.held_out else [])


@dataclass(frozen=True)
class Columns:
    """The names under which a row's fields are found, each with the alternatives that are accepted.

    texts, choices: one tuple of names for each text and each choice. choice_list: names of one JSON field that holds
    all choices as a list. label: names of the label's column.
    """

    texts: tuple[tuple[str, ...], ...] = ()
    choices: tuple[tuple[str, ...], ...] = ()
    choice_list: tuple[str, ...] = ()
    label: tuple[str, ...] = ()

    def describe(self) -> str:
        """What a file must bring, for messages: `sentence1 (or premise), sentence2 (or hypothesis)`."""
        fields = [names[0] + (f" (or {', '.join(names[1:])})" if names[1:] else "") for names in self.texts]
        if self.choices:
            first, last = self.choices[0][0], self.choices[-1][0]
            fields.append(
                first if first == last else f"{first} to {last}" if len(self.choices) > 2 else f"{first}, {last}"
            )
        if self.choice_list:
            fields.append(("or in JSONL a list " if self.choices else "a list ") + self.choice_list[0])
        return ", ".join(fields)


@dataclass(frozen=True)
class Task:
    """A task: what its rows hold, in which form a model reads them, and how they are judged.

    form is the input form: `single` text, `entailment` (an ordered pair), `similarity` (a pair without order) or
    `choice`. metric selects and is reported first; metrics are all that are reported. labels give each class, or each
    choice, its number. spellings are other vocabularies for the same labels in the same order (TFDS says `acceptable`
    where the files say `1`); any of them is understood, `labels` is what predictions use. headerless names the columns
    of files that come without a header. paper may carry length, batch_size, peak_lr and num_epochs of the task's paper.
    num_choices: answers a row, for choice tasks. mean, deviation: of the training scores, for regression.
    """

    name: str
    kind: Kind
    form: Form
    metric: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    spellings: tuple[tuple[str, ...], ...] = ()
    columns: Columns = Columns()
    quoting: Quoting = "none"
    headerless: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict, hash=False)
    num_choices: int = 0
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def num_outputs(self) -> int:
        """Width of the head: a logit a class, or one number for a score or for each choice."""
        return len(self.labels) if self.kind == "classification" else 1

    @property
    def num_sequences(self) -> int:
        """Token sequences an example becomes: its choices, both orders of a similarity pair, else one."""
        return self.num_choices if self.form == "choice" else 2 if self.form == "similarity" else 1

    def parse_label(self, text: str) -> str | float:
        """The label a file spells `text`: a score, or the name it has in `labels`. ValueError says what is wrong."""
        if self.kind == "regression":
            try:
                score = float(text)
            except ValueError:
                raise ValueError(f"the score {text!r} is not a number") from None
            if not math.isfinite(score):
                raise ValueError(f"the score {text!r} is not finite")
            return score
        for names in (self.labels, *self.spellings):
            if text in names:
                return self.labels[names.index(text)]
        shown = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
        raise ValueError(f"unknown label {text!r}; the labels are {shown}")

    def label_number(self, label: str | float) -> int | float:
        """What the loss sees: the class or choice number, or the standardised score (score - mean) / deviation.

        Standardising with the training part's own figures gives every regression loss the same scale (1 for always
        saying the mean), whatever unit a user's scores have; correlations do not notice.
        """
        if self.kind == "regression":
            return (float(label) - self.mean) / self.deviation
        return self.labels.index(str(label))

    def prediction(self, outputs: np.ndarray) -> tuple[str | float, dict[str, float]]:
        """Prediction as the files spell it, and a probability for each label.

        Args:
          outputs: the model's numbers for one example: float (classes,), (choices,) or, for a score, (1,).

        Returns:
          (the name of the most likely class or choice, {name: probability}), or (the score in the files' unit, {}).
        """
        outputs = np.asarray(outputs, np.float64).reshape(-1)
        if self.kind == "regression":
            return float(outputs[0] * self.deviation + self.mean), {}
        if len(outputs) != len(self.labels):
            raise ValueError(f"{len(outputs)} outputs for {len(self.labels)} labels")
        shifted = np.exp(outputs - outputs.max())
        shares = shifted / shifted.sum()
        return self.labels[int(outputs.argmax())], dict(zip(self.labels, shares.tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """This task as JSON values, the label mapping among them; `Task.from_json` reads it back."""
        return {**dataclasses.asdict(self), "paper": dict(self.paper)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Task":
        """The task that `to_json` wrote, possibly by way of a JSON file. InputError names a field that is not one."""
        fields = {entry.name: entry for entry in dataclasses.fields(Task)}
        missing = [
            name
            for name, entry in fields.items()
            if name not in values
            and entry.default is dataclasses.MISSING
            and entry.default_factory is dataclasses.MISSING
        ]
        unknown = [name for name in values if name not in fields]
        if missing or unknown:
            raise InputError(
                f"task.json: missing fields {missing}, unknown fields {unknown}; read it with the version that wrote it"
            )
        loaded = {name: _tuples(value) for name, value in values.items()}
        if "columns" in loaded:
            try:
                loaded["columns"] = Columns(**loaded["columns"])
            except TypeError as error:
                raise InputError(f"task.json: columns: {error}; read it with the version that wrote it") from None
        return Task(**loaded)


def with_scale(task: Task, examples: Sequence[Example]) -> Task:
    """The regression task with mean and deviation of the scores of `examples` (deviation 1 where all are equal)."""
    scores = np.array([example.label for example in examples], np.float64)
    return dataclasses.replace(task, mean=float(scores.mean()), deviation=float(scores.std()) or 1.0)


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return value
