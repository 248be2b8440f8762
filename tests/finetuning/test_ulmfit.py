"""ULMFiT's recipe through the commands: a run that is stopped and resumed, trials together, prediction, an ensemble.

Fails when a stage, the batch norm's statistics or the windows depend on where a run was stopped, or a command reads
the head without its statistics.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from toy_runs import checksums, finetune_arguments, make_stores, make_task, metrics, run_here, starts
from toy_stops import Killed, Moments, raise_killed

import jaxlm

pytestmark = pytest.mark.usefixtures("two_devices")

TOY = "--model.num-layers 1 --model.width 16 --model.units 12 --length 16 --backprop-window 5 --num-epochs 4".split()


@pytest.fixture(scope="module")
def tune(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ulmfit")
    store, task = make_stores(directory / "stores")[0], make_task(directory / "task", train=24, dev=9, test=3)

    def tuned(name: str, *more) -> Path:
        run = directory / name
        words = finetune_arguments(run, task, "--tokenizer", f"store:{store}", *TOY, *more)
        ended = run_here("finetune", "finetune/ulmfit", *words[1:])
        assert ended.code == 0, ended.errors
        return run

    return tuned


@pytest.fixture(scope="module")
def whole(tune):
    """Four epochs of three steps: head, layer, embeddings, and one epoch more."""
    return tune("whole", "--seed", 1)


def scores(run: Path, seed: int, split: str = "dev") -> np.ndarray:
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    return np.array([line["scores"]["good"] for line in lines if (line["seed"], line["split"]) == (seed, split)])


def best_scores(run: Path) -> np.ndarray:
    return scores(run, json.loads((run / "results.json").read_text())["best"]["seed"])


def test_a_text_begins_as_in_the_language_models_training(whole):
    """Fails when a classifier, or a command that reads it, puts in a token that no language model has read."""
    model = jaxlm.load(whole)
    end, text = model.run.tokenizer.specials["end"], model.run.tokenizer.encode("ba be")
    assert model.encode(["ba be"]) == [[end, *text]] and model.run.prefix_ids == [end]


def test_each_stage_trains_one_group_more(whole):
    """Fails when a group moves before its epoch, or a stage is no epoch."""
    norms = {part: metrics(whole, f"update_norm/{part}") for part in ("head", "layer_0", "embeddings")}
    for stage, found in enumerate(norms.values()):
        assert [step for step, norm in found.items() if norm] == list(range(3 * stage + 1, 13))
    assert not metrics(whole, "update_norm/batch_stats")
    rates = metrics(whole, "learning_rate")
    assert rates[1] == pytest.approx(3e-3 / 32) and max(rates.values()) == pytest.approx(3e-3)


def test_a_run_stopped_within_a_stage_ends_as_the_others(tune, whole):
    """Fails when the moments of a stage, its count of steps or a running statistic are not those of the checkpoint."""
    with Moments(("a step", 6), raise_killed).watched(), pytest.raises(Killed):
        tune("stopped", "--seed", 1, "--checkpoint-every", 2)
    run = tune("stopped", "--seed", 1, "--checkpoint-every", 2)
    for name in ("results.json", "predictions.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    for name in ("loss", "gradient_norm", "dev_loss"):
        assert metrics(run, name) == metrics(whole, name), name
    assert checksums(run) == checksums(whole)
    assert any("batch_stats" in name for name in checksums(run))
    assert len(starts(run)) == 2


def test_trials_together_and_the_mean_of_two_classifiers(tune, whole):
    """Fails when a trial of a group has the statistics or stages of another, or an ensemble reads untrained ones."""
    run = tune("together", "--seed", 1, "--seeds", 2, "--members-per-group", 2)
    for split in ("dev", "test"):  # on one device of its own instead of eight
        np.testing.assert_allclose(scores(run, 1, split), scores(whole, 1, split), atol=1e-3)
    assert np.abs(scores(run, 2) - scores(run, 1)).max() > 1e-3
    output = run.parent / "ensemble"
    ended = run_here("evaluate", "ensemble", run, whole, "--output", output)
    assert ended.code == 0, ended.errors
    lines = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    found = [line["scores"]["good"] for line in lines if line["split"] == "dev"]
    np.testing.assert_allclose(found, (best_scores(run) + best_scores(whole)) / 2, atol=1e-5)
