"""The biattentive classification network against PyTorch (the paper's form) and AllenNLP 0.9.0 (ELMo's authors').

The frozen twins (tests/golden/bcn_parity.npz and bcn_self_parity.npz, written by tests/parity/freeze_bcn.py and
freeze_bcn_self.py in float64) run everywhere; with the extra [parity] the paper's form is computed live on other sizes.
A softmax over the other text's axis, attention or pools that read padding, a text that attends to the wrong one, an
order of pools, a batch norm after the maximum, a padding row in its statistics, or maxima over other groups fails.
"""

import jax
import numpy as np
import pytest
from parity import bcn_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import ExampleBatch
from jaxlm.models import build, without_dropout
from jaxlm.models.bilstm import BiLSTMConfig
from jaxlm.models.heads.bcn import BCNHead, SelfBCNHead
from jaxlm.nn.layers import STATISTICS, SUMS, moved
from jaxlm.objectives.task import TaskLoss, outputs_and_vectors, task_objective


@pytest.mark.parametrize(("name", "sizes"), [("pairs", case.PAIRS), ("single", case.SINGLE)])
def test_frozen_twin_of_the_paper(name, sizes):
    tree = case.make_tree(sizes, seed=1, sides=BCNHead.sides, normed=True)
    groups = {group: frozen("bcn")[f"{name}_{group}"] for group in ("forward", "gradient", "statistics")}
    check(BCNHead, sizes, tree, case.make_rows(sizes, seed=2), groups)


def test_frozen_twin_of_allennlp():
    tree = case.make_tree(case.SINGLE, seed=1, sides=SelfBCNHead.sides, normed=False)
    check(SelfBCNHead, case.SINGLE, tree, case.make_rows(case.SINGLE, seed=2), frozen("bcn_self"))


@pytest.mark.parity
@pytest.mark.parametrize("texts", [1, 2])
def test_pytorch_live_at_other_sizes(texts):
    pytest.importorskip("torch", reason=WHY)
    from parity import bcn_torch

    sizes = case.Sizes(4, 3, 5, 17, 7, texts, 9, 3, 4)
    tree = case.make_tree(sizes, seed=3, sides=BCNHead.sides, normed=True)
    rows = case.make_rows(sizes, seed=4)
    check(BCNHead, sizes, tree, rows, bcn_torch.answers(sizes, tree, rows))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import freeze_bcn

    assert_frozen("bcn", freeze_bcn.found())


def check(kind, sizes, tree, rows, expected):
    config = BiLSTMConfig(**case.fields_of(sizes))
    config.check()
    head = kind("classification", sizes.classes, (0.0,) * 3, sizes.reduction)
    model = build(without_dropout(config))
    marks = {name: np.zeros_like(rows["lengths"]) for name in ("extract", "second")}
    batch = ExampleBatch(index=np.arange(sizes.rows, dtype=np.int32), **marks, **rows)
    real = rows["weights"] > 0

    scores, pools = jax.jit(lambda params: outputs_and_vectors(model, head, params, batch))(tree)
    np.testing.assert_allclose(pools[real], expected["forward"]["pools"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores[real], expected["forward"]["scores"], rtol=1e-5, atol=1e-5)
    assert np.isfinite(scores).all()

    objective = task_objective(model, head, TaskLoss())

    @jax.jit
    def training(params):
        def loss(params):
            sums, _ = objective.sums(params, batch, None, jax.random.key(0))
            return sums["task_loss"] / objective.weights(batch)["task_loss"], sums

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, sums), gradient = training(tree)
    np.testing.assert_allclose(loss, expected["forward"]["loss"], rtol=1e-5, atol=1e-5)
    flat = case.to_flat({name: part for name, part in gradient.items() if name != STATISTICS})
    assert flat.keys() == expected["gradient"].keys()
    for name, found in flat.items():
        np.testing.assert_allclose(found, expected["gradient"][name], rtol=1e-4, atol=1e-4, err_msg=name)
    if head.has_statistics:
        for name, values in moved(tree[STATISTICS], sums[SUMS])["maxout"].items():
            for statistic, found in values.items():
                wanted = expected["statistics"][f"{name.removeprefix('norm_')}_{statistic}"]
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
