"""Pretraining that keeps the best parameters by validation loss, or ends early: a run without either tells which."""

import jax
import numpy as np
import pytest
from toy import assert_trees_same
from toy_runs import (
    assert_one_line,
    checkpoints,
    checksums,
    copy_at,
    make_stores,
    metrics,
    pretrain_arguments,
    run_here,
)

from jaxlm.inference.loaded_run import load_run
from jaxlm.runs.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("two_devices")

STEPS, EVERY, PATIENCE, MIDDLE = 14, 2, 2, 6
FLAGS = ("--num-steps", STEPS, "--eval-every", EVERY, "--checkpoint-every", EVERY, "--keep-newest", STEPS)
FLAGS += (
    "--optimizer.peak-lr",
    0.05,
    "--optimizer.warmup",
    1,
    "--optimizer.decay",
    "constant",
    "--ema",
    0.5,
    "--seed",
    5,
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


def of_two_layers(run, stores, *more):
    """A toy run of two layers: with one the validation loss does not rise again."""
    return ["debug/gpt", *pretrain_arguments(run, stores, *more)[1:]]


def pretrained(folder, stores, *more):
    ended = run_here("pretrain", *of_two_layers(folder / "run", stores, *FLAGS, *more))
    assert ended.code == 0, ended.errors
    return folder / "run", ended


@pytest.fixture(scope="module")
def last(tmp_path_factory, stores):
    """A run whose validation loss falls and rises again, with the parameters of every evaluation."""
    run, _ = pretrained(tmp_path_factory.mktemp("last"), stores)
    losses = metrics(run, "validation_loss")
    assert 0 < best_step(losses) < STEPS - EVERY * PATIENCE, losses
    return run


@pytest.fixture(scope="module")
def best(tmp_path_factory, stores):
    run, ended = pretrained(tmp_path_factory.mktemp("best"), stores, "--select", "best")
    chosen = best_step(metrics(run, "validation_loss"))
    assert f"step {STEPS}: other commands use the parameters of step {chosen}, whose" in ended.errors
    return run


def best_step(losses, until=STEPS):
    """The first step with the lowest loss."""
    return min((step for step in losses if step <= until), key=lambda step: np.float32(losses[step]))


def test_the_parameters_of_the_lowest_loss_are_used(last, best):
    """Fails when others are kept, also up to a step in between, or when the selection changes the training."""
    losses = metrics(last, "validation_loss")
    assert metrics(best, "validation_loss") == losses and metrics(best) == metrics(last)
    for step in (EVERY, MIDDLE, STEPS):
        chosen = best_step(losses, step)
        found = load_run(f"{best}@{step}").params
        assert_trees_same(found, load_run(f"{last}@{chosen}").params if chosen else found)
        saved = Checkpoints(best / "checkpoints", read_only=True)
        state = saved.restore(saved.metadata(step).tree, step=step).state
        assert int(state["selection"]["step"]) == chosen
        assert_trees_same(state["average"], load_run(f"{last}@{step}").params)
    before = np.concatenate([np.ravel(x) for x in jax.tree.leaves(load_run(last).params)])
    assert (before != np.concatenate([np.ravel(x) for x in jax.tree.leaves(load_run(best).params)])).any()


def test_a_resumed_selection_has_the_same_bits(best, stores, tmp_path):
    """Fails when the lowest loss, or its parameters, begin anew after a restart, or others decide after it."""
    copy = copy_at(best, MIDDLE, tmp_path / "run")
    ended = run_here("pretrain", *of_two_layers(copy, stores, *FLAGS, "--select", "best"))
    assert ended.code == 0 and f"resumed at step {MIDDLE}" in ended.errors, ended.errors
    assert checksums(copy) == checksums(best) and any(name.startswith("selected/") for name in checksums(best))
    other = of_two_layers(copy, (stores[0], stores[0]), *FLAGS, "--select", "best")
    assert_one_line(run_here("pretrain", *other), 2, "the validation stores hold another text")
    other = of_two_layers(copy, stores, *FLAGS, "--select", "best", "--eval-every", 3)
    assert_one_line(run_here("pretrain", *other), 2, "--eval-every: 2 -> 3")


def test_a_run_ends_when_the_loss_no_longer_falls(last, stores, tmp_path):
    """Fails when evaluations are counted wrongly, the end is not saved, or the complete run trains on."""
    losses = metrics(last, "validation_loss")
    ends = next(
        step
        for step in losses
        if sum(EVERY * k > best_step(losses, step) for k in range(1 + step // EVERY)) == PATIENCE
    )
    assert EVERY * PATIENCE < ends < STEPS
    run, ended = pretrained(tmp_path, stores, "--patience", PATIENCE)
    said = f"step {ends}: training ends early, after {PATIENCE} evaluations without a validation loss below "
    assert said in ended.errors and checkpoints(run)[-1] == ends
    assert_trees_same(load_run(run).params, load_run(f"{last}@{ends}").params)  # --select last
    again = run_here("pretrain", *of_two_layers(run, stores, *FLAGS, "--patience", PATIENCE))
    assert again.code == 0 and "is complete" in again.output, again.errors
    assert metrics(run) == {step: loss for step, loss in metrics(last).items() if step <= ends}


def test_another_run_selects_by_its_own_losses(best, stores, tmp_path):
    """Fails when --start-with state compares with losses of the start, or --start takes its last parameters."""
    flags = ("--select", "best", "--start", best, "--num-steps", STEPS + EVERY)
    state, _ = pretrained(tmp_path / "state", stores, *flags, "--start-with", "state")
    losses = metrics(state, "validation_loss")
    assert list(losses) == [STEPS + EVERY]
    saved = Checkpoints(state / "checkpoints", read_only=True)
    found = saved.restore(saved.metadata().tree).state
    assert int(found["selection"]["step"]) == STEPS + EVERY
    assert_trees_same(load_run(state).params, found["average"])
    fresh, _ = pretrained(tmp_path / "fresh", stores, "--start", best, "--num-steps", EVERY)
    at_best = metrics(best, "validation_loss")
    assert metrics(fresh, "validation_loss")[0] == pytest.approx(min(at_best.values()), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--select", "best", "--eval-every", 0), "--eval-every must be above 0 with select best, got 0; give"),
        (("--patience", 2, "--data.validation"), "--data.validation must be given with patience 2, got none; name"),
    ],
)
def test_a_selection_without_losses_is_refused(flags, said, stores, tmp_path):
    assert_one_line(run_here("pretrain", *of_two_layers(tmp_path / "run", stores, *flags)), 2, said)
    assert not (tmp_path / "run").exists()
