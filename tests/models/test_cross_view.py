"""Training with cross-view batches at toy size: what each class of batches moves, and the dropout rate of each."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import linen as nn
from parity import bilstm_case
from parity import cross_view_case as case

from jaxlm.data.batch import ExampleBatch, UnlabelledBatch
from jaxlm.models import FAMILIES, dropout_rates, family_of, with_dropout
from jaxlm.models.bert import BertConfig
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.heads import HEADS, mask_rate, views_of
from jaxlm.models.heads.head import sequence_inputs
from jaxlm.tasks.kinds.tags import Tagging
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of
from jaxlm.training.task_model import make_task_learner

SIZES = bilstm_case.Sizes(width=8, units=(4, 4))
TASK = Tagging(name="t", labels=("O", "B-X", "I-X"))
BILSTM = BiLSTMConfig(
    vocab_size=SIZES.vocab_size, word_width=6, character_width=0, width=8, units=(4, 4), dropout_rate=0.0
)
BERT = BertConfig(
    vocab_size=SIZES.vocab_size, num_positions=8, num_layers=4, width=8, num_heads=2, feed_forward_width=16
)
MASK = 4
OPTIMIZER = OptimizerConfig("sgd", 0.5, 0, "constant", weight_decay=0.0, momentum=0.9)


def batch(kind, labels):
    rows = bilstm_case.make_rows(SIZES, seed=0)
    arrays = {name: rows["lengths"][:, None] for name in ("lengths", "second")}
    return kind(
        ids=rows["ids"][:, None],
        extract=np.zeros((SIZES.rows, 1), np.int32),
        labels=np.where(np.arange(SIZES.length) < rows["lengths"][:, None], labels, -1).astype(np.int32),
        weights=np.ones(SIZES.rows, np.float32),
        index=np.arange(SIZES.rows, dtype=np.int32),
        **arrays,
    )


@pytest.mark.parametrize(("model", "views"), [(BILSTM, ("full", "past")), (BERT, ("masked", "middle"))])
def test_unlabelled_batches_alone_move_the_encoder_and_the_views(model, views):
    """Fails when the primary module learns from unlabelled sentences, a view from labels, or either is not trained."""
    config = FinetuneConfig(model=model, head="cross_view", optimizer=OPTIMIZER, views=views)
    config.check()
    learner = make_task_learner(config, TASK)
    boxed = learner.init_params(jax.random.key(0))
    optimizer = make_optimizer(OPTIMIZER, boxed)
    step = jax.jit(make_train_step(learner.objective, optimizer))
    states = [new_state(nn.unbox(boxed), optimizer, 0)]
    for one in (batch(UnlabelledBatch, 0),) * 3 + (batch(ExampleBatch, 1),):
        state, metrics = step(states[-1], one, settings_of(OPTIMIZER, 4))
        assert np.isfinite(metrics["loss"])
        states.append(state)

    def moved(before, after):
        changed = jax.tree.map(lambda x, y: x.tobytes() != y.tobytes(), *jax.device_get((before.params, after.params)))
        leaves = {name: {*jax.tree.leaves(part)} for name, part in changed["head"].items()}
        encoder = {name: part for name, part in changed["backbone"].items() if name != family_of(model).pooler}
        return leaves | {"encoder": {*jax.tree.leaves(encoder)}}

    assert moved(states[0], states[3]) == {"encoder": {True}, "primary": {False}} | dict.fromkeys(views, {True})
    assert moved(states[3], states[4]) == {"encoder": {True}, "primary": {True}} | dict.fromkeys(views, {False})


def test_every_dropout_rate_is_that_of_unlabelled_batches():
    """Fails when a rate of the model keeps its value for labels; the published ones are 0.5 and 0.2."""
    config = BiLSTMConfig()
    assert {*dropout_rates(config).values()} == {0.5} and {*dropout_rates(with_dropout(config, 0.2)).values()} == {0.2}
    assert FinetuneConfig.unlabelled_dropout_rate == pytest.approx(0.2)
    assert views_of(FinetuneConfig(model=config, head="cross_view")) == case.VIEWS


def test_the_views_of_a_bert_are_those_of_a_plain_statement():
    """The losses and the gradient of unlabelled sentences, from the states of BERT's layers and matrix products alone.

    Fails when a view reads another layer or the whole sentence, the targets are those of a masked sentence, a gradient
    flows into them, or CLS, SEP, a later piece of a word or padding counts.
    """
    rng = np.random.default_rng(1)
    learner = make_task_learner(FinetuneConfig(model=BERT, head="cross_view", unlabelled_dropout_rate=0.0), TASK)
    shapes = nn.unbox(jax.eval_shape(learner.init_params, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: (0.5 * rng.standard_normal(leaf.shape)).astype(np.float32), shapes)
    given = batch(UnlabelledBatch, 0)
    labels = np.where(rng.random(given.labels.shape) < 0.3, -1, given.labels)
    masked = np.where(rng.random(given.ids.shape) < 0.4, MASK, given.ids)
    weights = np.array([1.0] * (SIZES.rows - 1) + [0.0], np.float32)
    given = dataclasses.replace(given, labels=labels, masked=masked, weights=weights)
    real_BL = (labels >= 0) * weights[:, None]

    def scores(params, name, ids, layer):
        inputs = sequence_inputs(learner.model, dataclasses.replace(given, ids=ids))
        h, own = learner.model(params, inputs, layers=True).layers[layer], params["head"][name]
        hidden = jax.nn.relu(h @ own["projection_0_kernel"] + own["projection_0_bias"])
        return hidden @ own["kernel"] + own["bias"]

    primary = np.asarray(scores(params, "primary", given.ids, 4), np.float64)
    targets = np.exp(primary) / np.exp(primary).sum(-1, keepdims=True)

    def losses(params):
        of = {"masked": scores(params, "masked", masked, 4), "middle": scores(params, "middle", masked, 2)}
        each = {name: -(targets * (x - jax.nn.logsumexp(x, axis=-1, keepdims=True))).sum(-1) for name, x in of.items()}
        return {f"{name}_loss": (real_BL * value).sum() for name, value in each.items()}

    objective = learner.objective.of(given)
    found = objective.sums(params, given, None, None)[0]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), found, losses(params))
    assert set(found) == set(objective.weights(given)) and not np.array_equal(masked, given.ids)
    np.testing.assert_allclose(list(objective.weights(given).values()), real_BL.sum())
    gradients = [
        jax.grad(lambda tree, of=of: sum(of(tree).values()))(params)
        for of in (losses, lambda tree: objective.sums(tree, given, None, None)[0])
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), *gradients)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients[1]["head"]["primary"]))


def test_every_encoder_with_the_head_offers_views():
    """Fails when a family can have the head without views, or masks words without a view that reads them."""
    for name, family in FAMILIES.items():
        assert bool(family.views) == (family.role in HEADS["cross_view"].kinds), name
    config = FinetuneConfig(model=BERT, head="cross_view")
    assert views_of(config) == ("masked", "middle") and mask_rate(config) == pytest.approx(0.15)
    assert mask_rate(dataclasses.replace(config, views=("middle",))) == 0
    assert mask_rate(dataclasses.replace(config, head="linear")) == 0
    assert mask_rate(FinetuneConfig(model=BILSTM, head="cross_view")) == 0
