"""The MT-LSTM against its authors' code, the fork of OpenNMT-py in salesforce/cove, run as it is in float64.

The frozen numbers (tests/golden/mt_lstm_parity.npz, written by tests/parity/freeze_mt_lstm.py) run everywhere; with the
sources and the extra [parity] the code runs again. Sources and targets are padded, and no two sizes are equal. The
encoder is torch.nn.LSTM with the keys of the published CoVe. A wrong order of gates, a transposed kernel, an attention
before its half of the input, a missing input feeding, or an end state of the wrong layer or direction fails.
"""

import os
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import mt_lstm_case as case
from parity.check import WHY, assert_frozen, file_of, frozen

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.mt_lstm import MTLSTMConfig
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import inputs_of, language_model, with_loss_per_row
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

NAMES = list(case.CASES)


def expected(name: str, group: str) -> dict[str, np.ndarray]:
    return frozen("mt_lstm")[f"{name}:{group}"]


@cache
def parts(name: str):
    """Return the model, its parameters, and the batch of a case."""
    sizes, rows = case.CASES[name], expected(name, "rows")
    sources = {"num_layers": sizes.num_layers, "width": sizes.width, "word_width": sizes.word_width}
    model = build(MTLSTMConfig(vocab_size=sizes.vocab_size, **sources, dropout_rate=0.0), Execution(dtype="float32"))
    target, source = rows["target"], rows["source"]
    weights = (target[:, 1:] != case.PAD).astype(np.float32)
    positions = np.tile(np.arange(sizes.target, dtype=np.int32), (sizes.rows, 1))
    apart = {"source": source, "source_segments": (source != case.PAD).astype(np.int32)}
    batch = Batch(target[:, :-1], target[:, 1:], positions, None, weights, **apart)
    return model, case.make_tree(sizes, case.SEEDS[name]), batch


def flat(tree) -> dict[str, np.ndarray]:
    return case.to_flat(jax.tree.map(np.asarray, tree))


@pytest.mark.parametrize("name", NAMES)
def test_the_frozen_case_is_the_one_that_the_script_makes(name):
    """Fails when the file is stale: mt_lstm_case was changed and freeze_mt_lstm was not run again."""
    for key, value in case.make_rows(case.CASES[name], seed=3).items():
        np.testing.assert_array_equal(expected(name, "rows")[key], value, err_msg=key)
    assert file_of("mt_lstm").stat().st_size < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_encoder_and_scores_are_the_originals(name):
    model, params, batch = parts(name)

    @jax.jit
    def found(params):
        inputs = inputs_of(batch)
        hidden, _ = model.module.apply({"params": params["backbone"]}, inputs.source, method="encode")
        outputs = model(params, inputs)
        return hidden[-1], jax.nn.log_softmax(model.logits(params, outputs.states, outputs.output))

    encoded, scores = found(params)
    wanted = expected(name, "forward")
    np.testing.assert_allclose(encoded, wanted["encoder"], rtol=1e-5, atol=1e-5)
    real = batch.weights > 0
    np.testing.assert_allclose(scores[real], wanted["scores"][real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_originals(name):
    """Fails when a parameter has no gradient too, or a padded source has a part in it."""
    model, params, batch = parts(name)
    objective = language_model(model)

    @jax.jit
    def loss_and_gradient(params):
        per_row = lambda p: objective.sums(p, batch, None, None)[0]["nll"] / len(batch.ids)  # noqa: E731
        return jax.value_and_grad(per_row)(params)

    loss, gradient = loss_and_gradient(params)
    np.testing.assert_allclose(loss, expected(name, "forward")["loss"], rtol=1e-6)
    found, wanted = flat(gradient), expected(name, "gradient")
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert np.abs(value).max() > 0 and np.abs(found[key] - value).max() < 1e-4 * np.abs(value).max(), key


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_sgd_are_the_originals(name):
    """Fails when the loss is that of a token and not of a row, or the gradient is clipped before it is."""
    model, params, batch = parts(name)
    config = OptimizerConfig(
        kind="sgd", peak_lr=case.LEARNING_RATE, warmup=0, decay="constant", weight_decay=0.0, clip_norm=case.CLIP_NORM
    )

    def init(key):
        return {"backbone": model.init(key), "head": model.output_layer.init(key)}

    optimizer = make_optimizer(config, jax.eval_shape(init, jax.random.key(0)))
    step = jax.jit(make_train_step(with_loss_per_row(language_model(model)), optimizer))
    state, settings = new_state(jax.tree.map(jnp.asarray, params), optimizer, 0), settings_of(config, case.STEPS)
    for _ in range(case.STEPS):
        state, _ = step(state, batch, settings)
    found = flat(state.params)
    for key, value in expected(name, "steps").items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.parity
@pytest.mark.parametrize("name", NAMES)
def test_the_script_gives_the_frozen_numbers(name):
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    if "COVE" not in os.environ:
        pytest.skip("needs the sources of salesforce/cove in the directory COVE")
    from parity import mt_lstm_onmt

    sizes = case.CASES[name]
    found = mt_lstm_onmt.answers(sizes, case.make_tree(sizes, case.SEEDS[name]), expected(name, "rows"))
    assert_frozen("mt_lstm", {f"{name}:{group}": members for group, members in found.items()})
