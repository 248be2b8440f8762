"""AWD-LSTM against torch.nn.LSTM with the same masks: states, gradient, and ten updates over varied windows.

The frozen twin (tests/golden/awd_lstm_parity.npz, written by tests/parity/freeze_awd_lstm.py in float64) runs
everywhere; with the extra [parity] the same is computed live on random sizes. A mask at another place or on the output
table, a regularization of other states, a state taken from padding, a rate that is not scaled by the window fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from parity import awd_lstm_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import Batch
from jaxlm.data.config import LONGER
from jaxlm.models import build
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.models.awd_lstm import model as awd_lstm
from jaxlm.models.awd_lstm.model import empty_state
from jaxlm.models.model import Model
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import (
    activation_regularization,
    language_model,
    temporal_activation_regularization,
    with_rate_of_length,
)
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of
from jaxlm.training.weights import no_iterates

PARTS = ["plain", "dropped", "steps"]


def inputs(sizes: case.Sizes, seed: int) -> tuple:
    """Return the parameters, masks and windows of a case."""
    return case.make_tree(sizes, seed), case.make_masks(sizes, seed + 1), case.make_windows(sizes, seed + 2)


@pytest.mark.parametrize("part", PARTS)
def test_frozen_twin(part, monkeypatch):
    check(part, case.Sizes(), *inputs(case.Sizes(), seed=1), frozen("awd_lstm"), monkeypatch)


@pytest.mark.parity
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(4))
def test_pytorch_live_at_random_sizes(seed, part, monkeypatch):
    pytest.importorskip("torch", reason=WHY)
    from parity import awd_lstm_torch

    rng = np.random.default_rng(seed)
    limits = [(1, 5), (1, 20), (1, 20), (2, 50), (1, 5), (2, 9)]
    sizes = case.Sizes(*(int(rng.integers(low, high)) for low, high in limits))
    given = inputs(sizes, 10 * seed)
    check(part, sizes, *given, awd_lstm_torch.answers(sizes, *given), monkeypatch)


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import awd_lstm_torch

    assert_frozen("awd_lstm", awd_lstm_torch.answers(case.Sizes(), *inputs(case.Sizes(), seed=1)))


def model_of(sizes: case.Sizes) -> Model:
    config = AWDLSTMConfig(
        vocab_size=sizes.vocab_size, num_layers=sizes.num_layers, width=sizes.width, units=sizes.units
    )
    return build(config, Execution(dtype="float32"))


def objective_of(model: Model, sizes: case.Sizes):
    further = [activation_regularization(case.ALPHA), temporal_activation_regularization(case.BETA)]
    return with_rate_of_length(language_model(model, further=further), sizes.length)


def batch_of(window: np.ndarray, sizes: case.Sizes, *, begins: bool) -> Batch:
    """Return a window padded to the longest row."""
    rows, tokens = window.shape[0], window.shape[1] - 1
    padding = ((0, 0), (0, sizes.length + LONGER - tokens))
    ids, targets = (np.pad(part, padding, constant_values=1) for part in (window[:, :-1], window[:, 1:]))
    segments = np.pad(np.ones((rows, tokens), np.int32), padding)
    return Batch(ids, targets, np.zeros_like(ids), segments, segments.astype(np.float32), np.full(rows, begins))


def with_masks(monkeypatch, masks: list[np.ndarray]) -> None:
    """Make the model multiply by these masks where it draws its own, in their order, once per pass."""
    drawn = []

    def dropout(x, rate, key, *, shared_axes=(), of_rows=True):
        if key is None:  # the parameters' shapes are asked for
            return x
        mask = masks[len(drawn) % len(masks)]
        drawn.append(mask)
        shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(x.shape))
        assert mask.shape == shape and rate > 0
        return x * jnp.asarray(mask)

    monkeypatch.setattr(awd_lstm, "dropout", dropout)


def check(part: str, sizes: case.Sizes, tree: dict, masks: list, windows: list, expected: dict, monkeypatch) -> None:
    """Check one part of the answers, found by jaxlm in float32."""
    model, params = model_of(sizes), {"backbone": tree}
    key = None
    if part != "plain":
        with_masks(monkeypatch, masks)
        key = jax.random.key(0)
    if part == "steps":
        check_steps(model, sizes, params, windows, expected["steps"])
        return
    objective, empty = objective_of(model, sizes), empty_state(model.config, sizes.rows)
    first, second = (batch_of(window, sizes, begins=not number) for number, window in enumerate(windows[:2]))
    weights = objective.weights(second)

    def loss(params):
        carry = objective.sums(params, first, empty, key)[1]
        sums, _ = objective.sums(params, second, jax.lax.stop_gradient(carry), key)
        means = {name: sums[name] / weights[name] for name in objective.coefficients}
        return sum(objective.coefficients[name] * mean for name, mean in means.items()), means

    (total, means), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(total, expected[part]["loss"], rtol=1e-5)
    np.testing.assert_allclose(means["nll"], expected[part]["nll"], rtol=1e-5)
    found = case.to_flat(gradient["backbone"])
    for name, wanted in expected[f"{part}_gradient"].items():
        size = max(np.abs(wanted).max(), 1e-3)
        assert np.abs(found[name] - wanted).max() < 1e-4 * size, name


def check_steps(model: Model, sizes: case.Sizes, params: dict, windows: list, expected: dict[str, np.ndarray]) -> None:
    """Updates of SGD over varied windows; the iterates are averaged from step BEGIN on."""
    config = OptimizerConfig(
        kind="sgd",
        peak_lr=case.RATE,
        warmup=0,
        decay="constant",
        weight_decay=case.WEIGHT_DECAY,
        clip_norm=case.CLIP_NORM,
    )
    boxed = jax.eval_shape(lambda: {"backbone": model.init(jax.random.key(0))})
    optimizer, settings = make_optimizer(config, boxed), settings_of(config, case.NUM_STEPS)
    step = jax.jit(make_train_step(objective_of(model, sizes), optimizer))
    state = new_state(
        params,
        optimizer,
        0,
        empty_state(model.config, sizes.rows),
        averages=True,
        iterates=lambda: no_iterates(5, from_start=False),
    )
    losses = []
    for number, window in enumerate(windows):
        if number == case.BEGIN:
            state = state.replace(iterates=state.iterates._replace(averaged=jnp.int32(0)))
        state, metrics = step(state, batch_of(window, sizes, begins=number == 0), settings)
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(
            metrics["learning_rate"], case.RATE * (window.shape[1] - 1) / sizes.length, rtol=1e-6
        )
        if number < case.BEGIN:
            jax.tree.map(np.testing.assert_array_equal, state.average, state.params)
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4)
    assert int(state.iterates.averaged) == case.NUM_STEPS - case.BEGIN
    before = case.to_flat(params["backbone"])
    for prefix, tree in (("", state.params), ("mean/", state.average)):
        found = case.to_flat(nn.unbox(tree)["backbone"])
        for name in found:
            moved = np.abs(expected[prefix + name] - before[name]).max()
            difference = np.abs(found[name] - expected[prefix + name]).max()
            assert difference < 1e-4 * moved + 1e-6, f"{prefix}{name}: {difference:.3g} of a movement of {moved:.3g}"
