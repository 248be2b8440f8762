"""Metrics of generated texts against the libraries' own functions, on corpora with one and with several references."""

import sys

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf

from jaxlm.errors import InputError
from jaxlm.tasks.metrics.generated import bleu, exact_matches, require, rouge, text_metrics

TEXTS = ["the cat sat on the mat", "a dog ran very far away today"]
REFERENCES = [["the cat sat on a mat"], ["a dog ran very far away", "The dog ran far away today."]]


def test_scores_of_a_corpus_are_those_of_sacrebleu():
    """Fails when texts and references are exchanged, when a reference is lost, or when an option changes."""
    first = [given[0] for given in REFERENCES]
    value, stderr, signature = bleu(TEXTS, [[one] for one in first])
    assert value == pytest.approx(corpus_bleu(TEXTS, [first]).score) and 0 < stderr < 30
    assert signature.startswith("nrefs:1|case:mixed") and "bs:" not in signature
    found, signatures = text_metrics(("chrf", "bleu"), TEXTS, REFERENCES)
    streams = [first, [None, REFERENCES[1][1]]]
    assert found["bleu"] == pytest.approx(corpus_bleu(TEXTS, streams).score) != pytest.approx(value)
    assert found["chrf"] == pytest.approx(corpus_chrf(TEXTS, streams).score) and list(found) == ["chrf", "bleu"]
    assert signatures["bleu"].startswith("nrefs:var") and "nc:6" in signatures["chrf"]


def test_scores_of_texts_are_those_of_rouge_score():
    """Fails when the sentences are joined, or when one reference of several is left out."""
    text, references = "A cat sat.\nIt runs.", ["It ran.\nThe cats sat.", "A dog."]
    names = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeLsum"}
    scorer = RougeScorer(list(names.values()), use_stemmer=True)
    expected = [scorer.score(one, text) for one in references]
    found = rouge([text], [references])
    assert {name: float(found[name][0]) for name in names} == {
        name: max(one[theirs].fmeasure for one in expected) for name, theirs in names.items()
    }
    assert text_metrics(("rouge_l",), [text], [references])[0] == {"rouge_l": float(found["rouge_l"][0])}


def test_exact_match_is_of_any_reference():
    assert exact_matches([" a b", "A b", "c"], [["a b"], ["a b"], ["d", "c "]]).tolist() == [1, 0, 1]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    require(("exact_match", "loss"))
    with pytest.raises(InputError, match="metric chrf needs sacrebleu, which is not installed; run launch/setup.sh"):
        require(("exact_match", "chrf"))
