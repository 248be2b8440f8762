"""Cross-view training against a statement in PyTorch: the losses of all modules, the gradients of both kinds of steps.

The frozen twin (tests/golden/cross_view_parity.npz, written by tests/parity/freeze_cross_view.py in float64) runs
everywhere; with the extra [parity] the same is computed live on other sizes. Views on the second layer, exchanged
directions, future and past exchanged, a neighbour beyond the end of a sentence, a gradient into the targets, smoothed
soft targets, or a padding row in a mean fails.
"""

import jax
import numpy as np
import pytest
from parity import bilstm_case
from parity import cross_view_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import ExampleBatch, UnlabelledBatch
from jaxlm.models import build
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.heads.cross_view import CrossViewHead
from jaxlm.models.views import OF_DIRECTIONS
from jaxlm.objectives.cross_view import with_unlabelled
from jaxlm.objectives.objective import mean
from jaxlm.objectives.task import TagLoss, task_objective


def test_frozen_twin():
    check(case.SIZES, case.make_tree(case.SIZES, seed=1), case.make_rows(case.SIZES, seed=2), frozen("cross_view"))


@pytest.mark.parity
def test_pytorch_live_at_other_sizes():
    pytest.importorskip("torch", reason=WHY)
    from parity import cross_view_torch

    sizes = bilstm_case.Sizes(2, 4, ((2, 3), (4, 2)), (5, 9, 4), 6, rows=4, length=9)
    tree, rows = case.make_tree(sizes, seed=3), case.make_rows(sizes, seed=4)
    check(sizes, tree, rows, cross_view_torch.answers(sizes, tree, rows))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import cross_view_torch

    tree, rows = case.make_tree(case.SIZES, seed=1), case.make_rows(case.SIZES, seed=2)
    assert_frozen("cross_view", cross_view_torch.answers(case.SIZES, tree, rows))


def check(sizes, tree, rows, expected):
    config = BiLSTMConfig(**bilstm_case.fields_of(sizes))
    model, head = build(config), CrossViewHead(case.TAGS, sizes.width // 2, OF_DIRECTIONS)
    labelled = task_objective(model, head, TagLoss(label_smoothing=case.SMOOTHING))
    objectives = with_unlabelled(labelled, model, head, 0.0)
    arrays = {
        "ids": rows["ids"][:, None],
        "lengths": rows["lengths"][:, None],
        "extract": np.zeros((sizes.rows, 1), np.int32),
        "second": rows["lengths"][:, None],
        "weights": rows["weights"],
        "index": np.arange(sizes.rows, dtype=np.int32),
        "characters": rows["characters"][:, None],
    }
    unknown = np.where(rows["tags"] < 0, -1, 0)
    for step, batch, names in (
        ("labelled", ExampleBatch(labels=rows["tags"], **arrays), {"primary": "task_loss"}),
        ("unlabelled", UnlabelledBatch(labels=unknown, **arrays), {view: f"{view}_loss" for view in case.VIEWS}),
    ):
        objective = objectives.of(batch)
        assert set(objective.coefficients) == set(names.values())

        @jax.jit
        @jax.value_and_grad
        def total(params, objective=objective, batch=batch):
            sums, _ = objective.sums(params, batch, None, None)
            weights = objective.weights(batch)
            return sum(mean(sums[name], weights[name]) for name in objective.coefficients)

        loss, gradient = total(tree)
        sums, weights = objective.sums(tree, batch, None, None)[0], objective.weights(batch)
        for name, term in names.items():
            np.testing.assert_allclose(sums[term] / weights[term], expected["losses"][name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(loss, sum(expected["losses"][name] for name in names), atol=1e-5)
        for name, found in bilstm_case.to_flat(gradient).items():
            np.testing.assert_allclose(found, expected[step][name], rtol=1e-4, atol=1e-4, err_msg=f"{step} {name}")
