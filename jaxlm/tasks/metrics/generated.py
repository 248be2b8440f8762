"""Metrics of generated texts, by the libraries of their field: BLEU and chrF by sacrebleu, ROUGE by rouge-score.

BLEU (Papineni et al. 2002) and chrF (Popović 2015) are of a whole corpus and range from 0 to 100, as sacrebleu (Post
2018) has them: cased, with the tokenization `13a`; chrF2 of characters up to order 6. ROUGE (Lin 2004) is the mean F1
of the texts, a fraction, with stemming. A text may have several references.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlm.errors import InputError
from jaxlm.tasks.metrics.classification import RESAMPLES

References = Sequence[Sequence[str]]
"""The references of each text, at least one."""

EXTRA = "run launch/setup.sh cpu zero-shot, or pip install 'jaxlm[zero-shot]'"
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeLsum"}


def require(metrics: Sequence[str]) -> None:
    """Raise InputError for a metric whose library is not installed."""
    for metric in metrics:
        if metric in _LIBRARIES:
            _LIBRARIES[metric](metric)


def bleu(texts: Sequence[str], references: References) -> tuple[float, float, str]:
    """Return BLEU of a corpus from 0 to 100, its standard error by bootstrap, and sacrebleu's signature."""
    value, signature = corpus_score("bleu", texts, references)
    resampling = _sacrebleu("bleu").BLEU()
    resampled = resampling.corpus_score(list(texts), _streams(references), n_bootstrap=RESAMPLES)
    fields = json.loads(resampled.format(width=9, is_json=True, signature=str(resampling.get_signature())))
    # Half of the interval that holds 95 % of the resampled values; it has no such field if all of them are 0.
    return value, fields.get("confidence_var", 0.0) / 1.96, signature


def corpus_score(metric: str, texts: Sequence[str], references: References) -> tuple[float, str]:
    """Return `bleu` or `chrf` of a corpus from 0 to 100, and sacrebleu's signature."""
    library = _sacrebleu(metric)
    scorer = {"bleu": library.BLEU, "chrf": library.CHRF}[metric]()
    value = scorer.corpus_score(list(texts), _streams(references)).score
    return float(value), str(scorer.get_signature())


def rouge(texts: Sequence[str], references: References) -> dict[str, np.ndarray]:
    """Return the ROUGE-1, ROUGE-2 and ROUGE-L F1 of each text, fractions (n,), with stemming.

    Sentences are lines; ROUGE-L is the union over sentences, as in the original ROUGE-1.5.5 (`rougeLsum`). Of several
    references the best one counts, for each of the three.
    """
    scorer = _rouge_score("rouge_l")(list(ROUGE.values()), use_stemmer=True)
    scores = [scorer.score_multi(given, text) for text, given in zip(texts, references, strict=True)]
    return {name: np.array([one[theirs].fmeasure for one in scores]) for name, theirs in ROUGE.items()}


def exact_matches(texts: Sequence[str], references: References) -> np.ndarray:
    """Return 1 for each text that equals one of its references, blanks at the ends aside, else 0, float (n,)."""
    pairs = zip(texts, references, strict=True)
    return np.array([float(any(text.strip() == one.strip() for one in given)) for text, given in pairs])


def text_metrics(
    metrics: Sequence[str], texts: Sequence[str], references: References
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the values of these metrics, and the signatures of those that have one. InputError without a library."""
    values: dict[str, float] = {}
    signatures: dict[str, str] = {}
    of_texts: Mapping[str, Callable[[], Mapping[str, np.ndarray]]] = {
        "exact_match": lambda: {"exact_match": exact_matches(texts, references)},
        **dict.fromkeys(ROUGE, lambda: rouge(texts, references)),
    }
    for metric in metrics:
        if metric in values:
            continue
        if metric in of_texts:
            values |= {name: float(np.mean(found)) for name, found in of_texts[metric]().items()}
        else:
            values[metric], signatures[metric] = corpus_score(metric, texts, references)
    return {metric: values[metric] for metric in metrics}, signatures


def _streams(references: References) -> list[list[str | None]]:
    """Return references as sacrebleu takes them, one list for each of the largest number; None where there is none."""
    most = max(len(given) for given in references)
    return [[given[k] if k < len(given) else None for given in references] for k in range(most)]


def _sacrebleu(metric: str) -> Any:
    """Return the scorers of sacrebleu. InputError, with the metric, without the library."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise _missing(metric, "sacrebleu") from error
    return metrics


def _rouge_score(metric: str) -> Any:
    """Return the class of scorers of rouge-score. InputError, with the metric, without the library."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing(metric, "rouge-score") from error
    return RougeScorer


def _missing(metric: str, library: str) -> InputError:
    return InputError(f"the metric {metric} needs {library}, which is not installed; {EXTRA}")


_LIBRARIES = {"bleu": _sacrebleu, "chrf": _sacrebleu} | dict.fromkeys(ROUGE, _rouge_score)
