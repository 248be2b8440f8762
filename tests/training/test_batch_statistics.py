"""Running statistics of batch norm in the step: of the whole batch whatever its split; parameters like the others."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from toy import TOY, assert_trees_same, examples

from jaxlm.distributed.mesh import MeshConfig, make_mesh, replicated, to_devices, use_mesh
from jaxlm.models.heads.concat_pooling import concat_pooled
from jaxlm.models.heads.head import sequence_inputs
from jaxlm.models.lstm import LSTMConfig
from jaxlm.tasks import KINDS
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.program import make_program, run_settings
from jaxlm.training.task_model import make_task_learner

SIZES = LSTMConfig(vocab_size=TOY.vocab_size, width=8, units=6, dropout_rate=0.0, embedding_dropout_rate=0.0)
CONFIG = FinetuneConfig(
    model=SIZES,
    head="concat_pooling",
    head_dropout_rate=0.0,
    optimizer=OptimizerConfig(peak_lr=1e-2, warmup=0, weight_decay=0.1),
    batch_size=8,
    ema=0.9,
)
TASK = KINDS["classification"](name="toy", labels=("a", "b"))


def batch():
    """Eight examples of different lengths, two of them filler."""
    found = examples("classification")
    return jax.tree.map(lambda x: np.concatenate([x, x[1:2], x[5:]]), found)


def stepped(devices: int, micro_batches: int = 1):
    """The learner, the states before and after a step, and after one more that is not finite, with their metrics."""
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    with use_mesh(mesh):
        learner = make_task_learner(config, TASK)
        program = make_program(learner, config, mesh)
        state = program.fresh_state(3)
        before = jax.device_get(state)
        given = to_devices(batch(), mesh, 8)
        settings = replicated(run_settings(config, 10), mesh)
        state, metrics = program.step(state, given, settings)
        after = jax.device_get((state, metrics))
        spoilt = given.replace(weights=given.weights * np.float32(np.inf))
        halted = jax.device_get(program.step(state, spoilt, settings))
    return learner, before, *after, halted


@pytest.fixture(scope="module")
def alone():
    return stepped(1)


def test_statistics_are_those_of_the_real_rows(alone):
    """Fails when filler counts, the optimizer moves, decays or keeps moments of them, or they are reported."""
    learner, before, after, metrics, _ = alone
    rows = batch()
    states = learner.model(before.params, sequence_inputs(learner.model, rows)).states
    pooled = concat_pooled(states.reshape(8, 1, -1, SIZES.width), rows.lengths)[rows.weights > 0, 0]
    found = after.params["batch_stats"]["norm"]
    np.testing.assert_allclose(found["mean"], 0.1 * pooled.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["variance"], 0.9 + 0.1 * pooled.var(axis=0, ddof=1), rtol=1e-4)
    assert {"batch_stats", "batch_sums"}.isdisjoint({*metrics, *metrics["update_norm"]}) and "accuracy" in metrics
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(after.opt_state)]
    assert any("norm" in name for name in names) and not any("batch_stats" in name for name in names)
    moving = jax.tree.map(lambda a, b: (a != b).any(), after.average, before.average)
    assert all(jax.tree.leaves(moving["batch_stats"]))


def test_eight_devices_are_one(alone):
    """Fails when a device normalizes by its own row, or each has statistics of its own."""
    _, _, after, metrics, _ = stepped(8)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, after.params["batch_stats"], alone[2].params["batch_stats"])
    assert metrics["loss"] == pytest.approx(float(alone[3]["loss"]), rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(float(alone[3]["gradient_norm"]), rel=1e-4)


def test_micro_batches_share_the_statistics_of_the_batch(alone):
    """The first norm reads what no other norm has changed; fails when the last micro-batch alone counts."""
    _, _, after, *_ = stepped(1, micro_batches=2)
    for name, value in alone[2].params["batch_stats"]["norm"].items():
        np.testing.assert_allclose(after.params["batch_stats"]["norm"][name], value, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_moves_nothing(alone):
    """Fails when the statistics, or their average, take in a batch whose update is dropped."""
    _, _, after, _, (halted, metrics) = alone
    assert metrics["halted"]
    assert_trees_same((halted.params, halted.average), (after.params, after.average))


def test_padding_tokens_are_without_effect(alone):
    """Fails when a padding token or a filler row reaches the scores of another row."""
    learner, _, after, *_ = alone
    rows = batch()
    outputs = jax.jit(learner.outputs)
    padding = np.arange(rows.ids.shape[-1]) >= rows.lengths[..., None]
    other = rows.replace(ids=np.where(padding, 7, rows.ids))
    real = rows.weights > 0
    np.testing.assert_array_equal(outputs(after.params, other)[real], outputs(after.params, rows)[real])
