"""T5 against Hugging Face's T5ForConditionalGeneration with random weights, run as it is in float64.

The frozen numbers (tests/golden/t5_parity.npz, written by tests/parity/freeze_t5.py) run everywhere; with the extra
[parity] the library runs again. 1.0 is tied, scaled and has a deeper encoder; 1.1 is gated, untied and has a deeper
decoder. Sources and targets are padded, and no two sizes are equal. A wrong bucket, direction, mask, norm, scale,
transposed kernel or gate fails.
"""

from functools import cache

import jax
import numpy as np
import pytest
from parity import t5_case as case
from parity.check import WHY, assert_frozen, file_of, frozen

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.t5 import T5Config
from jaxlm.models.t5.model import buckets
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import inputs_of, language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

NAMES = list(case.CASES)


@cache
def parts(name: str):
    """Return the model, its parameters, and the batch of a case."""
    sizes = case.CASES[name]
    model = build(T5Config(**vars(sizes), dropout_rate=0.0), Execution(dtype="float32"))
    return model, case.make_tree(sizes, case.SEEDS[name]), Batch(**expected(name, "rows"))


def expected(name: str, group: str) -> dict[str, np.ndarray]:
    return frozen("t5")[f"{name}:{group}"]


@pytest.mark.parametrize("name", NAMES)
def test_the_frozen_case_is_the_one_that_the_script_makes(name):
    """Fails when the file is stale: t5_case was changed and freeze_t5 was not run again."""
    for key, value in case.make_rows(case.CASES[name], seed=2).items():
        np.testing.assert_array_equal(expected(name, "rows")[key], value, err_msg=key)
    assert file_of("t5").stat().st_size < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_are_hugging_faces(name):
    model, params, batch = parts(name)

    @jax.jit
    def logits(params):
        outputs = model(params, inputs_of(batch))
        return model.logits(params, outputs.states, outputs.output)

    found = logits(params) * batch.weights[..., None]
    np.testing.assert_allclose(found, expected(name, "forward")["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_hugging_faces(name):
    """Fails when a parameter has no gradient too: the bias tables are reached through every layer."""
    model, params, batch = parts(name)
    objective = language_model(model, loss_chunks=3)

    @jax.jit
    def loss_and_gradient(params):
        mean = lambda p: objective.sums(p, batch, None, None)[0]["nll"] / batch.weights.sum()  # noqa: E731
        return jax.value_and_grad(mean)(params)

    loss, gradient = loss_and_gradient(params)
    np.testing.assert_allclose(loss, expected(name, "forward")["loss"], rtol=1e-6)
    found, wanted = case.to_flat(jax.tree.map(np.asarray, gradient)), expected(name, "gradient")
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert np.abs(value).max() > 0 and np.abs(found[key] - value).max() < 1e-4 * np.abs(value).max(), key


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_of_adafactor(name):
    """Fails when a layer, or queries, keys and values, share a clip, or the size of a parameter is that of another."""
    model, params, batch = parts(name)
    config = OptimizerConfig(
        kind="adafactor", peak_lr=case.LEARNING_RATE, warmup=0, decay="constant", weight_decay=0.0, clip_norm=0.0
    )

    def init(key):
        heads = model.output_layer.init(key)
        return {"backbone": model.init(key)} | ({"head": heads} if heads else {})

    optimizer = make_optimizer(config, jax.eval_shape(init, jax.random.key(0)))
    step = jax.jit(make_train_step(language_model(model), optimizer))
    state, settings = new_state(params, optimizer, 0), settings_of(config, case.NUM_STEPS)
    for _ in range(case.NUM_STEPS):
        state, _ = step(state, batch, settings)
    found = case.to_flat(jax.tree.map(np.asarray, state.params))
    # Each parameter moves by 0.01 to 0.03. An element whose gradient is nearly 0 moves as far as the others, in a
    # direction that rounding decides: PyTorch's own steps in float32 and float64 differ by 3e-5, and XLA's on a
    # processor with AMX differ from PyTorch's by 1.4e-4.
    for key, value in expected(name, "adafactor").items():
        assert np.abs(found[key] - value).max() < 3e-4, key


def test_buckets_are_the_originals():
    """The values are those of mesh_tensorflow's function, for a decoder with 32 buckets and an encoder with 16."""
    distances = {16: 16, 18: 16, 19: 17, 32: 21, 64: 26, 112: 30, 113: 31, 15: 15, 0: 0, 4000: 31}
    found = buckets(np.array(list(distances)), 32, 128)
    assert found.tolist() == list(distances.values())
    assert buckets(np.array([8, 12, 16, 64, 91]), 16, 128).tolist() == [8, 9, 10, 14, 15]


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_the_script_gives_the_frozen_numbers(name):
    """Fails when the library or tests/parity was changed and the file was not written again."""
    pytest.importorskip("transformers", reason=WHY)
    from parity import freeze_t5

    sizes = case.CASES[name]
    found = freeze_t5.answers(sizes, case.make_tree(sizes, case.SEEDS[name]), expected(name, "rows"))
    assert_frozen("t5", {f"{name}:{group}": members for group, members in found.items()})
