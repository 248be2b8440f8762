"""Answers from scores of starts and ends (Devlin et al. 2019, sections 4.2 and 4.3; `run_squad.py`, 740 to 925).

In each window the `num_best` best starts and ends are combined if the end does not precede the start, the answer is not
longer than allowed and its start has its most context there. The answers of all windows are sorted by start + end. The
answer is a slice of the text, taken by the offsets of the tokens. The original looks for starts and ends among all
positions and then discards those outside the text; here only the text's positions are considered, so that padding and
the length of a batch change nothing.

No answer scores s_null, the start and end at CLS, the minimum over the windows. A question is answered if its best text
scores more than s_null + tau. The original's option `null_score_diff_threshold` is -tau, and `null_odds.json` holds
s_null less the best score. Tau is tuned on each question's best text, whatever was predicted before.

Exact match and F1 are those of SQuAD's two official scripts. A text is lower-cased and stripped of ASCII punctuation,
then of the articles a, an and the, and its white space is collapsed. The best value over a question's answers counts,
and the mean is over all questions. The scripts differ on texts that this leaves empty: 1.1 gives "the" against "the" an
exact match of 1 and an F1 of 0; 2.0 discards such answers, treats a question without any as having the answer "", and
gives an F1 of 1 where both are empty.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.tasks.metrics.classification import intervals
from jaxlm.tasks.predicted import Predicted
from jaxlm.tasks.task import Task
from jaxlm.tasks.token_rows import SpanSplit, most_context

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return `text` in the form in which the official scripts compare it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answer: str) -> float:
    """Return 1 if only case, punctuation, articles and blanks differ, else 0."""
    return float(normalized(predicted) == normalized(answer))


def token_f1(predicted: str, answer: str, *, no_answer: bool) -> float:
    """Return the F1 over the words of two texts; `no_answer`: as SQuAD 2.0's script defines it."""
    given, wanted = normalized(predicted).split(), normalized(answer).split()
    if no_answer and (not given or not wanted):
        return float(given == wanted)
    same = sum((Counter(given) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(given), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def answer_scores(predicted: str, answers: Sequence[str], *, no_answer: bool) -> tuple[float, float]:
    """Return (exact match, F1) of one question: the best over its answers."""
    if no_answer:
        answers = [answer for answer in answers if normalized(answer)] or [""]
    return (
        max((exact_match(predicted, answer) for answer in answers), default=0.0),
        max((token_f1(predicted, answer, no_answer=no_answer) for answer in answers), default=0.0),
    )


def best_threshold(odds: np.ndarray, gain: np.ndarray, without: np.ndarray) -> float:
    """Return the threshold tau with the best sum of scores, when a question is answered if -odds > tau.

    Args:
      odds: float (n,), the score of no answer less that of the best text. gain: (n,) the score of predicting the best
      text, without: (n,) that of predicting "".

    Returns:
      Among equally good thresholds the one nearest to 0, midway between the two questions that it separates.
    """
    order = np.argsort(odds, kind="stable")
    ranked = odds[order].astype(np.float64)
    # sums[k]: the score when the k questions with the least odds are answered. Equal odds cannot be separated.
    sums = without.sum() + np.concatenate([[0.0], np.cumsum((gain - without)[order])])
    n = len(ranked)
    places = [place for place in range(n + 1) if place in (0, n) or ranked[place - 1] < ranked[place]]
    highest = max(sums[place] for place in places)
    best = [place for place in places if sums[place] >= highest - 1e-9]
    boundary = min((_boundary(ranked, k) for k in best), key=abs)
    return -boundary if boundary else 0.0


def _boundary(ranked: np.ndarray, place: int) -> float:
    """Return odds that exactly `place` of the ranked odds are below: 0 if that qualifies, else the midpoint."""
    below = ranked[place - 1] if place else -np.inf
    above = ranked[place] if place < len(ranked) else np.inf
    if below < 0.0 <= above:
        return 0.0
    if not np.isfinite(below):
        return float(above)
    if not np.isfinite(above):
        return float(below + max(1.0, abs(below)))
    middle = (below + above) / 2
    return float(middle if below < middle else above)


PLACEHOLDER = "empty"  # the original's text where there is no candidate


@dataclass(frozen=True)
class Answer:
    """A text and the scores of its first and last token."""

    text: str
    start: float
    end: float

    @property
    def score(self) -> float:
        return self.start + self.end


def predict_answers(
    task: Task, encoded: SpanSplit, outputs: Sequence[np.ndarray] | np.ndarray, threshold: float | None
) -> Predicted:
    """Return answers, exact match and F1, and the original's three files. See `predictions`."""
    listed, nulls = [], []
    for question in range(encoded.num_examples):
        answers, null = best_answers(task, encoded, outputs, question)
        listed.append(answers)
        nulls.append(null)
    odds = np.array([null.score - answers[0].score for answers, null in zip(listed, nulls, strict=True)], np.float64)
    texts = predicted = [answers[0].text for answers in listed]
    metrics: dict[str, float] = {}
    if task.no_answer:
        if threshold is None and encoded.labelled:
            gain = np.array([f1 for _, f1 in _scores(task, encoded, texts)])
            without = np.array([f1 for _, f1 in _scores(task, encoded, [""] * len(texts))])
            threshold = best_threshold(odds, gain, without)
        elif threshold is None:
            threshold = task.threshold or 0.0
        predicted = [text if odd < -threshold else "" for text, odd in zip(texts, odds, strict=True)]
        metrics["threshold"] = threshold
    known = encoded.labelled and bool(encoded.num_examples)
    metrics = _metrics(task, encoded, predicted) | metrics if known else {}
    best: dict[str, Any] = {}
    lines: list[tuple[Any, dict[str, Any]]] = []
    ranked: list[list[dict[str, Any]]] = []
    for example, answers, null, text, odd in zip(encoded.examples, listed, nulls, predicted, odds, strict=True):
        entries = _entries(answers, null if task.no_answer else None, task.options.num_best)
        best[example.name] = entries
        ranked.append(entries)
        scores = {"probability": next((entry["probability"] for entry in entries if entry["text"] == text), 0.0)}
        lines.append((text, scores | ({"null_odds": float(odd)} if task.no_answer else {})))
    names = [example.name for example in encoded.examples]
    files = {"predictions.json": dict(zip(names, predicted, strict=True)), "nbest_predictions.json": best}
    if task.no_answer:
        files["null_odds.json"] = dict(zip(names, odds.tolist(), strict=True))
    if encoded.part not in ("", task.selects):
        files = {f"{encoded.part}/{name}": content for name, content in files.items()}
    return Predicted(
        lines,
        metrics,
        files,
        ranked=ranked,
        report=(lambda: answer_report(task, encoded, predicted)) if known else dict,
    )


def best_answers(
    task: Task, encoded: SpanSplit, outputs: Sequence[np.ndarray] | np.ndarray, question: int
) -> tuple[list[Answer], Answer]:
    """Return the distinct best texts of a question, best first, at least one; and no answer."""
    rows = encoded.rows_of(question)
    context, number = encoded.examples[question].context, encoded.context_of[question]
    offsets = encoded.offsets[number]
    spans = [(int(encoded.first[row]), int(encoded.count[row])) for row in rows]
    options = task.options
    scores = [np.asarray(outputs[row], np.float64) for row in rows]
    at_cls = min((Answer("", float(s[0, 0]), float(s[0, 1])) for s in scores), key=lambda answer: answer.score)
    # For each window the scores of its text's positions.
    parts = [
        s[begin : begin + count] for s, begin, (_, count) in zip(scores, map(encoded.begin, rows), spans, strict=True)
    ]
    for num_best in (options.num_best, max(1, *(count for _, count in spans))):
        table = np.concatenate(
            [
                _joined(part, mask, first, num_best, options.answer_length)
                for part, mask, (first, _) in zip(parts, most_context(spans), spans, strict=True)
            ]
        )
        if len(table):
            break  # otherwise no best start combines with a best end, and all positions are combined
    table = table[np.argsort(-table[:, 0], kind="stable")]
    answers: dict[str, Answer] = {}
    for _, start_score, end_score, first_token, last_token in table:
        text = context[offsets[int(first_token), 0] : offsets[int(last_token), 1]].strip()
        if text and text not in answers:
            answers[text] = Answer(text, float(start_score), float(end_score))
            if len(answers) == options.num_best:
                break
    return list(answers.values()) or [Answer(PLACEHOLDER, 0.0, 0.0)], at_cls


def _joined(scores: np.ndarray, mask: np.ndarray, first: int, num_best: int, longest: int) -> np.ndarray:
    """Return (n, 5): score, start score, end score, first and last token in the text, of one window's answers.

    Args:
      scores: (tokens, 2), those of the window's text. mask: its tokens that may be starts. first: its first token.
    """
    starts, ends = scores[:, 0], scores[:, 1]
    allowed = np.flatnonzero(mask)
    best_starts = allowed[np.argsort(-starts[allowed], kind="stable")[:num_best]]
    best_ends = np.argsort(-ends, kind="stable")[:num_best]
    start, end = (grid.reshape(-1) for grid in np.meshgrid(best_starts, best_ends, indexing="ij"))
    fits = (end >= start) & (end - start < longest)
    start, end = start[fits], end[fits]
    return np.stack([starts[start] + ends[end], starts[start], ends[end], start + first, end + first], axis=1)


def _entries(answers: list[Answer], null: Answer | None, num_best: int) -> list[dict[str, Any]]:
    """Return a question's entries of nbest_predictions.json; no answer is inserted by its score, or last."""
    listed = list(answers)
    if null is not None:
        rank = next((rank for rank, answer in enumerate(listed) if answer.score < null.score), len(listed))
        listed = [*listed[:rank], null, *listed[rank:]][:num_best]
        listed = listed if null in listed else [*listed, null]
    scores = np.array([answer.score for answer in listed])
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    return [
        {"text": answer.text, "probability": float(value), "start_logit": answer.start, "end_logit": answer.end}
        for answer, value in zip(listed, probabilities, strict=True)
    ]


def _scores(task: Task, encoded: SpanSplit, texts: Sequence[str]) -> list[tuple[float, float]]:
    """Return (exact match, F1) of a text for each question."""
    return [
        answer_scores(text, [answer for answer, _ in example.answers or ()], no_answer=task.no_answer)
        for text, example in zip(texts, encoded.examples, strict=True)
    ]


def answer_report(task: Task, encoded: SpanSplit, texts: Sequence[str]) -> dict[str, Any]:
    """Return exact match and F1 of the questions with and without an answer, and intervals over questions.

    These are HasAns_exact, HasAns_f1, HasAns_total and NoAns_exact, NoAns_f1, NoAns_total of SQuAD 2.0's script.
    """
    table = np.array(_scores(task, encoded, texts))
    types = {}
    for name, rows in _answerable(encoded).items():
        if rows.any():
            exact, f1 = table[rows].mean(axis=0).tolist()
            types[name] = {"exact_match": exact, "f1": f1, "support": int(rows.sum())}

    def metrics_of(rows: np.ndarray) -> dict[str, float]:
        exact, f1 = table[rows].mean(axis=0).tolist()
        return {"f1": f1, "exact_match": exact}

    return {"examples": len(table), "types": types, "intervals": intervals(len(table), metrics_of)}


def _answerable(encoded: SpanSplit) -> dict[str, np.ndarray]:
    """Return the questions with and without an answer, bool (n,) each."""
    answerable = np.array([bool(example.answers) for example in encoded.examples])
    return {"answerable": answerable, "unanswerable": ~answerable}


def _metrics(task: Task, encoded: SpanSplit, texts: Sequence[str]) -> dict[str, float]:
    table = np.array(_scores(task, encoded, texts))
    metrics = {"f1": float(table[:, 1].mean()), "exact_match": float(table[:, 0].mean())}
    if task.no_answer:
        for name, rows in _answerable(encoded).items():
            if rows.any():
                metrics[f"f1_{name}"] = float(table[rows, 1].mean())
    return metrics
