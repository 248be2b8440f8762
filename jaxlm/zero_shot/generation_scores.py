"""Scores of generated texts: BLEU by sacrebleu, ROUGE by rouge-score, and F1 of CoQA's answers."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.metrics.intervals import RESAMPLES
from jaxlm.tasks.metrics.span_scores import exact_match, token_f1

EXTRA = "run launch/setup.sh cpu zero-shot, or pip install 'jaxlm[zero-shot]'"
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeLsum"}


def bleu(texts: Sequence[str], references: Sequence[str]) -> tuple[float, float, str]:
    """Return BLEU of a corpus from 0 to 100, its standard error by bootstrap, and sacrebleu's signature."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise InputError(f"translation needs sacrebleu, which is not installed; {EXTRA}") from error
    metric = BLEU()
    value = metric.corpus_score(list(texts), [list(references)]).score
    signature = str(metric.get_signature())
    resampling = BLEU()
    resampled = resampling.corpus_score(list(texts), [list(references)], n_bootstrap=RESAMPLES)
    fields = json.loads(resampled.format(width=9, is_json=True, signature=str(resampling.get_signature())))
    # Half of the interval that holds 95 % of the resampled values; it has no such field if all of them are 0.
    return value, fields.get("confidence_var", 0.0) / 1.96, signature


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the ROUGE-1, ROUGE-2 and ROUGE-L F1 of each text, fractions (n,), with stemming.

    Sentences are lines; ROUGE-L is the union over sentences, as in the original ROUGE-1.5.5 (`rougeLsum`).
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError(f"summarization needs rouge-score, which is not installed; {EXTRA}") from error
    scorer: Any = RougeScorer(list(ROUGE.values()), use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return {name: np.array([one[theirs].fmeasure for one in scores]) for name, theirs in ROUGE.items()}


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
