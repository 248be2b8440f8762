"""The interface of zero-shot tasks: texts to score, measured values, and the rows of a file.

A task is measured as GPT-1 or GPT-2 did, which results name as the protocol `paper`. Values of EleutherAI's
lm-evaluation-harness are not comparable with these; the harness itself computes them (`jaxlm.evaluate harness`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxlm.errors import InputError
from jaxlm.inference.scoring import TokenScores
from jaxlm.reading.rows import json_objects
from jaxlm.training.validation import divide
from jaxlm.wording import lacks_field

Row = TypeVar("Row")
PAPER = "paper"  # the protocol of all values


class Text(NamedTuple):
    """A text in parts that follow each other without a separator, scored from part `first` on.

    where: the file and line, for messages.
    """

    parts: tuple[str, ...]
    first: int
    where: str


class ScoredText(NamedTuple):
    """The scores of each scored part of a text. shortened: its context lost its beginning, as the model is shorter."""

    parts: tuple[TokenScores, ...]
    shortened: bool

    @property
    def sum(self) -> float:
        """The log-probability of the scored parts, in nats."""
        return sum(part.score.log_probability for part in self.parts)

    @property
    def mean(self) -> float:
        """The mean log-probability per token of the scored parts, in nats; nan if no token was scored."""
        return divide(self.sum, sum(len(part.log_probs) for part in self.parts))

    def since(self, part: int) -> "ScoredText":
        """Return the scores from a scored part on."""
        return self._replace(parts=self.parts[part:])


class Measured(NamedTuple):
    """A measured value.

    stderr: the standard error over examples, nan if unknown. examples: the number of rows in the file. scored: the
    number of those that count. how: the measurement in words, for example the unit of a perplexity. rows: those that
    count, for `--items`; their `item()` is a JSON object. of_rows: the value of each.
    """

    metric: str
    value: float
    stderr: float
    examples: int
    scored: int
    how: Mapping[str, Any] = {}
    rows: Sequence[Any] = ()
    of_rows: Sequence[Any] | np.ndarray = ()


class ScoredRow(NamedTuple):
    """The texts of a row, for example its choices, and their scores."""

    texts: Sequence[Text]
    scores: Sequence[ScoredText]

    @property
    def shortened(self) -> bool:
        """True if one of the texts is shortened."""
        return any(score.shortened for score in self.scores)

    def item(self) -> dict[str, Any]:
        """Return the row as JSON has it: its file and line, and of each text the parts, nats and number of tokens."""
        return {
            "row": self.texts[0].where,
            "texts": [text.parts for text in self.texts],
            "log_probabilities": [score.sum for score in self.scores],
            "tokens": [sum(len(part.log_probs) for part in score.parts) for score in self.scores],
            "shortened": self.shortened,
        }


class TextScorer(Protocol):
    """A model that scores texts."""

    def scores(self, texts: Sequence[Text]) -> list[ScoredText]:
        """Return the scores of each text, in order."""


@dataclass(frozen=True)
class ZeroShotTask:
    """A task.

    title: a noun phrase for help texts. measure: (model, path, options) -> values. needs: the sort of model, "causal"
    or "any" (then encoders score by pseudo-log-likelihood). options: the fields of `ZeroShotOptions` that its values
    depend on, besides those of every task. harness: the task of lm-evaluation-harness on the same data, or "".
    """

    name: str
    title: str
    measure: Callable[[Any, Path, Any], Iterator[Measured]]
    needs: Literal["causal", "any"] = "causal"
    options: tuple[str, ...] = ("sample",)
    harness: str = ""

    def depends_on(self, option: str) -> bool:
        """Return True if the values of the task depend on an option."""
        of_model = ("left_context", "pseudo_likelihood") if self.needs == "any" else ("left_context",)
        return option in (*of_model, *self.options)


def accuracy(right: Any) -> tuple[float, float]:
    """Return the mean of (n,) booleans and its standard error, from the variance of the sample."""
    return mean_and_stderr(np.asarray(right, np.float64))


def mean_and_stderr(values: Any) -> tuple[float, float]:
    """Return the mean of (n,) values and its standard error; nan for the error of fewer than two."""
    values = np.asarray(values, np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()), error


def perplexity(losses: Any) -> tuple[float, float]:
    """Return exp of the mean of (n,) losses in nats, and its standard error by the delta method."""
    mean, error = mean_and_stderr(losses)
    value = math.exp(min(mean, 700.0))
    return value, value * error


def scored_rows(model: TextScorer, rows: Sequence[Sequence[Text]]) -> list[ScoredRow]:
    """Return the rows with the scores of their texts."""
    scores = iter(model.scores([text for texts in rows for text in texts]))
    return [ScoredRow(texts, [next(scores) for _ in texts]) for texts in rows]


def chosen_accuracy(
    model: TextScorer,
    questions: Sequence[tuple[Sequence[Text], int]],
    options: Any,
    *,
    by: Callable[[ScoredText], float],
    how: Mapping[str, Any],
) -> Measured:
    """Return the accuracy of the candidate with the highest score. questions: the candidates, and the right index."""
    chosen = sampled(questions, options.sample)
    rows = scored_rows(model, [texts for texts, _ in chosen])
    right = [best([by(one) for one in row.scores]) == answer for row, (_, answer) in zip(rows, chosen, strict=True)]
    return Measured("accuracy", *accuracy(right), len(questions), len(right), {**how, **shortened(rows)}, rows, right)


def shortened(rows: Sequence[ScoredRow]) -> dict[str, int]:
    """Return the number of rows with a shortened text, for `how`."""
    return {"shortened": sum(row.shortened for row in rows)}


def sampled(rows: Iterable[Row], count: int | None) -> list[Row]:
    """Return `count` random rows in their order; all of them for None or if there are no more.

    The same rows for each model; a larger sample contains a smaller one.
    """
    found = list(rows)
    if count is None or count >= len(found):
        return found
    random = np.random.Generator(np.random.Philox(0))
    return [found[row] for row in sorted(random.permutation(len(found))[:count].tolist())]


def best(scores: Sequence[float]) -> int | None:
    """Return the index of the highest score; None for a tie, which is never right."""
    highest = max(scores)
    return list(scores).index(highest) if list(scores).count(highest) == 1 else None


def json_rows(path: Path, fields: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, object) for each line of a JSONL file. InputError for a line without one of the fields, or
    with another value than a text in one.
    """
    where = ""
    for where, row in json_objects(path):
        for name in fields:
            if name not in row:
                raise InputError(lacks_field(where, name, row, "fix or remove the row"))
            if not isinstance(row[name], str) or not row[name].strip():
                raise InputError(f"{where}: {name} must be a text, got {row[name]!r}; fix or remove the row")
        yield where, row
    if not where:
        raise InputError(f"{path} must have rows, got none; give another file")


def files_of(path: Path, suffix: str) -> list[Path]:
    """Return the file, or the files of a directory with this suffix in alphabetical order. InputError without any."""
    if path.is_dir():
        if files := sorted(path.glob(f"*{suffix}")):
            return files
        raise InputError(f"{path} must have {suffix} files, got none; give the directory of the task's files")
    if not path.is_file():
        raise InputError(f"{path} must be a file, got a path that does not exist; give the task's file")
    return [path]
