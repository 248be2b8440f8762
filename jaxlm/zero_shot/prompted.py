"""Tasks whose answers are generated after a prompt: questions, translation, summaries.

Radford et al., 2019, sections 3.5 to 3.8. Scores are BLEU by sacrebleu, ROUGE by rouge-score, and F1 as in CoQA's
script.
`squad` and `coqa`: document, `Q:`, `A:`, greedy; of CoQA the questions and answers before are in the prompt. `nq_open`:
question-answer pairs, greedy, with the accuracy by confidence, the probability of the generated answer. `translation`:
pairs `english sentence = french sentence`, greedy, the first sentence. `summarization`: the article and `TL;DR:`, 100
tokens with top-k 2, the first 3 sentences.

The paper states neither the prompts nor their number of examples: they are files (`prompts/`) and options, and each
value names them. A prompt that is too long loses its beginning, the article of a summary its end; `shortened` counts
such prompts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.data.sentences import sentence_ends
from jaxlm.errors import InputError
from jaxlm.inference.strategies import Sampling
from jaxlm.tasks.metrics.answers import answer_scores, exact_match, token_f1
from jaxlm.tasks.metrics.generated import bleu, rouge
from jaxlm.zero_shot.model import GREEDY, Continuation, Continuer, Query
from jaxlm.zero_shot.prompted_rows import (
    Row,
    Template,
    conversations,
    open_questions,
    read_template,
    reading_questions,
    sentence_pairs,
    stories,
)
from jaxlm.zero_shot.task import Measured, ZeroShotTask, mean_and_stderr, sampled

DECILES = 10
_OPTIONS = ("sample", "prompt", "prompt_examples", "prompt_rows")


def conversation_scores(text: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return the exact match and F1 of an answer, as CoQA's script has them.

    With several answers, each is left out in turn, so that people and models are compared with as many.
    """
    if len(answers) == 1:
        return exact_match(text, answers[0]), token_f1(text, answers[0], no_answer=True)
    exact = np.array([exact_match(text, answer) for answer in answers])
    f1 = np.array([token_f1(text, answer, no_answer=True) for answer in answers])
    left_out = [[np.delete(one, left).max() for left in range(len(answers))] for one in (exact, f1)]
    return float(np.mean(left_out[0])), float(np.mean(left_out[1]))


class Answered(NamedTuple):
    """A row, its prompt, how it was continued, and the answer taken from that."""

    row: Row
    query: Query
    continuation: Continuation
    answer: str

    def item(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            "row": self.row.where,
            "prompt": self.query.text,
            "generated": self.continuation.text,
            "answer": self.answer,
            "references": list(self.row.answers),
            "shortened": self.continuation.shortened,
        }


class Values(NamedTuple):
    """A metric of a task: its value, standard error, more about it in words, and the value of each row, if any."""

    metric: str
    value: float
    stderr: float
    how: dict[str, Any]
    of_rows: Sequence[Any] | np.ndarray = ()


@dataclass(frozen=True)
class PromptedTask:
    """A task whose answers are generated.

    read: path -> rows, and the number of rows that have no answer. fields: of the prompt file, besides the answer.
    examples: the default number in the prompt. length: the maximum number of new tokens. stop: texts that end an
    answer. document: the field that loses its end in a prompt that is too long. answer: (path, text) -> the answer.
    score: (continuer, continuations, answers, rows) -> values.
    """

    name: str
    title: str
    read: Callable[[Path], tuple[list[Row], int]]
    score: Callable[[Continuer, Sequence[Continuation], Sequence[str], Sequence[Row]], Iterator[Values]]
    fields: tuple[str, ...]
    examples: int = 0
    length: int = 48
    stop: tuple[str, ...] = ("\n",)
    sampling: Sampling = GREEDY
    document: str | None = None
    answer: Callable[[Path, str], str] = lambda path, text: text.strip()
    filters: str = "up to the first line end"

    def measure(self, model, path: Path, options) -> Iterator[Measured]:
        """Yield the values. InputError for a malformed file or too few rows for the examples."""
        template = read_template(self.name, options.prompt, self.fields)
        rows, without = self.read(path)
        examples, scored, named = self._examples(path, rows, options)
        continuer = Continuer(model, length=self.length, stop=self.stop, sampling=self.sampling, seed=options.seed)
        found, scored = len(rows) + without, sampled(scored, options.sample)
        queries = [self._query(template, examples, row) for row in scored]
        continuations = continuer(queries)
        answers = [self.answer(path, one.text) for one in continuations]
        how = {"prompt": template.name, **named, "filters": self.filters, "max_new_tokens": self.length}
        how |= {
            "sampling": "greedy" if self.sampling == GREEDY else f"top-k {self.sampling.top_k}, seed {options.seed}"
        }
        how |= {"shortened": sum(one.shortened for one in continuations)}
        answered = [Answered(*one) for one in zip(scored, queries, continuations, answers, strict=True)]
        for metric, value, stderr, more, of_rows in self.score(continuer, continuations, answers, scored):
            yield Measured(metric, value, stderr, found, len(scored), how | more, answered, of_rows)

    def _examples(self, path: Path, rows: list[Row], options) -> tuple[list[Row], list[Row], dict[str, Any]]:
        """Return the rows in the prompt, those to answer, and which ones they are in words."""
        count = self.examples if options.prompt_examples is None else options.prompt_examples
        if options.prompt_rows is not None:
            source, others = self.read(options.prompt_rows)[0], rows
            where = f"rows 1 to {count} of {options.prompt_rows}"
        else:
            source, others = rows, rows[count:]
            where = f"rows 1 to {count} of {path}, which are not scored"
        if len(source) < count or not others:
            raise InputError(
                f"--prompt-examples must be below the number of rows of {options.prompt_rows or path}, {len(source)}, "
                f"got {count}; give fewer"
            )
        return source[:count], others, {"examples_in_prompt": count, **({"example_rows": where} if count else {})}

    def _query(self, template: Template, examples: Sequence[Row], row: Row) -> Query:
        before = "".join(template.example(one.fields | {"answer": one.answers[0]}) for one in examples)
        if row.turns:
            head, turn = template.turns()
            before += head.example(row.fields) + "".join(turn.example(one) for one in row.turns)
            template = turn
        text = before + template.query(row.fields)
        if self.document is None:
            return Query(text, row.where)
        begin = len(before) + len(template.question(row.fields).partition(row.fields[self.document])[0])
        return Query(text, row.where, slice(begin, begin + len(row.fields[self.document])))


def reading_scores(continuer, continuations, answers: Sequence[str], rows: Sequence[Row]) -> Iterator[Values]:
    """Yield F1 and exact match by SQuAD's definitions."""
    del continuer, continuations
    pairs = zip(answers, rows, strict=True)
    yield from _matches([answer_scores(text, row.answers, no_answer=False) for text, row in pairs])


def turn_scores(continuer, continuations, answers: Sequence[str], rows: Sequence[Row]) -> Iterator[Values]:
    """Yield F1 and exact match by CoQA's definitions."""
    del continuer, continuations
    yield from _matches([conversation_scores(text, row.answers) for text, row in zip(answers, rows, strict=True)])


def open_scores(
    continuer: Continuer, continuations: Sequence[Continuation], answers: Sequence[str], rows: Sequence[Row]
) -> Iterator[Values]:
    """Yield the exact match, with the calibration curve, and that of the most confident 1 % of the answers."""
    pairs = zip(answers, rows, strict=True)
    right = np.array([answer_scores(text, row.answers, no_answer=False)[0] for text, row in pairs])
    confidence = np.exp(np.array(continuer.log_probabilities(continuations)))
    order = np.argsort(confidence, kind="stable")
    curve = [
        {
            "confidence": float(confidence[some].mean()),
            "exact_match": float(right[some].mean()),
            "questions": len(some),
        }
        for some in np.array_split(order, min(DECILES, len(order)))
    ]
    how = {"unit": "question", "calibration": curve, "confidence": "probability of the generated tokens"}
    yield Values("exact_match", *mean_and_stderr(right), how, right)
    surest = order[-math.ceil(len(order) / 100) :]
    how = {"unit": f"question, of the {len(surest)} with the most confident answers"}
    yield Values("exact_match_most_confident_1_percent", *mean_and_stderr(right[surest]), how)


def translation_scores(continuer, continuations, answers: Sequence[str], rows: Sequence[Row]) -> Iterator[Values]:
    """Yield BLEU."""
    del continuer, continuations
    value, stderr, signature = bleu(answers, [row.answers[:1] for row in rows])
    yield Values("bleu", value, stderr, {"unit": "corpus, 0 to 100", "signature": signature})


def summary_scores(continuer, continuations, answers: Sequence[str], rows: Sequence[Row]) -> Iterator[Values]:
    """Yield ROUGE-1, ROUGE-2, ROUGE-L and their average."""
    del continuer, continuations
    found = rouge(answers, [row.answers[:1] for row in rows])
    found["rouge_average"] = np.mean(list(found.values()), axis=0)
    for metric, values in found.items():
        yield Values(metric, *mean_and_stderr(values), {"unit": "summary, F1 from 0 to 1, stemmed"}, values)


def first_sentence(path: Path, text: str) -> str:
    """Return the first sentence of a line in the language of the reference file, by its suffix (`.fr`, `.fr.sgm`)."""
    line = text.strip()
    language = str(path).removesuffix(".sgm").rpartition(".")[2]
    ends = sentence_ends(language)(line)
    return line[: ends[0]] if ends else line


def first_sentences(path: Path, text: str, number: int = 3) -> str:
    """Return the first sentences of a summary, one per line."""
    del path
    text, found, begin = text.strip(), [], 0
    for end in sentence_ends("en")(text)[:number]:
        found.append(" ".join(text[begin:end].split()))
        begin = end
    return "\n".join(found)


_PROMPTED = (
    PromptedTask(
        "squad",
        "questions about a paragraph (SQuAD's JSON, or JSONL)",
        reading_questions,
        reading_scores,
        ("document", "question"),
    ),
    PromptedTask(
        "coqa",
        "conversations about a passage (CoQA's JSON)",
        conversations,
        turn_scores,
        ("document", "question"),
    ),
    PromptedTask(
        "nq_open",
        "open questions (JSONL with `question` and `answer`)",
        open_questions,
        open_scores,
        ("question",),
        examples=5,
    ),
    PromptedTask(
        "translation",
        "sentences (SOURCE,REFERENCE: WMT's .sgm, or files with one sentence per line)",
        sentence_pairs,
        translation_scores,
        ("source",),
        examples=5,
        length=100,
        answer=first_sentence,
        filters="the first sentence of the first line",
    ),
    PromptedTask(
        "summarization",
        "articles (CNN/DailyMail's .story files, JSONL with `article` and `highlights`, or `document` and `summary`)",
        stories,
        summary_scores,
        ("document",),
        length=100,
        stop=(),
        sampling=Sampling(top_k=2),
        document="document",
        answer=first_sentences,
        filters="the first 3 sentences",
    ),
)
PROMPTED = tuple(
    ZeroShotTask(
        task.name,
        task.title,
        task.measure,
        options=_OPTIONS if task.sampling == GREEDY else (*_OPTIONS, "seed"),
    )
    for task in _PROMPTED
)


def _matches(scores: Sequence[tuple[float, float]]) -> Iterator[Values]:
    exact, f1 = zip(*scores, strict=True)
    yield Values("f1", *mean_and_stderr(f1), {"unit": "question, the best F1 over its answers"}, f1)
    yield Values("exact_match", *mean_and_stderr(exact), {"unit": "question"}, exact)
