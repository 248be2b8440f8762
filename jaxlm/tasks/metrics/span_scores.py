"""Exact match and F1 of answers, by the definitions of SQuAD's two official scripts, and the threshold for no answer.

A text is lower-cased and stripped of ASCII punctuation, then of the articles a, an and the, and its white space is
collapsed. The best value over a question's answers counts, and the mean is over all questions. The scripts differ on
texts that this leaves empty: 1.1 gives "the" against "the" an exact match of 1 and an F1 of 0; 2.0 discards such
answers, treats a question without any as having the answer "", and gives an F1 of 1 where both are empty.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

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
