"""Fine-tuning through the real command: several seeds, a kill in the second, every kind of task and of start.

Fails when a prediction is lost, doubled or out of order, when a resumed table differs from one that was never stopped,
or when a start takes other parameters than it says.
"""

import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from sklearn.metrics import f1_score
from toy_devices import first_devices
from toy_runs import (
    Process,
    assert_one_line,
    checkpoints,
    checksums,
    finetune_arguments,
    make_stores,
    make_task,
    metrics,
    pretrain_arguments,
    run_here,
    starts,
)

from jaxlm.config import command_line
from jaxlm.errors import InputError
from jaxlm.finetuning.arguments import FinetuneArguments
from jaxlm.finetuning.run import plan
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.start import OF_START, trained_length

pytestmark = pytest.mark.usefixtures("two_devices")

SEEDS = ("--seeds", 2, "--num-epochs", 4)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, stores):
    run = tmp_path_factory.mktemp("pretrained") / "run"
    ended = run_here(
        "pretrain",
        *pretrain_arguments(run, stores, "--num-steps", 10, "--checkpoint-every", 5, "--model.num-layers", 2),
    )
    assert ended.code == 0, ended.errors
    return run


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, pretrained, task):
    """Two seeds of 20 steps on two devices."""
    run = tmp_path_factory.mktemp("finetuned") / "run"
    ended = run_here("finetune", *finetune_arguments(run, task, "--start", pretrained, *SEEDS))
    assert ended.code == 0, ended.errors
    assert "dev  " in ended.output and "±" in ended.output
    assert "f1 of the label 'good'" in ended.output  # fails on 2968321, which named no label
    return run


def tune(run: Path, task: Path, *more) -> Path:
    ended = run_here("finetune", *finetune_arguments(run, task, *more))
    assert ended.code == 0, ended.errors
    return run


def results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


def predictions(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]


def parameters(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The parameters of a run's checkpoint by path."""
    found = Checkpoints(run / "checkpoints", read_only=True)
    restored = found.restore_partial({"params": found.metadata(step).tree["params"]}, step=step).state
    leaves = jax.tree_util.tree_leaves_with_path(restored["params"])
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def labels_of(task: Path, part: str) -> list[str]:
    return [line.split("\t")[1] for line in (task / f"{part}.tsv").read_text().splitlines()[1:]]


def test_results_are_as_the_contract_says(finetuned):
    found = results(finetuned)
    assert found["task"] == "custom" and found["metric"] == "accuracy"
    assert [(run["seed"], run["learning_rate"]) for run in found["runs"]] == [(0, 3e-3), (1, 3e-3)]
    for part in ("dev", "test"):
        for run in found["runs"]:
            assert run[part].keys() >= {"accuracy", "f1", "matthews", "loss"} and 0 <= run[part]["accuracy"] <= 1
        for name, figure in found[part].items():
            values = [run[part][name] for run in found["runs"]]
            assert figure["mean"] == pytest.approx(np.mean(values))
            assert figure["std"] == pytest.approx(np.std(values, ddof=1))
    assert found["best"]["seed"] == max(found["runs"], key=lambda run: run["dev"]["accuracy"])["seed"]


def test_every_example_has_one_prediction_in_order_whatever_their_number(finetuned, task):
    found = predictions(finetuned)
    expected = [
        (part, index, seed) for seed in (0, 1) for part, count in (("dev", 13), ("test", 7)) for index in range(count)
    ]
    assert [(line["split"], line["index"], line["seed"]) for line in found] == expected
    for line in found:
        assert line["learning_rate"] == 3e-3 and line["scores"].keys() == {"bad", "good"}
        assert line["prediction"] == max(line["scores"], key=line["scores"].get)
        assert sum(line["scores"].values()) == pytest.approx(1)
    for run in results(finetuned)["runs"]:
        for part in ("dev", "test"):
            mine = [line for line in found if line["seed"] == run["seed"] and line["split"] == part]
            truth = labels_of(task, part)
            right = [line["prediction"] == label for line, label in zip(mine, truth, strict=True)]
            assert run[part]["accuracy"] == pytest.approx(np.mean(right))
            positive = results(finetuned)["positive"]  # fails on 2968321: the label of the reported F1 stood nowhere
            predicted = [line["prediction"] for line in mine]
            assert run[part]["f1"] == pytest.approx(f1_score(truth, predicted, pos_label=positive, zero_division=0))
            nll = [-math.log(line["scores"][label]) for line, label in zip(mine, truth, strict=True)]
            assert run[part]["loss"] == pytest.approx(np.mean(nll), rel=1e-5)


def test_the_best_evaluation_on_dev_counts_and_its_parameters_stay(finetuned):
    for run in results(finetuned)["runs"]:
        accuracy = metrics(finetuned, "dev_accuracy", seed=run["seed"])
        assert list(accuracy) == [5, 10, 15, 20]
        assert run["step"] == max(accuracy, key=accuracy.get)  # the first of equals
        assert run["dev"]["accuracy"] == pytest.approx(accuracy[run["step"]])
    assert checkpoints(finetuned) == [results(finetuned)["best"]["step"]]
    assert not (finetuned / "members").exists()


def test_the_length_is_the_trained_one_unless_told(finetuned, pretrained, task, tmp_path):
    """Rows of 32 in a table of 512. Fails on 2968321: 512, over positions that were never trained.

    A run of that commit goes on at the length it saved, though it is beyond.
    """

    def planned(run, *more):
        words = [*map(str, finetune_arguments(run, task, "--start", pretrained, *more))]
        return plan(*command_line(FinetuneArguments, FinetuneConfig, program="finetune", description="", argv=words))

    unsaid = planned(tmp_path / "run", "--length", "None")
    assert unsaid.length == 32 and "was trained on 32 of its 512 positions" in unsaid.notes[0]
    assert planned(tmp_path / "run", "--length", "None", "--beyond-length").length == 512
    assert planned(tmp_path / "run", "--length", 33, "--beyond-length").length == 33
    with pytest.raises(InputError, match=r"length must be at most 32, the trained .*, got 33; .*--beyond-length"):
        planned(tmp_path / "run", "--length", 33)
    saved = json.loads((finetuned / "config.json").read_text())
    assert saved["length"] == 16 and saved[OF_START] == 32
    assert trained_length(RunDirectory(finetuned), 20) == 32
    saved["length"] = 512
    del saved[OF_START]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(saved))
    assert planned(tmp_path / "old", "--length", "None").length == 512
    assert planned(tmp_path / "old", "--length", 512).length == 512


def test_a_complete_run_says_so(finetuned, pretrained, task):
    ended = run_here("finetune", *finetune_arguments(finetuned, task, "--start", pretrained, *SEEDS))
    assert ended.code == 0 and "is complete" in ended.output and ended.errors == ""


@pytest.mark.slow
def test_killed_in_the_second_seed_or_not_the_results_are_the_same(tmp_path, pretrained, task, finetuned):
    run = tmp_path / "killed"
    arguments = finetune_arguments(run, task, "--start", pretrained, *SEEDS)
    at = random.randint(8, 18)  # the save of step 6 has waited for that of step 3
    process = Process("finetune", *arguments, log=tmp_path / "log", devices=2)

    def in_the_second_seed() -> bool:
        file = run / "metrics.jsonl"
        return file.exists() and any(line["seed"] == 1 and line["step"] >= at for line in read_metrics(file))

    process.until(in_the_second_seed, f"step {at} of the second seed")
    assert process.kill().code == -9
    ended = run_here("finetune", *arguments)
    assert ended.code == 0, ended.errors
    for name in ("results.json", "predictions.jsonl"):
        assert (run / name).read_bytes() == (finetuned / name).read_bytes(), at
    for seed in (0, 1):
        assert metrics(run, seed=seed) == metrics(finetuned, seed=seed), at
        assert list(metrics(run, seed=seed)) == list(range(1, 21))
    assert checksums(run) == checksums(finetuned)
    assert len(starts(run)) == 2
    assert "resumed at step" in ended.errors


def test_one_device_predicts_what_two_predict_in_the_same_order(tmp_path, pretrained, task, finetuned):
    with first_devices(1):
        run = tune(tmp_path / "run", task, "--start", pretrained, *SEEDS)
    for one, two in zip(predictions(run), predictions(finetuned), strict=True):
        assert (one["split"], one["index"], one["seed"]) == (two["split"], two["index"], two["seed"])
        assert one["scores"]["good"] == pytest.approx(two["scores"]["good"], abs=1e-3)


def test_from_scratch_needs_only_a_tokenizer(tmp_path, stores, task):
    sizes = "--model.num-layers 1 --model.width 32 --model.num-heads 4 --model.feed-forward-width 64".split()
    run = tune(
        tmp_path / "run", task, "--tokenizer", f"store:{stores[0]}", *sizes, "--model.num-positions", 32,
        "--auxiliary-lm", 0,
    )  # fmt: skip
    assert starts(run)[0]["started_from"] is None
    assert parameters(run)["backbone/embeddings/positions"].shape == (32, 32)
    # Without the auxiliary loss the loss is the task's alone, to the bit.
    assert metrics(run, "loss") == metrics(run, "task_loss")
    # Fails on 2968321: the loss that nobody computes stood there as 0.0.
    assert metrics(run, "language_model_loss") == {}
    assert len(metrics(run)) == 10


def test_the_loss_is_the_tasks_and_half_of_the_language_models(finetuned):
    loss, task_loss = metrics(finetuned, "loss", seed=0), metrics(finetuned, "task_loss", seed=0)
    language = metrics(finetuned, "language_model_loss", seed=0)
    for step in loss:
        assert loss[step] == pytest.approx(task_loss[step] + 0.5 * language[step], rel=1e-5)
        assert language[step] > 1


@pytest.mark.parametrize("layers", [0, 1, None])
def test_transferred_layers_are_the_pretrained_ones_and_the_others_fresh(tmp_path, pretrained, task, layers):
    flags = () if layers is None else ("--transfer-layers", layers)
    # At rate 0 the parameters stay as they began.
    still = ("--optimizer.peak-lr", 0, "--num-epochs", 0.2)
    found = parameters(tune(tmp_path / "run", task, "--start", pretrained, *still, *flags))
    given = parameters(pretrained)
    count = 2 if layers is None else layers
    for name, leaf in given.items():
        if name == "backbone/embeddings/tokens":
            assert (found[name][: len(leaf)] == leaf).all()
        elif "blocks" not in name:
            assert (found[name] == leaf).all(), name
        else:
            assert (found[name][:count] == leaf[:count]).all(), name
            # Biases and gains have moved in pretraining, so fresh ones differ too.
            assert all((found[name][n] != leaf[n]).any() for n in range(count, 2)), name
    assert {name for name in found if name not in given} == {"head/bias", "head/kernel"}


@pytest.mark.parametrize("kind", ["regression", "choice"])
def test_scores_and_choices_of_a_users_jsonl(tmp_path, finetuned, kind):
    """The start is a fine-tuned run: fine-tunings are chained, and the head is fresh."""
    files = make_task(tmp_path / kind, kind)
    run = tune(tmp_path / "run", files, "--start", finetuned)
    step = results(finetuned)["best"]["step"]
    assert starts(run)[0]["started_from"] == f"parameters of {finetuned}@{step}"
    rows = [json.loads(line) for line in (files / "dev.jsonl").read_text().splitlines()]
    mine = [line for line in predictions(run) if line["split"] == "dev"]
    assert [line["index"] for line in mine] == list(range(13))
    (only,) = results(run)["runs"]
    if kind == "regression":
        assert all(isinstance(line["prediction"], float) for line in mine)
        expected = np.corrcoef([line["prediction"] for line in mine], [row["score"] for row in rows])[0, 1]
        assert only["dev"]["pearson"] == pytest.approx(expected)
        assert results(run)["metric"] == "pearson" and "spearman" in only["dev"] and "accuracy" not in only["dev"]
    else:
        assert all(line["prediction"] in "ab" and line["scores"].keys() == {"a", "b"} for line in mine)
        right = [line["prediction"] == row["right"] for line, row in zip(mine, rows, strict=True)]
        assert only["dev"]["accuracy"] == pytest.approx(np.mean(right))


def test_several_rates_name_the_best_and_all_parameters_can_be_kept(tmp_path, pretrained, task):
    rates = (1e-4, 3e-3)
    run = tune(tmp_path / "run", task, "--start", pretrained, "--learning-rates", *rates, "--keep", "all",
               "--select", "last")  # fmt: skip
    found = results(run)
    assert [member["learning_rate"] for member in found["runs"]] == list(rates)
    means = {member["learning_rate"]: member["dev"]["accuracy"] for member in found["runs"]}
    assert found["learning_rate"] == max(means, key=means.get) == found["best"]["learning_rate"]
    assert found["dev"]["accuracy"] == {"mean": means[found["learning_rate"]], "std": 0.0}
    for member in found["runs"]:
        assert member["step"] == 10
        kept = Checkpoints(run / "members" / f"seed-0-rate-{member['learning_rate']}" / "kept", read_only=True)
        assert kept.steps() == [10] and kept.metadata().tree["params"].keys() == {"backbone", "head"}
    assert {line["learning_rate"] for line in predictions(run)} == set(rates)


def test_a_set_smaller_than_a_batch_and_no_dev_file(tmp_path, pretrained):
    files = make_task(tmp_path / "task", train=6, dev=1, test=1)
    arguments = finetune_arguments(tmp_path / "run", files, "--start", pretrained)
    place = arguments.index("--custom.dev")
    del arguments[place : place + 2]
    ended = run_here("finetune", *arguments)
    assert ended.code == 0, ended.errors
    assert "held out" in ended.output
    assert [line["index"] for line in predictions(tmp_path / "run") if line["split"] == "dev"] == [0]


def test_a_newer_checkpoint_of_the_start_does_not_disturb_a_run_that_goes_on(tmp_path, pretrained, stores, task):
    source = tmp_path / "source"
    shutil.copytree(pretrained, source)
    shutil.rmtree(source / "checkpoints" / "10")
    run = tune(tmp_path / "run", task, "--start", source)
    shutil.copytree(pretrained / "checkpoints" / "10", source / "checkpoints" / "10")  # it trained on
    ended = run_here("finetune", *finetune_arguments(run, task, "--start", source))
    assert ended.code == 0 and "is complete" in ended.output, ended.errors
    ended = run_here("finetune", *finetune_arguments(run, task, "--start", f"{source}@10"))
    assert_one_line(ended, 2, "the start has other parameters", "holds a run with another config")
    shutil.rmtree(source)  # Fails on 2968321: it was opened at every start, needed or not
    ended = run_here("finetune", *finetune_arguments(run, task, "--start", source))
    assert ended.code == 0 and "is complete" in ended.output, ended.errors


def test_a_stop_before_training_begins_takes_effect_at_once(tmp_path, pretrained, task, monkeypatch):
    """Fails if a signal during minutes of encoding waits for the first step, or passes for damaged files."""

    def encoding(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except Exception as error:
            raise AssertionError("taken for another error") from error

    monkeypatch.setattr("jaxlm.finetuning.run.encoded_splits", encoding)
    began = time.monotonic()
    ended = run_here("finetune", *finetune_arguments(tmp_path / "run", task, "--start", pretrained))
    assert_one_line(ended, 75, "stopped before training began; nothing is lost; rerun the same command to resume")
    assert time.monotonic() - began < 50 and not (tmp_path / "run").exists()
