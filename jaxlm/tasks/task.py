"""A task: the definition of a labelled data set, and the mapping of its labels to numbers and back.

Labels are matched by name. The number of a label is its index in `Task.labels`, and the task, with that mapping, is
saved with a fine-tuning run (`task.json`), so that predictions are spelt as in the run's training files. Id orders
differ between programs (TREC's classes 4 and 5 are swapped between two public copies): no number is taken on trust.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.columns import Columns
from jaxlm.tasks.entities import Scheme
from jaxlm.tasks.examples import Example
from jaxlm.tasks.options import TaskOptions

Kind = Literal["classification", "multilabel", "regression", "choice", "span", "tagging"]
Form = Literal["single", "entailment", "similarity", "choice", "span", "tagging"]
SpecialTokens = Literal["gpt1", "end"]
Second = Literal["question", "cloze", "beginning"]
Quoting = Literal["none", "csv"]

DEFAULT_THRESHOLD = 0.5  # probability that a label of a multilabel task needs


@dataclass(frozen=True)
class Task:
    """A task: the fields of its rows, the input form that a model reads, and the metrics.

    form is the input form: `single` text, `entailment` (an ordered pair), `similarity` (an unordered pair), `choice`,
    or the own forms of the kinds `span` and `tagging`. metric selects the best checkpoint on the split named by
    `selects`, and is reported first; metrics are all that are reported. labels give each class, choice or tag its
    number. spellings are other vocabularies for the same labels in the same order (TFDS says `acceptable` where the
    files say `1`); any of them is accepted, `labels` is used in predictions. headerless names the columns of files that
    come without a header. papers: for each input format (`gpt1`, `bert`) the length, batch_size, peak_lr and num_epochs
    of its paper. num_choices: answers per row, for choice tasks. second: the role of a choice task's second text: a
    `question`, a question whose `_` is replaced by the choice (`cloze`), or the `beginning` of every choice. mean,
    deviation: of the training scores, for regression. no_answer: whether questions may have no answer; threshold: the
    score above that of no answer which an answer needs, as tuned on dev; of `multilabel` the probability that a label
    needs. positive_label: the chosen class of `f1`; empty where none is chosen. class_weights: the weight of each label
    in the loss; empty where all are 1. scheme: the files' mark at the beginning of an
    entity that does not follow another one; `none`: tags are token classes (parts of speech, for example), not
    entities. special_tokens: those around the texts that a decoder reads (see `jaxlm/tasks/batching/gpt1_inputs.py`).
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
    papers: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    num_choices: int = 0
    second: Second = "question"
    mean: float = 0.0
    deviation: float = 1.0
    selects: str = "dev"
    no_answer: bool = False
    threshold: float | None = None
    positive_label: str = ""
    class_weights: tuple[float, ...] = ()
    scheme: Scheme = "bio"
    special_tokens: SpecialTokens = "gpt1"
    options: TaskOptions = TaskOptions()

    def paper_for(self, input_format: str) -> Mapping[str, float]:
        """Return the settings of a model's paper for this task, empty where it has none."""
        return self.papers.get(input_format, {})

    @property
    def num_outputs(self) -> int:
        """Output size of the head: one logit per class or tag, a start and an end, or one number (score or choice)."""
        if self.kind in ("classification", "multilabel", "tagging"):
            return len(self.labels)
        return 2 if self.kind == "span" else 1

    @property
    def positive(self) -> str | None:
        """The label whose F1 a classification reports as `f1`: the chosen one, or the second of two; None where `f1` is
        the macro mean or is not reported."""
        if self.kind != "classification" or "f1" not in self.metrics:
            return None
        return self.positive_label or (self.labels[1] if len(self.labels) == 2 else None)

    @functools.cached_property
    def _numbers(self) -> tuple[dict[str, int], ...]:
        """The number of each name in `labels` and in each of `spellings`, of equal names the first.

        A search in the tuples would take minutes where each of 10^5 rows has a label of its own.
        """
        return tuple({name: k for k, name in reversed(list(enumerate(n)))} for n in (self.labels, *self.spellings))

    def label_set(self, logits: np.ndarray) -> np.ndarray:
        """Return True for each predicted label of a `multilabel` task, bool (…, labels), from its outputs."""
        return probability(logits) >= (DEFAULT_THRESHOLD if self.threshold is None else self.threshold)

    def parse_label(self, text: str | tuple[str, ...]) -> str | float | tuple[str, ...]:
        """Return the label that a file spells `text`: a score, or its name in `labels`. Raise ValueError if unknown.

        Several labels are returned in the order of `labels`, each once.
        """
        if isinstance(text, tuple):
            return tuple(sorted({str(self.parse_label(name)) for name in text}, key=self._numbers[0].__getitem__))
        if self.kind == "regression":
            try:
                score = float(text)
            except ValueError:
                raise ValueError(f"a score must be a number, got {text!r}") from None
            if not math.isfinite(score):
                raise ValueError(f"a score must be finite, got {text!r}")
            return score
        for numbers in self._numbers:
            if text in numbers:
                return self.labels[numbers[text]]
        shown = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
        raise ValueError(f"a label must be one of {shown}, got {text!r}")

    def label_number(self, label: str | float | tuple[str, ...]) -> int | float | list[float]:
        """Return the loss target: the class or choice number, or the standardized score (score - mean) / deviation.

        Of several labels it is a list with 1 for each label that is given, else 0.

        Standardizing with the training split's own mean and deviation gives every regression loss the same scale (1 for
        always predicting the mean), whatever unit a user's scores have; correlations are unaffected.
        """
        if isinstance(label, tuple):
            return [float(name in label) for name in self.labels]
        if self.kind == "regression":
            return (float(label) - self.mean) / self.deviation
        return self._numbers[0][str(label)]

    def prediction(self, outputs: np.ndarray) -> tuple[str | float | list[str], dict[str, float]]:
        """Return the prediction as the files spell it, and a probability for each label.

        Args:
          outputs: the model's outputs for one example: float (classes,), (choices,) or, for a score, (1,).

        Returns:
          (the name of the most likely class or choice, {name: probability}), or (the score in the files' unit, {}), or
          for `multilabel` (the names of the labels that reach the threshold, {name: probability}).
        """
        outputs = np.asarray(outputs, np.float64).reshape(-1)
        if self.kind == "regression":
            return float(outputs[0] * self.deviation + self.mean), {}
        if len(outputs) != len(self.labels):
            raise ValueError(f"outputs must have one value per label ({len(self.labels)}), got {len(outputs)}")
        if self.kind == "multilabel":
            names = [name for name, given in zip(self.labels, self.label_set(outputs), strict=True) if given]
            return names, dict(zip(self.labels, probability(outputs).tolist(), strict=True))
        shifted = np.exp(outputs - outputs.max())
        probabilities = shifted / shifted.sum()
        return self.labels[int(outputs.argmax())], dict(zip(self.labels, probabilities.tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return this task, including the label mapping, as JSON values; `Task.from_json` reads them back."""
        plain = dataclasses.asdict(dataclasses.replace(self, papers={}))
        return plain | {"papers": {kind: dict(paper) for kind, paper in self.papers.items()}}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Task":
        """Return the task that `to_json` wrote, also via a JSON file. InputError names missing or unknown fields."""
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
                f"task.json has missing fields {missing} and unknown fields {unknown}; read it with the version that "
                "wrote it"
            )
        loaded = {name: _tuples(value) for name, value in values.items()}
        for name, part in (("columns", Columns), ("options", TaskOptions)):
            if name in loaded:
                try:
                    loaded[name] = part(**loaded[name])
                except TypeError as error:
                    raise InputError(f"task.json: {name}: {error}; read it with the version that wrote it") from None
        return Task(**loaded)


def probability(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of float outputs, float64."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, np.float64)))


def with_scale(task: Task, examples: Sequence[Example]) -> Task:
    """Return the regression task with mean and deviation of the scores of `examples` (deviation 1 if all are equal)."""
    scores = np.array([example.label for example in examples], np.float64)
    return dataclasses.replace(task, mean=float(scores.mean()), deviation=float(scores.std()) or 1.0)


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return value
