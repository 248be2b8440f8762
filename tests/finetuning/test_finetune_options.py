"""Fine-tuning with several labels, class weights, smoothing and another selecting metric, through the commands."""

import json

import numpy as np
import pytest
import toy_encoder
from sklearn.metrics import accuracy_score, f1_score
from toy_runs import assert_one_line, run_here

from jaxlm.finetuning.results import summarize, table
from jaxlm.tasks import KINDS

pytestmark = pytest.mark.usefixtures("two_devices")

OPTIONS = "--class-weights low=2 mid=3.5 --label-smoothing 0.1 --select-by macro_f1 --custom.threshold 0.4".split()
NAMES = ("high", "low", "mid")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return toy_encoder.make_files(tmp_path_factory.mktemp("files"), "multilabel")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The flags of a toy encoder from scratch."""
    vocabulary = toy_encoder.write_vocabulary(tmp_path_factory.mktemp("vocabulary"))
    return ("--tokenizer", f"wordpiece:{vocabulary}", *toy_encoder.FLAGS)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, files, start):
    run = tmp_path_factory.mktemp("tuned") / "run"
    ended = run_here("finetune", *toy_encoder.arguments(run, files, "multilabel", *start, *OPTIONS))
    assert ended.code == 0, ended.errors
    assert "labels high: " in ended.output and "micro_f1" in ended.output and "±" not in ended.output
    return run


def indicators(sets) -> np.ndarray:
    return np.array([[name in labels for name in NAMES] for labels in sets])


def test_metrics_of_several_labels_are_those_of_the_predictions(tuned, files):
    """scikit-learn on predictions.jsonl; fails when a prediction ignores the threshold, or the loss its options."""
    found = json.loads((tuned / "results.json").read_text())
    assert found["metric"] == "macro_f1" and json.loads((tuned / "task.json").read_text())["threshold"] == 0.4
    lines = [json.loads(line) for line in (tuned / "predictions.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "dev"]
    given = indicators(row["labels"] for row in toy_encoder.lines(files / "dev.jsonl"))
    probabilities = np.array([[line["scores"][name] for name in NAMES] for line in lines])
    predicted = indicators(line["prediction"] for line in lines)
    assert np.array_equal(predicted, probabilities >= 0.4) and predicted.any()
    dev = found["runs"][0]["dev"]
    assert dev["micro_f1"] == pytest.approx(f1_score(given, predicted, average="micro"))
    assert dev["macro_f1"] == pytest.approx(f1_score(given, predicted, average="macro", zero_division=0))
    assert dev["exact_match"] == pytest.approx(accuracy_score(given, predicted))
    targets = given * 0.9 + 0.05
    losses = -np.array([1, 2, 3.5]) * targets * np.log(probabilities) - (1 - targets) * np.log(1 - probabilities)
    assert dev["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    (report,) = [report for report in found["runs"][0]["reports"] if report["split"] == "dev"]
    assert [report["classes"][name]["support"] for name in NAMES] == given.sum(axis=0).tolist()


def test_a_labelled_file_is_evaluated_as_dev_was(tuned, files):
    ended = run_here("evaluate", "task", "--run", tuned, "--input", files / "dev.jsonl")
    assert ended.code == 0, ended.errors
    found, dev = (json.loads(text) for text in (ended.output.splitlines()[-1], (tuned / "results.json").read_text()))
    for name, value in dev["runs"][0]["dev"].items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_a_step_of_several_labels_is_shown(tuned):
    ended = run_here("show", tuned, "--step", 1)
    assert ended.code == 0, ended.errors
    lines = [line for line in ended.output.splitlines() if line.startswith("example ")]
    known = ("labels 'low', as numbers [0, 1, 0]", "labels 'high', as numbers [1, 0, 0]")
    assert any(line.endswith(known) for line in lines), lines


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--class-weights", "balanced"), '--class-weights: ["low=2", "mid=3.5"] -> ["balanced"]'),
        (("--label-smoothing", "0"), "--label-smoothing: 0.1 -> 0.0"),
        (("--select-by", "micro-f1"), "--select-by must be one of macro_f1, micro_f1, exact_match, log_loss, loss"),
        (("--select-by", "loss", "--custom.metric", "micro_f1"), "--select-by must be left out with --custom.metric"),
        (("--custom.threshold", "0.5"), "custom.threshold: 0.4 -> 0.5"),
    ],
)
def test_other_options_are_another_run(tuned, files, start, more, said):
    """Fails when an option that changes results may change on resume, or a bad value ends in a traceback."""
    refused = run_here("finetune", *toy_encoder.arguments(tuned, files, "multilabel", *start, *OPTIONS, *more))
    assert_one_line(refused, 2, said)


def run(seed: int, rate: float, **dev: float) -> dict:
    return {"seed": seed, "learning_rate": rate, "step": 3, "dev": dev}


def test_a_metric_of_which_less_is_better_selects_the_least():
    """Fails when the rate or the seed with the highest loss is chosen."""
    task = KINDS["classification"](name="custom", metric="loss", labels=("a", "b"))
    runs = [run(0, 1e-3, loss=0.5), run(1, 1e-3, loss=0.3), run(0, 1e-4, loss=0.6), run(1, 1e-4, loss=0.1)]
    found = summarize(task, runs)
    assert found["learning_rate"] == 1e-4 and found["best"] == {"seed": 1, "learning_rate": 1e-4, "step": 3}
    lines = table(task, found)
    assert lines[0].startswith("custom: 2 seeds, learning rate 0.0001, selected by loss on dev")
    assert lines[1].split() == ["dev", "loss", "0.3500", "±", "0.3536"]
    assert [line.split()[:3] for line in lines[3:5]] == [["0.001", "loss", "0.4000"], ["0.0001", "loss", "0.3500"]]
    assert lines[4].endswith("(selected)") and len(lines) == 5


def test_a_single_run_has_no_deviation():
    task = KINDS["classification"](name="custom", labels=("a", "b"))
    found = summarize(task, [run(0, 1e-3, accuracy=0.45)])
    assert found["dev"] == {"accuracy": {"mean": 0.45, "std": 0.0}}
    assert table(task, found)[0].startswith("custom: 1 seed, ") and table(task, found)[1] == "  dev  accuracy 0.4500"
