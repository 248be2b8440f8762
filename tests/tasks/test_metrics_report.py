"""Metrics of a split and its report against scikit-learn, against formulas, and against the official scorers."""

import numpy as np
import pytest
from paths import REPOSITORY
from scipy.special import expit, softmax
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    log_loss,
    matthews_corrcoef,
)

from jaxlm.errors import InputError
from jaxlm.tasks import KINDS, Task, predictions
from jaxlm.tasks.encoding import EncodedSplit
from jaxlm.tasks.metrics import BINS, METRICS, check_metric, lower_is_better, markdown, names_for
from jaxlm.tasks.metrics.classification import confusion_metrics, intervals, report_lines
from jaxlm.tasks.metrics.tags import entity_metrics, entity_report

NAMES = ("cold", "hot", "mild", "unused")


def task(kind="classification", labels=NAMES, metrics=("accuracy", "f1", "matthews"), **more) -> Task:
    return KINDS[kind](name="custom", metric=metrics[0], metrics=metrics, labels=labels, **more)


def split(labels, groups=()) -> EncodedSplit:
    """A labelled split without tokens: metrics read its labels only."""
    count = len(labels)
    whole = np.zeros(count, np.int32)
    rows = {"ids": whole, "starts": np.arange(count + 1), "second": whole, "reads_last": True, "groups": groups}
    return EncodedSplit(labels=np.asarray(labels), labelled=True, truncated=0, longest=whole, length=8, pad=0, **rows)


@pytest.fixture(scope="module")
def scored():
    """Logits (200, 4) and labels 0 to 2, so that one class has no example."""
    random = np.random.default_rng(11)
    labels = random.integers(0, 3, 200)
    return random.normal(size=(200, 4)) + 1.5 * np.eye(4)[labels], labels


def test_metrics_of_classes_are_those_of_scikit_learn(scored):
    """Fails when a metric averages over other classes, or counts an absent class otherwise."""
    logits, labels = scored
    found = predictions(task(), split(labels), logits).metrics
    predicted, every = logits.argmax(axis=1), range(4)
    assert found["accuracy"] == accuracy_score(labels, predicted)
    macro = f1_score(labels, predicted, labels=every, average="macro", zero_division=0)
    assert found["macro_f1"] == found["f1"] == pytest.approx(macro, rel=1e-12)
    assert found["micro_f1"] == pytest.approx(f1_score(labels, predicted, average="micro"), rel=1e-12)
    assert found["matthews"] == pytest.approx(matthews_corrcoef(labels, predicted), rel=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(labels, softmax(logits, axis=1), labels=every), rel=1e-9)


@pytest.mark.parametrize(("labels", "positive"), [(NAMES, "mild"), (("a", "b"), "a"), (("a", "b"), "")])
def test_f1_is_that_of_the_positive_class(labels, positive):
    """Fails when `f1` ignores the chosen class, or when the name that is reported is not the class that is scored."""
    random = np.random.default_rng(2)
    given, logits = random.integers(0, len(labels), 90), random.normal(size=(90, len(labels)))
    chosen = task(labels=labels, positive_label=positive)
    assert chosen.positive == (positive or "b")
    number = labels.index(chosen.positive)
    wanted = f1_score(given == number, logits.argmax(axis=1) == number)
    assert predictions(chosen, split(given), logits).metrics["f1"] == pytest.approx(wanted, rel=1e-12)


def test_calibration_error_by_its_definition(scored):
    """Guo et al. 2017: a loop over the bins ((m - 1) / M, m / M]; fails when a bin or its weight is another."""
    logits, labels = scored
    probabilities = softmax(logits, axis=1)
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for m in range(1, BINS + 1):
        inside = (confidence > (m - 1) / BINS) & (confidence <= m / BINS)
        if inside.any():
            error += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    found = predictions(task(), split(labels), logits)
    assert found.metrics["calibration_error"] == pytest.approx(error, rel=1e-9)
    bins = found.report()["calibration"]
    assert sum(one["examples"] for one in bins) == 200 and len(bins) == BINS
    certain = predictions(task(), split([0, 0]), np.array([[50.0, 0, 0, 0], [50.0, 0, 0, 0]]))
    assert certain.metrics["calibration_error"] == pytest.approx(0.0, abs=1e-12)


def test_the_report_is_that_of_scikit_learn(scored):
    """Fails when rows and columns of the confusion matrix are exchanged, or a class is left out."""
    logits, labels = scored
    report = predictions(task(), split(labels), logits).report()
    predicted = logits.argmax(axis=1)
    assert report["confusion_matrix"] == confusion_matrix(labels, predicted, labels=range(4)).tolist()
    wanted = classification_report(
        labels, predicted, labels=range(4), target_names=NAMES, output_dict=True, zero_division=0
    )
    assert list(report["classes"]) == list(NAMES)
    for name in NAMES:
        values = report["classes"][name]
        assert values == pytest.approx({k.replace("-score", ""): v for k, v in wanted[name].items()}, rel=1e-12)
    text = "\n".join(report_lines(report))
    for said in ("precision", "support", "given, predicted", "95% intervals", "1,000 resamples of 200 examples"):
        assert said in text


def test_metrics_of_a_resample_are_the_metrics(scored):
    """The fast formulas of the bootstrap against scikit-learn; fails when one of them is of another metric."""
    logits, labels = scored
    predicted = logits.argmax(axis=1)
    confusion = confusion_matrix(labels, predicted, labels=range(4))
    found = predictions(task(), split(labels), logits).metrics
    for name, value in confusion_metrics(confusion, None).items():
        assert value == pytest.approx(found[name], rel=1e-12), name
    assert confusion_metrics(confusion, 1)["f1"] == pytest.approx(f1_score(labels == 1, predicted == 1), rel=1e-12)
    assert confusion_metrics(np.array([[3, 0], [2, 0]]), 1) == {
        "accuracy": 0.6,
        "f1": 0.0,
        "macro_f1": pytest.approx(0.375),
        "micro_f1": 0.6,
        "matthews": 0.0,
    }


def test_intervals_are_reproducible_and_cover_the_mean():
    """An accuracy of 0.8 over 400 examples: the normal approximation gives 0.8 ± 1.96 * 0.02."""
    correct = np.arange(400) % 5 > 0

    def accuracy(rows):
        return {"accuracy": float(correct[rows].mean())}

    found = intervals(400, accuracy)
    assert found == intervals(400, accuracy) and found["resamples"] == 1000 and found["level"] == 0.95
    low, high = found["accuracy"]
    assert low == pytest.approx(0.8 - 1.96 * 0.02, abs=0.005) and high == pytest.approx(0.8 + 1.96 * 0.02, abs=0.005)
    assert intervals(1, accuracy).keys() == {"level", "resamples", "seed"}


def test_intervals_hold_the_values_that_are_reported(scored):
    """Fails when the interval of a metric is computed from another metric's resamples."""
    logits, labels = scored
    found = predictions(task(), split(labels), logits)
    ranges = {name: value for name, value in found.report()["intervals"].items() if isinstance(value, list)}
    assert set(ranges) == set(found.metrics)
    for name, (low, high) in ranges.items():
        slack = 0.02 if name == "calibration_error" else 0.0  # its resamples are biased upwards
        assert low - slack <= found.metrics[name] <= high, name


def test_correlations_have_intervals():
    random = np.random.default_rng(4)
    scores = random.normal(size=80)
    regression = task("regression", (), ("pearson", "spearman"))
    found = predictions(regression, split(scores.astype(np.float32)), scores[:, None] + random.normal(size=(80, 1)))
    ranges = found.report()["intervals"]
    for name in ("pearson", "spearman"):
        assert ranges[name][0] < found.metrics[name] < ranges[name][1]


def test_sets_of_labels_are_scored_as_by_scikit_learn():
    """Fails when a threshold is applied to the output instead of its probability, or a label is averaged otherwise."""
    random = np.random.default_rng(8)
    given, logits = random.random((60, 3)) < 0.4, random.normal(size=(60, 3))
    several = task("multilabel", NAMES[:3], ("micro_f1", "macro_f1", "exact_match"), threshold=0.3)
    found = predictions(several, split(given.astype(np.float32)), logits)
    predicted = expit(logits) >= 0.3
    assert found.metrics == pytest.approx(
        {
            "micro_f1": f1_score(given, predicted, average="micro"),
            "macro_f1": f1_score(given, predicted, average="macro"),
            "exact_match": accuracy_score(given, predicted),
            "log_loss": np.mean([log_loss(given[:, k], expit(logits[:, k])) for k in range(3)]),
        },
        rel=1e-9,
    )
    assert [line[0] for line in found.lines] == [
        [name for name, one in zip(NAMES, row, strict=False) if one] for row in predicted
    ]
    assert found.lines[0][1] == pytest.approx(dict(zip(NAMES, expit(logits[0]), strict=False)))
    report = found.report()
    wanted = classification_report(given, predicted, target_names=NAMES[:3], output_dict=True, zero_division=0)
    for name in NAMES[:3]:
        assert report["classes"][name] == pytest.approx({k.replace("-score", ""): v for k, v in wanted[name].items()})
    ranges = {name: value for name, value in report["intervals"].items() if isinstance(value, list)}
    assert set(ranges) == set(found.metrics)
    assert all(low < found.metrics[name] < high for name, (low, high) in ranges.items())


def test_entities_are_scored_per_type():
    """conlleval's precision and recall of a type are those of the files with this type's tags alone."""
    random = np.random.default_rng(9)
    kinds = ("PER", "LOC", "ORG")

    def tags():
        return [str(random.choice(["O", "O", *(f"{m}-{k}" for m in "BI" for k in kinds)])) for _ in range(9)]

    truth = [tags() for _ in range(40)]
    predicted = [[tag if random.random() < 0.8 else "O" for tag in row] for row in truth]
    report = entity_report(truth, predicted)
    assert list(report["types"]) == sorted(kinds)
    for kind in kinds:

        def alone(rows, kind=kind):
            return [[tag if tag.endswith(kind) else "O" for tag in row] for row in rows]

        wanted = entity_metrics(alone(truth), alone(predicted))
        values = report["types"][kind]
        assert values["precision"] == pytest.approx(wanted["entity_precision"])
        assert values["recall"] == pytest.approx(wanted["entity_recall"])
        assert values["f1"] == pytest.approx(wanted["entity_f1"])
    low, high = report["intervals"]["entity_f1"]
    assert low < entity_metrics(truth, predicted)["entity_f1"] < high


def test_every_metric_is_in_the_documentation():
    """Fails when a metric is added without docs/metrics.md: write `markdown()` into it."""
    assert markdown() in (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_metrics_that_are_reported_are_in_the_catalogue(scored):
    """Fails when a metric is computed that has no definition."""
    logits, labels = scored
    assert set(predictions(task(), split(labels), logits).metrics) <= set(names_for("classification"))
    assert names_for("choice") == ("accuracy", "log_loss", "calibration_error", "loss")
    assert {metric.name for metric in METRICS if lower_is_better(metric.name)} == {
        "loss",
        "log_loss",
        "calibration_error",
        "no_label",
    }


def test_an_unknown_metric_is_named_with_its_neighbour():
    with pytest.raises(InputError, match=r"--select-by must be one of .* got macro-f1; did you mean macro_f1\?"):
        check_metric("macro-f1", "--select-by", names_for("classification"))
