"""Metrics against their definitions, written out here by hand."""

import numpy as np
import pytest

from jaxlm.tasks import KINDS, TASKS, compute_metrics


def custom(num_labels):
    names = tuple(f"label{i}" for i in range(num_labels))
    return KINDS["classification"](name="custom", metrics=("accuracy", "f1", "matthews"), labels=names)


def counts(predictions, labels, positive):
    true = int(((predictions == positive) & (labels == positive)).sum())
    false = int(((predictions == positive) & (labels != positive)).sum())
    missed = int(((predictions != positive) & (labels == positive)).sum())
    return true, false, missed, len(labels) - true - false - missed


def f1(predictions, labels, positive):
    true, false, missed, _ = counts(predictions, labels, positive)
    return 2 * true / (2 * true + false + missed) if true + false + missed else 0.0


@pytest.fixture
def two_classes():
    random = np.random.default_rng(3)
    labels = random.integers(0, 2, 101)
    return np.where(random.random(101) < 0.7, labels, 1 - labels), labels


def test_two_classes(two_classes):
    predictions, labels = two_classes
    true, false, missed, rest = counts(predictions, labels, 1)
    matthews = (true * rest - false * missed) / np.sqrt(
        float((true + false) * (true + missed) * (rest + false) * (rest + missed))
    )
    measured = compute_metrics(custom(2), predictions, labels)
    assert measured == pytest.approx(
        {"accuracy": (true + rest) / 101, "f1": f1(predictions, labels, 1), "matthews": matthews}, rel=1e-12
    )
    assert compute_metrics(TASKS["mrpc"], predictions, labels)["f1"] == measured["f1"]
    assert compute_metrics(TASKS["cola"], predictions, labels)["matthews"] == measured["matthews"]


def test_more_classes_average_f1_over_all_labels():
    labels, predictions = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 1, 1, 0])
    by_hand = np.mean([f1(predictions, labels, label) for label in range(4)])  # a label that nobody has counts as 0
    assert compute_metrics(custom(4), predictions, labels)["f1"] == pytest.approx(by_hand)


def test_always_the_paraphrase():
    labels = np.array([1] * 279 + [0] * 129)  # MRPC's dev part
    measured = compute_metrics(TASKS["mrpc"], np.ones_like(labels), labels)
    assert measured["f1"] == pytest.approx(2 * 279 / (2 * 279 + 129)) and round(measured["f1"], 2) == 0.81


def test_correlations():
    random = np.random.default_rng(5)
    labels = np.round(random.random(50) * 5, 1)  # with ties
    predictions = np.exp(labels) + random.normal(size=50)

    def pearson(x, y):
        x, y = x - x.mean(), y - y.mean()
        return (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())

    def ranks(x):
        return np.array([((x < value).sum() + (x <= value).sum() + 1) / 2 for value in x])

    measured = compute_metrics(TASKS["stsb"], predictions, labels)
    assert measured["pearson"] == pytest.approx(pearson(predictions, labels), rel=1e-9)
    assert measured["spearman"] == pytest.approx(pearson(ranks(predictions), ranks(labels)), rel=1e-9)
    scaled = compute_metrics(TASKS["stsb"], predictions * 7 - 3, labels)
    assert scaled == pytest.approx(measured, rel=1e-9)  # standardised outputs are judged as well as scores


@pytest.mark.filterwarnings("ignore:(pearson|spearman)")  # the other measure of the same task warns, too
@pytest.mark.parametrize(("name", "metric"), [("stsb", "pearson"), ("stsb", "spearman"), ("cola", "matthews")])
def test_constant_predictions_are_zero_with_a_warning(name, metric):
    labels = np.array([0, 1, 1, 0])
    with pytest.warns(UserWarning, match=f"{metric}: all predictions are the same"):
        assert compute_metrics(TASKS[name], np.ones(4, int), labels)[metric] == 0
    with pytest.warns(UserWarning, match=f"{metric}: all labels are the same"):
        assert compute_metrics(TASKS[name], labels, np.ones(4, int))[metric] == 0


@pytest.mark.filterwarnings("ignore:spearman")
def test_broken_predictions_are_zero_with_a_warning():
    with pytest.warns(UserWarning, match="pearson: some predictions are not finite"):
        assert compute_metrics(TASKS["stsb"], np.array([1.0, np.nan]), np.array([1.0, 2.0]))["pearson"] == 0
    with pytest.raises(ValueError, match="must be equal"):
        compute_metrics(TASKS["cola"], np.array([1, 0]), np.array([1]))


def test_one_row_is_not_a_correlation():
    with pytest.warns(UserWarning, match="all predictions are the same"):
        assert compute_metrics(TASKS["stsb"], np.array([2.0]), np.array([3.0])) == {"pearson": 0.0, "spearman": 0.0}
