"""The LSTM language model against torch.nn.LSTM: states, gradient, and ten updates with a state carried over streams.

The frozen twin (tests/golden/lstm_parity.npz, written by tests/parity/freeze_lstm.py in float64) runs everywhere; with
the extra [parity] the same is computed live on random sizes. A wrong order of gates, a bias, a state that is not
carried or not detached, a kernel that is not decayed fails.
"""

import jax
import numpy as np
import pytest
from flax import linen as nn
from parity import lstm_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.lstm import LSTMConfig
from jaxlm.models.lstm.model import empty_state
from jaxlm.models.model import Inputs, Model
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

PARTS = ["forward", "gradient", "steps"]


@pytest.mark.parametrize("part", PARTS)
def test_frozen_twin(part):
    check(part, case.Sizes(), seed=1, expected=frozen("lstm"))


@pytest.mark.parity
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(5))
def test_pytorch_live_at_random_sizes(seed, part):
    pytest.importorskip("torch", reason=WHY)
    from parity import lstm_torch

    rng = np.random.default_rng(seed)
    sizes = case.Sizes(
        *(int(rng.integers(low, high)) for low, high in [(1, 4), (1, 20), (1, 20), (2, 50), (1, 5), (1, 9)])
    )
    tree, stretches = case.make_tree(sizes, seed), case.make_stretches(sizes, seed + 1)
    check(part, sizes, seed, lstm_torch.answers(sizes, tree, stretches))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import lstm_torch

    sizes = case.Sizes()
    assert_frozen("lstm", lstm_torch.answers(sizes, case.make_tree(sizes, seed=1), case.make_stretches(sizes, seed=2)))


def model_of(sizes: case.Sizes) -> Model:
    config = LSTMConfig(
        vocab_size=sizes.vocab_size,
        num_layers=sizes.num_layers,
        width=sizes.width,
        units=sizes.units,
        dropout_rate=0.0,
        embedding_dropout_rate=0.0,
    )
    return build(config, Execution(dtype="float32"))


def batch_of(stretch: np.ndarray, *, begins: bool) -> Batch:
    ids, targets = stretch[:, :-1], stretch[:, 1:]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    ones = np.ones(ids.shape, np.int32)
    return Batch(ids, targets, positions, ones, ones.astype(np.float32), np.full(len(ids), begins))


def check(part: str, sizes: case.Sizes, seed: int, expected: dict) -> None:
    """Check one part of the answers, found by jaxlm in float32."""
    tree, stretches = case.make_tree(sizes, seed), case.make_stretches(sizes, seed + 1)
    model, params = model_of(sizes), {"backbone": tree}
    objective = language_model(model)
    first, second = batch_of(stretches[0], begins=True), batch_of(stretches[1], begins=False)
    empty = empty_state(model.config, sizes.rows)
    if part == "steps":
        check_steps(model, params, stretches, expected["steps"])
        return
    _, carry = objective.sums(params, first, empty, None)
    if part == "forward":
        outputs = model(params, Inputs(second.ids, second.positions), carry)
        np.testing.assert_allclose(outputs.states, expected["forward"]["states"], rtol=1e-5, atol=1e-5)
        loss = objective.sums(params, second, carry, None)[0]["nll"] / second.weights.sum()
        np.testing.assert_allclose(loss, expected["forward"]["loss"], rtol=1e-6)
        return

    def mean_loss(params):
        return objective.sums(params, second, carry, None)[0]["nll"] / second.weights.sum()

    found = case.to_flat(jax.jit(jax.grad(mean_loss))(params)["backbone"])
    for name, gradient in expected["gradient"].items():
        size = max(np.abs(gradient).max(), 1e-3)
        assert np.abs(found[name] - gradient).max() < 1e-5 * size, name


def check_steps(model: Model, params: dict, stretches: np.ndarray, expected: dict[str, np.ndarray]) -> None:
    """Ten updates of AdamW, each on the next stretch of the streams, with the state carried from one to the next."""
    config = OptimizerConfig(
        peak_lr=case.RATE,
        warmup=0,
        decay="constant",
        beta1=case.BETA1,
        beta2=case.BETA2,
        eps=case.EPS,
        weight_decay=case.WEIGHT_DECAY,
        clip_norm=0.0,
    )
    boxed = jax.eval_shape(lambda: {"backbone": model.init(jax.random.key(0))})
    optimizer, settings = make_optimizer(config, boxed), settings_of(config, case.NUM_STEPS)
    step = jax.jit(make_train_step(language_model(model), optimizer))
    state = new_state(params, optimizer, 0, empty_state(model.config, stretches.shape[1]))
    losses = []
    for number, stretch in enumerate(stretches):
        state, metrics = step(state, batch_of(stretch, begins=number == 0), settings)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
    found, before = case.to_flat(nn.unbox(state.params)["backbone"]), case.to_flat(params["backbone"])
    for name in found:
        moved = np.abs(expected[name] - before[name]).max()
        difference = np.abs(found[name] - expected[name]).max()
        assert difference < 3e-4 * moved + 1e-7, f"{name}: {difference:.3g} of a movement of {moved:.3g}"
