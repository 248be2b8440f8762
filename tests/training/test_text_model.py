"""The loss of a text task against Hugging Face's GPT-2, whose labels are -100 outside of the targets.

The frozen twin (tests/golden/text_task_parity.npz, written by tests/parity/freeze_text_task.py) runs everywhere.
"""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from parity import generate_case
from parity import text_task_case as case
from parity.check import GOLDEN, WHY, assert_frozen, frozen
from safetensors.numpy import save_file

from jaxlm.interop.sources import read_published
from jaxlm.nn.config import Execution
from jaxlm.objectives.objective import mean
from jaxlm.tasks import Size, TaskOptions
from jaxlm.tasks.input_formats import TextIds
from jaxlm.tasks.registry import typical_task
from jaxlm.tasks.text_rows import TextSplit
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.task_model import make_task_learner


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    listed = json.loads((GOLDEN / "published.json").read_text())[case.NAME]
    (directory / "config.json").write_text(json.dumps(listed["config"] | {"n_positions": case.SIZES.positions}))
    shapes = {
        key: [case.SIZES.positions, shape[1]] if "wpe" in key else shape for key, shape in listed["tensors"].items()
    }
    save_file({key: generate_case.tensor(key, shape) for key, shape in shapes.items()}, directory / "model.safetensors")
    return read_published(f"hf:{directory}")


def split() -> TextSplit:
    rows = tuple(TextIds((), prompt, target) for prompt, target in case.rows())
    longest = np.array([len(row.prompt) + len(row.target) - 1 for row in rows])
    common = {"examples": (), "labelled": True, "truncated": 0, "pad": 0}
    return TextSplit(rows=rows, longest=longest, length=case.SIZES.positions, **common)


def learner_of(published, smoothing):
    still = {name: 0.0 for name in vars(published.model) if name.endswith("dropout_rate")}
    config = FinetuneConfig(model=replace(published.model, **still), label_smoothing=smoothing)
    task = replace(typical_task("text"), options=TaskOptions(target_length=16))
    return make_task_learner(config, task, Execution(dtype="float32"))


@pytest.mark.parametrize(("name", "smoothing"), [("plain", 0.0), ("smoothed", case.SMOOTHING)])
def test_loss_and_gradient_are_those_of_hugging_face(published, name, smoothing):
    """Fails when the loss counts a prompt or padding, when rows weigh alike, or by another rule of smoothing."""
    learner, batch = learner_of(published, smoothing), split().batch(np.arange(3), Size(0, 24), 4)
    weights = learner.objective.weights(batch)

    def loss(params):
        sums, _ = learner.objective.sums(params, batch, None, jax.random.key(0))
        return sum(of * mean(sums[term], weights[term]) for term, of in learner.objective.coefficients.items())

    value, gradient = jax.jit(jax.value_and_grad(loss))(published.params)
    wanted = frozen("text_task")[name]
    assert float(value) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(gradient)))
    assert norm == pytest.approx(float(wanted["norm"]), rel=1e-4)
    tables = gradient["backbone"]["embeddings"]
    for ours, theirs in (("tokens", "wte"), ("positions", "wpe")):
        np.testing.assert_allclose(tables[ours], wanted[theirs], rtol=1e-4, atol=1e-4 * np.abs(wanted[theirs]).max())


def test_the_loss_of_each_row_sums_to_that_of_the_batch(published):
    """Fails when a row gets the loss of another one, or smoothing reaches an evaluation."""
    learner, batch = learner_of(published, case.SMOOTHING), split().batch(np.arange(3), Size(0, 24), 4)
    nll = np.asarray(jax.jit(learner.target_nll)(published.params, batch))
    assert nll.shape == (4,) and nll[3] == 0
    assert nll.sum() / batch.weights.sum() == pytest.approx(float(frozen("text_task")["plain"]["loss"]), rel=1e-5)
    alone = split().batch(np.array([2]), Size(0, 16), 1)
    assert float(learner.target_nll(published.params, alone)[0]) == pytest.approx(float(nll[2]), rel=1e-5)


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the case was changed and the file was not written again."""
    pytest.importorskip("transformers", reason=WHY)
    from parity import freeze_text_task

    assert_frozen("text_task", freeze_text_task.answers())
