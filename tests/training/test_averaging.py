"""The moving average of the parameters: a NumPy loop, resuming to the bit, and who uses it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_linear
from toy import assert_trees_same
from toy_runs import checkpoints, checksums, copy_at, make_stores, metrics, pretrain_arguments, run_here

import jaxlm
from jaxlm.inference.loaded_run import load_run
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training.initialization import continue_state
from jaxlm.training.start import open_source
from jaxlm.training.step import TrainState, saved_part, settings_of
from jaxlm.training.weights import decay_at, first_average, no_iterates, updated_average, with_loss

pytestmark = pytest.mark.usefixtures("two_devices")

AVERAGED = ("--ema", 0.8, "--optimizer.decay", "constant", "--checkpoint-every", 5, "--eval-every", 5)


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_the_average_is_that_of_a_numpy_loop(decay):
    """Fails when the decay of an update is that of another, or the average sees the parameters before it."""
    step, optimizer = toy_linear.regression()
    state, plain = toy_linear.start(optimizer, averages=True), toy_linear.start(optimizer)
    settings = settings_of(toy_linear.RUN, 30, ema=decay)
    w = toy_linear.START["backbone"]["w"].astype(np.float64)
    average = w.copy()
    for t, batch in enumerate(toy_linear.rows(30), start=1):
        state, _ = step(state, batch, settings)
        plain, _ = step(plain, batch, settings)
        w = w - toy_linear.RATE * toy_linear.gradient(w, batch)
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * w
        np.testing.assert_allclose(state.average["backbone"]["w"], average, rtol=2e-5, atol=1e-6)
    assert_trees_same(state.params, plain.params)  # training itself does not see the average
    assert state.weights is state.average and plain.weights is plain.params
    assert set(saved_part(plain)) == {"step", "params", "opt_state"} == set(saved_part(state)) - {"average"}
    assert float(decay_at(0.999, 10**6)) == np.float32(0.999)


def test_the_average_before_each_update_is_that_of_a_numpy_loop():
    """Fails when it takes in the parameters after the update, or its decay is smaller in the first updates."""
    step, optimizer = toy_linear.regression(average_of="before")
    state, settings = toy_linear.start(optimizer, averages=True), settings_of(toy_linear.RUN, 12, ema=0.9)
    w = average = toy_linear.START["backbone"]["w"].astype(np.float64)
    for batch in toy_linear.rows(12):
        state, _ = step(state, batch, settings)
        average = 0.9 * average + 0.1 * w
        w = w - toy_linear.RATE * toy_linear.gradient(w, batch)
        np.testing.assert_allclose(state.average["backbone"]["w"], average, rtol=2e-5, atol=1e-6)


def test_a_step_that_is_not_finite_keeps_the_average():
    """Fails when the average moves on in a step that changes nothing else."""
    step, optimizer = toy_linear.regression()
    settings, (batch,) = settings_of(toy_linear.RUN, 9, ema=0.9), toy_linear.rows(1)
    state, _ = step(toy_linear.start(optimizer, averages=True), batch, settings)
    halted, _ = step(state, np.full_like(batch, np.inf), settings)
    assert bool(halted.halted)
    assert_trees_same(halted.average, state.average)


def test_a_parameter_that_stays_has_its_own_bits_in_the_average():
    """Fails when a frozen parameter, or the sign of its zeros, is rounded away."""
    params = {"w": jnp.asarray([-0.0, 0.0, 0.1, -3.7, 1e30], jnp.float32)}
    average = first_average(params)
    move = jax.jit(updated_average)
    for t in range(1, 20):
        average = move(average, params, t, 0.77)
    assert_trees_same(average, params)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, stores):
    """Ten steps with an average, checkpoints 5 and 10."""
    run = tmp_path_factory.mktemp("averaged") / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *AVERAGED, "--num-steps", 10))
    assert ended.code == 0 and "without averaging" in ended.errors, ended.errors
    return run


def restored(run, step=None):
    found = Checkpoints(run / "checkpoints", read_only=True)
    return found.restore(found.metadata(step).tree, step=step).state


def test_a_resumed_average_has_the_same_bits(run, stores, tmp_path):
    """Fails when the average begins anew, or is decayed as in an early step, after a restart."""
    copy = copy_at(run, 5, tmp_path / "run")
    ended = run_here("pretrain", *pretrain_arguments(copy, stores, *AVERAGED, "--num-steps", 10))
    assert ended.code == 0 and "resumed at step 5" in ended.errors, ended.errors
    assert checksums(copy) == checksums(run) and any(name.startswith("average/") for name in checksums(run))
    for name in ("loss", "validation_loss", "raw_validation_loss"):
        assert metrics(copy, name) == metrics(run, name)
    ended = run_here("pretrain", *pretrain_arguments(copy, stores, *AVERAGED, "--ema", 0.7, "--num-steps", 10))
    assert ended.code == 2 and "ema: 0.8 -> 0.7" in ended.errors, ended.errors


def test_the_average_is_evaluated_and_used(run, stores):
    """Fails when validation, another command or a start reads the raw parameters."""
    state = restored(run)
    assert all((a != p).any() for a, p in zip(*map(jax.tree.leaves, (state["average"], state["params"])), strict=True))
    assert_trees_same(load_run(run).params, state["average"])
    source = open_source(f"{run}")
    assert_trees_same(source.open_parameters().load(source.saved)[0], state["average"])
    losses, raw = metrics(run, "validation_loss"), metrics(run, "raw_validation_loss")
    assert list(losses) == list(raw) == [0, 5, 10] and losses[0] == raw[0] and losses[10] != raw[10]
    ended = run_here("evaluate", "perplexity", "--run", run, "--data.store", stores[1])
    found = json.loads(ended.output.splitlines()[-1])
    assert found["perplexity"] == pytest.approx(metrics(run, "perplexity")[10], rel=1e-5)


def test_the_parameters_beside_an_average_can_be_used(run, stores):
    """Fails when `--weights raw` reads the average, or is not named in the results."""
    assert_trees_same(load_run(run, weights="raw").params, restored(run)["params"])
    words = ["evaluate", "perplexity", "--run", run, "--data.store", stores[1], "--weights", "raw"]
    found = json.loads(run_here(*words).output.splitlines()[-1])
    assert found["validation_loss"] == pytest.approx(metrics(run, "raw_validation_loss")[10], rel=1e-5)
    assert found["run"] == f"{run}@10 (raw)" == jaxlm.load(run, weights="raw").name
    assert jaxlm.load(run).name == f"{run}@10"


def test_the_state_of_a_run_with_or_without_an_average_can_be_continued(run, stores, tmp_path):
    """Fails when an old run cannot go on with an average, or a new one not without, or a part is not restored."""
    source, saved = open_source(f"{run}@5"), restored(run, 5)
    tree = Checkpoints(run / "checkpoints", read_only=True).metadata(5).tree
    scalars = {"seed": jax.ShapeDtypeStruct((), jnp.uint32), "halted": jax.ShapeDtypeStruct((), jnp.bool_)}
    without, notes = continue_state(source, TrainState(**tree | {"average": None}, **scalars), 3)
    assert without.average is None and int(without.step) == 5 and int(without.seed) == 3 and not notes
    assert_trees_same(without.params, saved["params"])
    kept, notes = continue_state(source, TrainState(**tree, **scalars), 3)
    assert_trees_same(kept.average, saved["average"])
    bare = copy_at(run, 5, tmp_path / "bare")
    found = Checkpoints(bare / "checkpoints")
    state = saved | {}
    del state["average"]
    found.save(6, state, config=found.metadata(5).config)
    found.close()
    begun, notes = continue_state(open_source(f"{bare}@6"), TrainState(**tree, **scalars), 3)
    assert_trees_same(begun.average, saved["params"])
    assert checkpoints(bare) == [5, 6] and notes == [f"{bare}@6 has no average to continue: new from here on"]


def test_the_mean_of_iterates_begins_by_the_rule_of_the_original():
    """Fails when the newest losses take part in the comparison, or a loss is recorded before it is compared."""
    rng = np.random.default_rng(0)
    record = jax.jit(with_loss)
    for interval in (1, 3, 5):
        for _ in range(20):
            iterates, history, begun = no_iterates(interval, from_start=False), [], False
            for loss in (5 - 0.2 * np.arange(12) + rng.normal(size=12)).astype(np.float32):
                # awd-lstm-lm, main.py:275-283, in its own terms
                begun = begun or (len(history) > interval and loss > min(history[:-interval]))
                history.append(loss)
                iterates = record(iterates, loss)
                assert (int(iterates.averaged) == 0) == begun


@pytest.mark.parametrize("begin", [0, 4])
def test_the_mean_of_iterates_is_that_of_numpy(begin):
    """Fails when an iterate is left out, counted twice, or averaged before the mean begins."""
    step, optimizer = toy_linear.regression()
    iterates = functools.partial(no_iterates, 5, from_start=begin == 0)
    state = toy_linear.start(optimizer, averages=True, iterates=iterates)
    settings, seen = settings_of(toy_linear.RUN, 12), []
    for number, batch in enumerate(toy_linear.rows(12)):
        if number == begin:
            state = state.replace(iterates=state.iterates._replace(averaged=jnp.int32(0)))
        state, _ = step(state, batch, settings)
        if number < begin:
            assert_trees_same(state.average, state.params)
            continue
        seen.append(np.asarray(state.params["backbone"]["w"], np.float64))
        np.testing.assert_allclose(state.average["backbone"]["w"], np.mean(seen, axis=0), rtol=1e-5)
        assert int(state.iterates.averaged) == len(seen)
    kept = state.average
    halted, _ = step(state, np.full_like(batch, np.inf), settings)
    assert_trees_same(halted.average, kept)
    assert int(halted.iterates.averaged) == len(seen)
