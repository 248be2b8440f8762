"""Echo against PyTorch: states, gradient, and ten updates with a carry over streams.

The frozen numbers (tests/golden/echo_parity.npz) are written by tests/parity/freeze_echo.py in float64. A mean over too
many or too few tokens, a bias, or a carry that is lost or not detached fails.
"""

import jax
import numpy as np
import pytest
from conftest import REPOSITORY
from flax import linen as nn
from parity import echo_case
from parity import lstm_case as case

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.echo import EchoConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

SIZES = case.Sizes()
STRETCHES = case.make_stretches(SIZES, 2)


@pytest.fixture(scope="module")
def frozen() -> dict[str, np.ndarray]:
    with np.load(REPOSITORY / "tests/golden/echo_parity.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def made():
    config = EchoConfig(vocab_size=SIZES.vocab_size, num_layers=SIZES.num_layers, width=SIZES.width, dropout_rate=0.0)
    return build(config, Execution(dtype="float32")), {"backbone": echo_case.make_tree(SIZES, 1)}


def batch_of(stretch: np.ndarray, *, begins: bool) -> Batch:
    ids, targets = stretch[:, :-1], stretch[:, 1:]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    ones = np.ones(ids.shape, np.int32)
    return Batch(ids, targets, positions, ones, ones.astype(np.float32), np.full(len(ids), begins))


def test_states_loss_and_gradient_are_those_of_pytorch(frozen, made):
    model, params = made
    objective = language_model(model)
    first, second = batch_of(STRETCHES[0], begins=True), batch_of(STRETCHES[1], begins=False)
    _, carry = objective.sums(params, first, model.stream_carry(SIZES.rows), None)
    states = model(params, Inputs(second.ids, second.positions), carry).states
    np.testing.assert_allclose(states, frozen["forward/states"], rtol=1e-5, atol=1e-5)

    def mean_loss(params):
        return objective.sums(params, second, carry, None)[0]["nll"] / second.weights.sum()

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    np.testing.assert_allclose(loss, frozen["forward/loss"], rtol=1e-6)
    for name, found in case.to_flat(gradient["backbone"]).items():
        wanted = frozen[f"gradient/{name}"]
        assert np.abs(found - wanted).max() < 1e-5 * max(np.abs(wanted).max(), 1e-3), name


def test_ten_updates_are_those_of_pytorch(frozen, made):
    model, params = made
    adam = {"beta1": case.BETA1, "beta2": case.BETA2, "eps": case.EPS, "weight_decay": case.WEIGHT_DECAY}
    config = OptimizerConfig(peak_lr=case.RATE, warmup=0, decay="constant", clip_norm=0.0, **adam)
    boxed = jax.eval_shape(lambda: {"backbone": model.init(jax.random.key(0))})
    optimizer, settings = make_optimizer(config, boxed), settings_of(config, case.NUM_STEPS)
    step = jax.jit(make_train_step(language_model(model), optimizer))
    state, losses = new_state(params, optimizer, 0, model.stream_carry(SIZES.rows)), []
    for number, stretch in enumerate(STRETCHES):
        state, metrics = step(state, batch_of(stretch, begins=number == 0), settings)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, frozen["steps/losses"], rtol=1e-5)
    before = case.to_flat(params["backbone"])
    for name, found in case.to_flat(nn.unbox(state.params)["backbone"]).items():
        wanted = frozen[f"steps/{name}"]
        assert np.abs(found - wanted).max() < 3e-4 * np.abs(wanted - before[name]).max() + 1e-7, name
