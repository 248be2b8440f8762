"""Fine-tunings of several seeds that are stopped anywhere, go on, and end as those that never were.

Fails when a moment, of training, of labelling, of writing results or of cleaning up, leaves a run that cannot be gone
on with, or one that comes to other results; when the best so far is of a history that was left; or when one member
whose loss is not finite ends the others.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from paths import REPOSITORY
from toy_runs import (
    Ended,
    assert_one_line,
    checkpoints,
    checksums,
    finetune_arguments,
    make_stores,
    make_task,
    metrics,
    run_here,
)
from toy_stops import Killed, Moments, prepare, raise_killed

from jaxlm.finetuning import trial
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training import loss_scale

pytestmark = pytest.mark.usefixtures("two_devices")
SIZES = (
    "--model.num-layers 1 --model.width 16 --model.num-heads 2 --model.feed-forward-width 32 --model.num-positions 32"
)
SHAPES = {"alone": (), "together": ("--members-per-group", 2)}


CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The folder of compiled programs."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        prepare(patch, directory)
        yield directory
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))[0]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"), train=24, dev=5, test=3)


class Tune:
    """The command for a run below `directory`; `said` of its last start."""

    def __init__(self, directory: Path, store: Path, task: Path) -> None:
        self.directory, self.store, self.task = directory, store, task

    def arguments(self, run: Path, *more) -> list:
        """Two seeds of 6 steps, evaluated each 2, saved each 3."""
        start = ("--tokenizer", f"store:{self.store}", *SIZES.split(), "--seeds", 2, "--eval-every", 2)
        return finetune_arguments(run, self.task, *start, *more)

    def __call__(self, name: str, *more) -> Ended:
        """A start to its end."""
        return run_here("finetune", *self.arguments(self.directory / name, *more))

    def stopped(self, name: str, at: int | tuple[str, int], *more) -> str | None:
        """A start up to its moment `at`; what that was, None where it ended before."""
        with Moments(at, raise_killed).watched() as moments:
            try:
                ended = self(name, *more)
            except Killed:
                return moments.names[-1]
        assert ended.code == 0, ended.errors
        return None


@pytest.fixture
def tune(tmp_path, store, task):
    return Tune(tmp_path, store, task)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, store, task):
    """A run that was never stopped, by its shape and `select`."""
    made: dict[tuple, Path] = {}
    command = Tune(tmp_path_factory.mktemp("whole"), store, task)

    def find(shape: str, select: str, *more) -> Path:
        if (shape, select, *more) not in made:
            name = f"{shape}-{select}-{len(made)}"
            ended = command(name, "--select", select, *SHAPES[shape], *more)
            assert ended.code == 0, ended.errors
            made[shape, select, *more] = command.directory / name
        return made[shape, select, *more]

    return find


def results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


def assert_same(run: Path, other: Path, history: object) -> None:
    for name in ("results.json", "predictions.jsonl", "task.json"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), (name, history)
    for seed in (0, 1):
        for name in ("loss", "gradient_norm", "dev_accuracy"):
            assert metrics(run, name, seed=seed) == metrics(other, name, seed=seed), (name, history)
    assert checkpoints(run) == checkpoints(other) and checksums(run) == checksums(other), history
    assert not (run / "members").exists(), history


@pytest.mark.parametrize("select", ["best", "last"])
def test_a_group_stopped_while_its_results_are_written_is_finished_by_the_next_start(tune, whole, select):
    """Fails on 2968321 with `last`: a traceback at every further start, as nothing was kept to label with."""
    more = ("--select", select, *SHAPES["together"])
    assert tune.stopped("run", ("writing predictions.jsonl", 2), *more) is not None
    assert len(list(tune.directory.glob("run/members/*/result.json"))) == 1
    ended = tune("run", *more)
    assert ended.code == 0 and "resumed at step 6" in ended.errors, ended.errors
    assert_same(tune.directory / "run", whole("together", select), select)


def dev_accuracy(monkeypatch, figures: dict[int, float]) -> None:
    """Make the accuracy that selects that of the step, whatever the parameters are."""
    original = trial.TrialContext.replaces

    def replaces(context, step, found, before):
        found["accuracy"] = figures[step]
        return original(context, step, found, before)

    monkeypatch.setattr(trial.TrialContext, "replaces", replaces)


def test_the_best_is_of_the_history_that_goes_on(tune, monkeypatch):
    """Checkpoint 3, the best at 5, a stop, then another --eval-every: 4 is the best of 1, 2, 3 and 4, 6.

    Fails on 2968321: the checkpoint of step 4 was refused, as the kept one of step 5 was there, at every start.
    """
    dev_accuracy(monkeypatch, {1: 0.1, 2: 0.4, 3: 0.2, 4: 0.5, 5: 0.9, 6: 0.3})
    one = ("--seeds", 1)
    assert tune.stopped("run", ("a step", 6), *one, "--eval-every", 1) == "a step"
    assert list(metrics(tune.directory / "run", "dev_accuracy")) == [1, 2, 3, 4, 5]
    ended = tune("run", *one, "--eval-every", 2)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert list(metrics(tune.directory / "run", "dev_accuracy")) == [1, 2, 3, 4, 6]
    assert results(tune.directory / "run")["runs"][0]["step"] == 4 == checkpoints(tune.directory / "run")[0]


def test_an_older_best_outlives_a_newer_one_that_was_left(tune, monkeypatch):
    """The best at 2, a checkpoint at 3, a better one at 4, a stop; gone on with every 6 steps, 2 is the best again.

    Fails on 2968321: the parameters of step 2 were removed when those of step 4 were kept.
    """
    dev_accuracy(monkeypatch, {2: 0.4, 4: 0.9, 6: 0.3})
    assert tune.stopped("run", ("a step", 5), "--seeds", 1) == "a step"
    assert max(metrics(tune.directory / "run", "dev_accuracy")) == 4
    ended = tune("run", "--seeds", 1, "--eval-every", 6)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert results(tune.directory / "run")["runs"][0]["step"] == 2 == checkpoints(tune.directory / "run")[0]


def test_training_states_of_every_multiple_stay_while_a_member_is_worked_on(tune):
    """Fails on 2968321: keep_every was accepted and used nowhere in a fine-tuning."""
    assert tune.stopped("run", ("a step", 6), "--seeds", 1, "--checkpoint-every", 1, "--keep-every", 2) == "a step"
    states = Checkpoints(tune.directory / "run" / "members" / "seed-0-rate-0.003" / "checkpoints", read_only=True)
    assert states.steps() == [2, 4, 5]


DIVERGES = ("--seeds", 1, "--learning-rates", 3e-3, 1e30)


@pytest.mark.parametrize("shape", ["alone", pytest.param("together", marks=pytest.mark.slow)])
def test_a_member_that_diverges_does_not_end_the_others(tune, shape):
    """Fails on 2968321: the first loss that is not finite ended the command, and the same one met it again."""
    more = (*DIVERGES[:2], "--learning-rates", 1e30, 3e-3, *SHAPES[shape])  # the one that fails comes first
    ended = tune("run", *more)
    assert ended.code == 1
    line = ended.errors.splitlines()[-1]
    for said in ("failed: ", "1 of 2 runs failed", "seed 0 at learning rate 1e+30", "not finite in step 2 (train rows"):
        assert said in line, line
    assert "accuracy" in ended.output
    found = results(tune.directory / "run")
    failed, finished = found["runs"]
    assert failed.keys() == {"seed", "learning_rate", "failed"} and failed["failed"].startswith("the loss or the")
    assert found["learning_rate"] == found["best"]["learning_rate"] == 3e-3
    assert tune("other", "--seeds", 1).code == 0
    wanted = results(tune.directory / "other")["runs"][0]
    assert finished == wanted if shape == "alone" else finished["dev"]["loss"] == pytest.approx(wanted["dev"]["loss"])
    lines = (tune.directory / "run" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 5 + 3 and all(json.loads(text)["learning_rate"] == 3e-3 for text in lines)
    shown = run_here("show", tune.directory / "run")
    assert "results: 2 runs" in shown.output and "failed: seed 0 at learning rate 1e+30: the loss or" in shown.output
    before = (tune.directory / "run" / "results.json").read_bytes(), metrics(tune.directory / "run", peak_lr=3e-3)
    again = tune("run", *more)
    assert_one_line(again, 1, "seed 0 at learning rate 1e+30")
    assert before == (
        (tune.directory / "run" / "results.json").read_bytes(),
        metrics(tune.directory / "run", peak_lr=3e-3),
    )
    assert not (tune.directory / "run" / "members").exists()


@pytest.mark.slow
def test_a_member_that_diverged_is_not_trained_again_after_a_stop(tune):
    """Its checkpoint knows it in a group, its result.json alone; where no other is left the command says so at once."""
    for shape in SHAPES:
        more = (*DIVERGES, *SHAPES[shape])
        tune(f"whole-{shape}", *more)
        assert tune.stopped(shape, ("labelling", 3), *more) == "labelling"
        ended = tune(shape, *more)
        assert ended.code == 1 and "1 of 2 runs failed" in ended.errors, ended.errors
        for name in ("results.json", "predictions.jsonl"):
            first, second = ((tune.directory / run / name).read_bytes() for run in (shape, f"whole-{shape}"))
            assert first == second, (shape, name)
        none = ("--seeds", 1, "--learning-rates", 1e30, 1e31, *SHAPES[shape])
        for _ in range(2):
            ended = tune(f"none-{shape}", *none)
            assert ended.code == 1 and "2 of 2 runs failed, none succeeded" in ended.errors.splitlines()[-1]
        assert len(ended.errors.splitlines()) == 1, ended.errors
        assert not (tune.directory / f"none-{shape}" / "results.json").exists()


def test_a_single_run_that_diverges_is_saved_before_it(tune):
    ended = tune("run", "--seeds", 1, "--optimizer.peak-lr", 1e30)
    assert ended.code == 1 and "the state before it, of step 1, is saved" in ended.errors, ended.errors
    assert not (tune.directory / "run" / "results.json").exists()


def stop_again_and_again(tune: Tune, name: str, rng: random.Random, most: int, *more, start=None) -> list[str]:
    """Stop a run at random moments up to `most` times, then let it end; the moments."""
    history = []
    for _ in range(most):
        met = (start or tune.stopped)(name, rng.randint(1, 24), *more)
        if met is None:
            break
        history.append(met)
    ended = tune(name, *more)
    assert ended.code == 0, (history, ended.errors)
    return history


@pytest.mark.parametrize(
    ("shape", "select"),
    [
        ("alone", "best"),
        pytest.param("together", "last", marks=pytest.mark.slow),
        pytest.param("together", "best", marks=pytest.mark.campaign),
        pytest.param("alone", "last", marks=pytest.mark.campaign),
    ],
)
def test_stopped_anywhere_or_not_the_results_are_the_same(tune, whole, shape, select):
    """In this process, so many moments; by turns the seed of the moments is said by the assertions."""
    seed = random.randrange(10**6)
    history = stop_again_and_again(tune, "run", random.Random(seed), 5, "--select", select, *SHAPES[shape])
    assert_same(tune.directory / "run", whole(shape, select), (seed, history))


PATIENCE = ("--eval-every", 1, "--patience", 1)


def ends(dev: dict[int, float]) -> tuple[int, int | None]:
    """The best step, and the first one whose evaluation is not better than all before, from metrics.jsonl."""
    best = -1.0
    for step in sorted(dev):
        if dev[step] <= best:
            return max(dev, key=dev.get), step
        best = dev[step]
    return max(dev, key=dev.get), None


@pytest.mark.parametrize(
    ("shape", "select"),
    [
        ("alone", "best"),
        ("together", "last"),
        pytest.param("together", "best", marks=pytest.mark.campaign),
        pytest.param("alone", "last", marks=pytest.mark.campaign),
    ],
)
def test_patience_ends_a_run_at_the_same_step_whatever_stopped_it(tune, whole, shape, select):
    """Fails when a start counts from 0 again, a trial goes on after its end, or other parameters are kept."""
    other, seed = whole(shape, select, *PATIENCE), random.randrange(10**6)
    more = ("--select", select, *SHAPES[shape], *PATIENCE)
    history = stop_again_and_again(tune, "run", random.Random(seed), 3, *more)
    assert_same(tune.directory / "run", other, (seed, history))
    for found in results(other)["runs"]:
        dev = metrics(other, "dev_accuracy", seed=found["seed"])
        best, last = ends(dev)
        assert found["stopped_at"] == last and max(dev) == (last or 6)
        assert max(metrics(other, "loss", seed=found["seed"])) == (last or 6)
        assert found["step"] == (best if select == "best" else last or 6)
        assert found["dev"]["accuracy"] == dev[found["step"]]
    assert any(found["stopped_at"] for found in results(other)["runs"])


@pytest.mark.parametrize("shape", ["alone", pytest.param("together", marks=pytest.mark.slow)])
def test_a_run_that_does_not_learn_ends_early_and_the_other_is_selected_by_its_loss(tune, shape):
    """At the rate 1e-30 the loss on dev stays; fails when a higher loss is better, or a rate is not in the table."""
    more = ("--seeds", 1, "--learning-rates", 3e-2, 1e-30, "--eval-every", 1, "--select-by", "loss", "--patience", 2)
    ended = tune("run", *more, *SHAPES[shape])
    assert ended.code == 0, ended.errors
    found = results(tune.directory / "run")
    still = found["runs"][1]
    assert (still["step"], still["stopped_at"]) == (1, 3) and max(metrics(tune.directory / "run", peak_lr=1e-30)) == 3
    assert found["metric"] == "loss" and found["runs"][0]["dev"]["loss"] < still["dev"]["loss"]
    assert found["learning_rate"] == found["best"]["learning_rate"] == 3e-2
    assert "training ends early" in ended.errors and "after 2 evaluations without a dev loss better" in ended.errors
    rows = [line for line in ended.output.splitlines() if line.startswith(("  0.03 ", "  1e-30 "))]
    assert [row.endswith("(selected)") for row in rows] == [True, False] and "±" not in ended.output
    refused = tune("run", *more[:-1], 3, *SHAPES[shape])
    assert_one_line(refused, 2, "patience: 2 -> 3")


ENDING = (
    "labelling",
    "a save",
    "writing predictions.jsonl",
    "in writing predictions.jsonl",
    "JSON",
    "removing members",
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_any_moment_of_the_end_may_be_the_last(tune, whole, shape):
    """Three of the moments between the last step and the end of the clean-up, others each time."""
    with Moments(None, raise_killed).watched() as moments:
        assert tune("counted", *SHAPES[shape]).code == 0
    last = len(moments.names) - moments.names[::-1].index("a step")
    assert {name for name in ENDING if name in moments.names[last:]} == set(ENDING)
    for at in random.sample(range(last + 1, len(moments.names) + 1), 3):
        assert tune.stopped(f"run-{at}", at, *SHAPES[shape]) == moments.names[at - 1]
        ended = tune(f"run-{at}", *SHAPES[shape])
        assert ended.code == 0, (moments.names[at - 1], ended.errors)
        assert_same(tune.directory / f"run-{at}", whole(shape, "best"), moments.names[at - 1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_evaluations_at_other_steps_after_each_stop(tune, shape):
    """Whatever was evaluated, the best is the first of the best in metrics.jsonl, and its parameters are kept."""
    seed = random.randrange(10**6)
    rng, history = random.Random(seed), []
    for _ in range(6):
        more = (*SHAPES[shape], "--eval-every", rng.choice([1, 2, 3, 4]))
        history.append((tune.stopped("run", rng.randint(1, 30), *more), more[-1]))
    run = tune.directory / "run"
    ended = tune("run", *SHAPES[shape])
    assert ended.code == 0, (seed, history, ended.errors)
    for found in results(run)["runs"]:
        dev = metrics(run, "dev_accuracy", seed=found["seed"])
        assert found["step"] == max(dev, key=dev.get) and 6 in dev, (seed, history)
        assert found["dev"]["accuracy"] == dev[found["step"]], (seed, history)
    assert checkpoints(run) == [results(run)["best"]["step"]] and not (run / "members").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "select", "options", "most"),
    [
        ("alone", "best", PATIENCE, 2),
        ("together", "last", (), 2),
        pytest.param("alone", "best", (), 5, marks=pytest.mark.campaign),
        pytest.param("alone", "best", PATIENCE, 5, marks=pytest.mark.campaign),
        pytest.param("together", "last", (), 5, marks=pytest.mark.campaign),
    ],
)
def test_killed_anywhere_or_not_the_results_are_the_same(tune, whole, cache, shape, select, options, most):
    """As above with processes that die: nothing is finished on the way out, no save is waited for."""
    seed = random.randrange(10**6)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'fixtures'}"}

    def killed(name: str, at: int, *more) -> str | None:
        words = [str(at), str(cache), *map(str, tune.arguments(tune.directory / name, *more))]
        program = [sys.executable, str(REPOSITORY / "tests" / "fixtures" / "toy_stops.py"), *words]
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode in (0, 137), ended.stderr
        return str(at) if ended.returncode else None

    more = ("--select", select, *SHAPES[shape], *options)
    history = stop_again_and_again(tune, "run", random.Random(seed), most, *more, start=killed)
    assert_same(tune.directory / "run", whole(shape, select, *options), (seed, history))


FROZEN = ("--freeze-layers", 1, "--freeze-embeddings", "--optimizer.layer-decay", 1.5)
SKIPS = ("--spike-factor", 1.02, "--on-spike", "skip")


@pytest.mark.parametrize(
    ("shape", "more", "steps", "saves"),
    [("alone", FROZEN, 6, 3), ("together", (*SKIPS, "--num-epochs", 7, "--checkpoint-every", 15), 21, 15)],
)
def test_averages_and_skipped_updates_outlive_a_stop(tune, shape, more, steps, saves):
    """Fails when a restored average or norm differs in a bit; when raw parameters are selected or kept; when frozen
    layers have moments; or when a trial skips an update for another's norm.
    """
    more = ("--ema", 0.6, "--select", "last", *SHAPES[shape], *more)
    assert tune("whole", *more).code == 0
    assert tune.stopped("run", ("a step", steps - 1), *more) == "a step"
    run, whole = tune.directory / "run", tune.directory / "whole"
    saved = Checkpoints(next((run / "members").glob("*/checkpoints")), read_only=True).metadata()
    assert saved.weights == "average" and saved.step == saves
    assert shape == "together" or not any("opt_state" in name and "block" in name for name in saved.checksums)
    ended = tune("run", *more)
    assert ended.code == 0 and f"resumed at step {saves}" in ended.errors, ended.errors
    assert_same(run, whole, shape)
    spikes = {seed: metrics(run, "spike", seed=seed) for seed in (0, 1)}
    for seed, found in spikes.items():
        assert found == metrics(whole, "spike", seed=seed)
        raw, mean = (metrics(run, name, seed=seed) for name in ("raw_dev_accuracy", "dev_accuracy"))
        assert raw.keys() == mean.keys() and raw != mean and raw == metrics(whole, "raw_dev_accuracy", seed=seed)
        norms = list(metrics(run, "gradient_norm", seed=seed).values())
        for step, spike in found.items():
            assert spike["skipped"] and spike["rows"].startswith("train rows [")
            assert norms[step - 1] == spike["gradient_norm"] > 1.02 * spike["median"]
            assert spike["median"] == pytest.approx(float(np.median(norms[: step - 1])), rel=1e-6)
    assert shape == "alone" or spikes[0].keys() != spikes[1].keys()


@pytest.mark.parametrize("shape", ["alone", "together"])
def test_each_trial_has_its_own_loss_scale_that_outlives_a_stop(tune, monkeypatch, shape):
    """Fails when the overflow of a trial halves the scale of another, a restored scale is another one, or a group
    without scales in its checkpoint cannot go on in float16.
    """
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**18)
    rates = ("--seeds", 1, "--learning-rates", 3e-3, 3.0, *SHAPES[shape])
    more = (*rates, "--execution.dtype", "float16")
    assert tune("whole", *more).code == 0
    assert tune.stopped("run", ("a step", 5), *more) == "a step"
    ended = tune("run", *more)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    whole, run = tune.directory / "whole", tune.directory / "run"
    for name in ("results.json", "predictions.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert checksums(run) == checksums(whole)
    scales = [metrics(run, "loss_scale", peak_lr=rate) for rate in (3e-3, 3.0)]
    assert scales == [metrics(whole, "loss_scale", peak_lr=rate) for rate in (3e-3, 3.0)]
    assert scales[0] != scales[1] and all(len(found) == 6 for found in scales), scales
    assert tune.stopped("other", ("a step", 5), *rates) == "a step"
    ended = tune("other", *more)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert metrics(tune.directory / "other", "loss_scale", peak_lr=3e-3)[4] == 2.0**18


@pytest.mark.parametrize("shape", ["alone", "together"])
def test_each_trial_halves_its_own_rate_and_goes_on_so_after_a_stop(tune, shape):
    """Fails when the losses of evaluations or the factor are lost in a stop, belong to another trial, or the rate is
    halved in the step before. The rates are compared with onmt/Optim.py's rule on the losses of the log.
    """
    rate = 0.05
    more = ("--optimizer.decay", "halved_by_validation", "--optimizer.warmup", 0, "--optimizer.peak-lr", rate)
    more = (*more, "--eval-every", 1, "--checkpoint-every", 3, *SHAPES[shape])
    assert tune("whole", *more).code == 0
    assert tune.stopped("run", ("a step", 5), *more) == "a step"
    ended = tune("run", *more)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    run, halvings = tune.directory / "run", []
    assert_same(run, tune.directory / "whole", shape)
    for seed in (0, 1):
        losses = metrics(run, "dev_loss", seed=seed)
        rises = [losses[step] > losses[step - 1] for step in range(2, 6)]
        wanted = [rate, rate, *(rate * 0.5 ** sum(rises[: n + 1]) for n in range(4))]
        np.testing.assert_allclose(list(metrics(run, "learning_rate", seed=seed).values()), wanted, rtol=1e-6)
        halvings.append(rises)
    assert any(any(rises[:2]) for rises in halvings) and any(any(rises[2:]) for rises in halvings), halvings
    refused = tune("run", *more, "--eval-every", 2)
    assert refused.code == 2 and "--eval-every: 1 -> 2" in refused.errors
