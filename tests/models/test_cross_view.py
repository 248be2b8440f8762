"""Training with cross-view batches at toy size: what each class of batches moves, and the dropout rate of each."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from parity import bilstm_case
from parity import cross_view_case as case

from jaxlm.data.batch import ExampleBatch, UnlabelledBatch
from jaxlm.models import dropout_rates, with_dropout
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.tasks.kinds.tags import Tagging
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of
from jaxlm.training.task_model import make_task_learner

SIZES = bilstm_case.Sizes(width=8, units=(4, 4))
TASK = Tagging(name="t", labels=("O", "B-X", "I-X"))
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


def test_unlabelled_batches_alone_move_the_encoder_and_the_views():
    """Fails when the primary module learns from unlabelled sentences, a view from labels, or either is not trained."""
    model = BiLSTMConfig(
        vocab_size=SIZES.vocab_size, word_width=6, character_width=0, width=8, units=(4, 4), dropout_rate=0.0
    )
    config = FinetuneConfig(model=model, head="cross_view", optimizer=OPTIMIZER, views=("full", "past"))
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
        return leaves | {"encoder": {*jax.tree.leaves(changed["backbone"])}}

    assert moved(states[0], states[3]) == {"encoder": {True}, "full": {True}, "past": {True}, "primary": {False}}
    assert moved(states[3], states[4]) == {"encoder": {True}, "full": {False}, "past": {False}, "primary": {True}}


def test_every_dropout_rate_is_that_of_unlabelled_batches():
    """Fails when a rate of the model keeps its value for labels; the published ones are 0.5 and 0.2."""
    config = BiLSTMConfig()
    assert {*dropout_rates(config).values()} == {0.5} and {*dropout_rates(with_dropout(config, 0.2)).values()} == {0.2}
    assert FinetuneConfig.unlabelled_dropout_rate == pytest.approx(0.2)
    assert FinetuneConfig.views == case.VIEWS
