"""The classification network of CoVe at toy size: padding, the texts of a pair, dropout, meshes, its input layer."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from parity import bcn_case as case
from toy import assert_trees_same

from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import MeshConfig, make_mesh, replicated, to_devices, use_mesh
from jaxlm.models import build
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.heads.bcn import BCNHead, SelfBCNHead, make
from jaxlm.models.model import Inputs
from jaxlm.objectives.task import task_outputs
from jaxlm.tasks import KINDS
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.program import make_program, run_settings
from jaxlm.training.task_model import make_task_learner

SIZES = case.Sizes(units=2, rows=8)
RATES = {name: 0.0 for name in ("embedding_dropout_rate", "input_feed_forward_dropout_rate", "dropout_rate")}
CONFIG = BiLSTMConfig(**case.fields_of(SIZES), **RATES)
TASK = KINDS["classification"](name="toy", form="entailment", labels=tuple("abcde"))


def batch(**changes) -> ExampleBatch:
    rows = case.make_rows(SIZES, seed=5) | changes
    marks = {name: np.zeros_like(rows["lengths"]) for name in ("extract", "second")}
    return ExampleBatch(index=np.arange(SIZES.rows, dtype=np.int32), **marks, **rows)


@pytest.fixture(scope="module")
def scores():
    """Return a function from a batch to the scores of a head of the paper's form with random parameters."""
    tree = case.make_tree(SIZES, seed=6, sides=BCNHead.sides, normed=True)
    model, head = build(CONFIG), BCNHead("classification", SIZES.classes, (0.0,) * 3, SIZES.reduction)
    return jax.jit(lambda rows: task_outputs(model, head, tree, rows)[0])


def test_padding_is_in_no_score(scores):
    """Fails when the attention, a pool or a softmax reads padding, or depends on how many slots of it there are."""
    rows = batch()
    padding = np.arange(SIZES.length) >= rows.lengths[..., None]
    spoilt = scores(batch(ids=np.where(padding, 3, rows.ids)))
    longer = scores(batch(ids=np.pad(rows.ids, ((0, 0), (0, 0), (0, 4)), constant_values=9)))
    for found in (spoilt, longer):
        np.testing.assert_allclose(found, scores(rows), rtol=1e-5, atol=1e-5)


def test_the_texts_of_a_pair_are_told_apart(scores):
    """Fails when both sides share their parameters, or a side reads one text alone."""
    rows = batch()
    exchanged = scores(batch(ids=rows.ids[:, ::-1], lengths=rows.lengths[:, ::-1]))
    assert np.abs(exchanged - scores(rows))[1:-1].max(axis=1).min() > 1e-3
    for text in (0, 1):
        ids = rows.ids.copy()
        ids[:, text] = ids[::-1, text]
        lengths = rows.lengths.copy()
        lengths[:, text] = lengths[::-1, text]
        assert np.abs(scores(batch(ids=ids, lengths=lengths)) - scores(rows))[1:-1].max(axis=1).min() > 1e-3


def test_dropout_rates_are_those_of_each_form():
    """Fails when a rate is that of the other form: the paper has one, ELMo's authors 0.1, 0.2 and 0.3."""
    for form, kind, rates in (("pair", BCNHead, (0.1,) * 3), ("self", SelfBCNHead, (0.1, 0.2, 0.3))):
        config = FinetuneConfig(model=CONFIG, head="bcn", biattention=form, maxout_reduction=4)
        head = make(KINDS["classification"](name="toy", labels=("a", "b")), config, pooled=True)
        assert type(head) is kind and head.dropout_rates == rates and head.reduction == 4


def stepped(devices: int):
    """The state after a step on a batch whose last row is padding, and its metrics."""
    optimizer = OptimizerConfig(peak_lr=1e-2, warmup=0, decay="constant")
    config = FinetuneConfig(model=CONFIG, head="bcn", head_dropout_rate=0.0, optimizer=optimizer, batch_size=SIZES.rows)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    with use_mesh(mesh):
        learner = make_task_learner(config, TASK)
        program = make_program(learner, config, mesh)
        state, settings = program.fresh_state(3), replicated(run_settings(config, 10), mesh)
        return jax.device_get(program.step(state, to_devices(batch(), mesh, SIZES.rows), settings))


def test_devices_share_the_statistics_of_the_batch():
    """Fails when a device normalizes by its own rows, or padding rows are in a statistic."""
    (alone, metrics), (shared, others) = stepped(1), stepped(4)
    assert metrics["loss"] == pytest.approx(float(others["loss"]), rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(float(others["gradient_norm"]), rel=1e-4)
    for one, other in zip(
        *map(jax.tree.leaves, (alone.params["batch_stats"], shared.params["batch_stats"])), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_without_an_input_layer_nothing_changes():
    """Fails when the parameters, their initial values or the dropout depend on a layer that is not there."""
    sizes = {"vocab_size": 9, "word_width": 4, "character_width": 0, "width": 4, "units": (3,), "num_layers": 1}
    models = [build(BiLSTMConfig(**sizes, input_feed_forward_dropout_rate=rate)) for rate in (0.5, 0.0)]
    trees = [nn.unbox(model.init(jax.random.key(0))) for model in models]
    assert_trees_same(*trees) and set(trees[0]["embeddings"]) == {"tokens"}
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    states = [model({"backbone": trees[0]}, Inputs(ids, ids), key=jax.random.key(1)).states for model in models]
    np.testing.assert_array_equal(*states)
