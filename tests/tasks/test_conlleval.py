"""Scores of entities against CoNLL's own script, whose output `parity.freeze_conlleval` has written down."""

import json
from pathlib import Path

import numpy as np
import pytest
from parity import conlleval_case as case

from jaxlm.tasks.metrics.tags import COUNTS, entity_counts, entity_metrics, entity_report

FROZEN = json.loads((Path(__file__).resolve().parent.parent / "golden/conlleval.json").read_text())


def check(truth, guess, frozen):
    """Compare the whole numbers exactly, and percentages to their two decimals."""
    correct, given, found, _, tokens = np.sum([entity_counts(*pair) for pair in zip(truth, guess, strict=True)], axis=0)
    assert [tokens, given, found, correct] == frozen["numbers"] and COUNTS == 5
    metrics = entity_metrics(truth, guess)
    measured = [100 * metrics[name] for name in ("entity_precision", "entity_recall", "entity_f1")]
    assert measured == pytest.approx(frozen["percentages"][1:], abs=0.00501)
    types = entity_report(truth, guess)["types"]
    assert types.keys() == frozen["types"].keys()
    for kind, (*percentages, predicted) in frozen["types"].items():
        scores = [100 * types[kind][name] for name in ("precision", "recall", "f1")]
        assert scores == pytest.approx(percentages, abs=0.00501) and types[kind]["predicted"] == predicted
    return 100 * metrics["accuracy"]


@pytest.mark.parametrize("name", ["any", "bio"])
def test_invented_tags_have_the_scores_of_conlleval(name):
    """Fails when an entity begins or ends elsewhere than in the script, or a type is split at another hyphen.

    The accuracy is compared where tags are well-formed: the script takes I- and B- for different tags also where both
    begin an entity.
    """
    accuracy = check(*case.invented()[name], FROZEN[name])
    assert name == "any" or accuracy == pytest.approx(FROZEN[name]["percentages"][0], abs=0.00501)


@pytest.mark.data
def test_the_test_file_of_conll_2000_has_the_scores_of_conlleval(data_directory):
    """Fails for the same reasons, over the 47,377 words and 23,852 chunks of the shared task."""
    check(*case.chunks(data_directory / "chunk/conll2000/test.txt"), FROZEN["chunk"])
    assert FROZEN["chunk"]["numbers"][:2] == [47_377, 23_852]
