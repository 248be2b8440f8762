"""Transformer-XL against a statement in PyTorch: states, gradient, and ten updates with a memory.

The frozen twin (tests/golden/transformer_xl_parity.npz, written by tests/parity/freeze_transformer_xl.py in float64)
runs everywhere; with the extra [parity] the same is computed live on random sizes. A distance that is off by one, an
empty slot that takes attention, a memory of a layer's outputs, a bias on the wrong product fails.
"""

import jax
import numpy as np
import pytest
from flax import linen as nn
from parity import transformer_xl_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import Batch
from jaxlm.models import build, without_dropout
from jaxlm.models.model import Inputs, Model
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

PARTS = [*case.VARIANTS, "steps"]


@pytest.mark.parametrize("part", PARTS)
def test_frozen_twin(part):
    check(part, case.Sizes(), 1, frozen("transformer_xl"))


@pytest.mark.parity
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(4))
def test_pytorch_live_at_random_sizes(seed, part):
    pytest.importorskip("torch", reason=WHY)
    from parity import transformer_xl_torch

    rng = np.random.default_rng(seed)
    limits = [(1, 4), (1, 4), (3, 8), (1, 20), (2, 50), (1, 5), (1, 9), (1, 14)]
    sizes = case.Sizes(*(int(rng.integers(low, high)) for low, high in limits))
    if sizes.width % 2:
        sizes = case.Sizes(**{**vars(sizes), "num_heads": 2 * sizes.num_heads})
    check(part, sizes, 10 * seed, transformer_xl_torch.answers(sizes, 10 * seed))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import transformer_xl_torch

    assert_frozen("transformer_xl", transformer_xl_torch.answers(case.Sizes(), 1))


def model_of(sizes: case.Sizes, variant: str) -> Model:
    norm, biases, clamp_length, same_length = case.VARIANTS[variant]
    config = TransformerXLConfig(
        vocab_size=sizes.vocab_size,
        num_layers=sizes.num_layers,
        width=sizes.width,
        num_heads=sizes.num_heads,
        feed_forward_width=sizes.feed_forward_width,
        memory_length=sizes.memory,
        clamp_length=clamp_length,
        same_length=same_length,
        norm=norm,
        attention_biases=biases,
    )
    return build(without_dropout(config), Execution(dtype="float32"))


def batch_of(row: np.ndarray, number: int) -> Batch:
    ids, targets = row[:, :-1], row[:, 1:]
    ones = np.ones_like(ids)
    return Batch(ids, targets, np.zeros_like(ids), ones, ones.astype(np.float32), np.full(len(row), number == 0))


def check(part: str, sizes: case.Sizes, seed: int, expected: dict) -> None:
    """Check one part of the answers, found by jaxlm in float32."""
    variant = "post" if part == "steps" else part
    model, rows = model_of(sizes, variant), case.make_rows(sizes, seed)
    params = {"backbone": case.make_tree(sizes, variant, seed + 1)}
    if part == "steps":
        check_steps(model, sizes, params, rows, expected["steps"])
        return
    objective = language_model(model)

    @jax.jit
    def found_by_jaxlm(params):
        def loss(params):
            carry = model.stream_carry(sizes.rows)
            for number, row in enumerate(rows[: case.BATCHES]):
                inputs, before = batch_of(row, number), carry
                sums, carry = objective.sums(params, inputs, before, None)
            return sums["nll"] / inputs.weights.sum(), before

        (nll, before), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        last = rows[case.BATCHES - 1][:, :-1]
        return nll, model(params, Inputs(last, np.zeros_like(last), np.ones_like(last)), before).states, gradient

    nll, states, gradient = jax.device_get(found_by_jaxlm(params))
    np.testing.assert_allclose(nll, expected[part]["nll"], rtol=1e-5)
    np.testing.assert_allclose(states, expected[part]["states"], rtol=1e-5, atol=1e-5)
    found = case.to_flat(gradient["backbone"])
    assert found.keys() == expected[f"{part}_gradient"].keys()
    for name, wanted in expected[f"{part}_gradient"].items():
        assert np.abs(found[name] - wanted).max() < 1e-4 * max(np.abs(wanted).max(), 1e-3), name


def check_steps(model: Model, sizes: case.Sizes, params: dict, rows: list, expected: dict[str, np.ndarray]) -> None:
    """Updates of Adam over the rows of the streams, each with the memory of the one before."""
    shape = {"peak_lr": case.RATE, "eps": case.EPS, "clip_norm": case.CLIP_NORM, "weight_decay": 0.0}
    config = OptimizerConfig(warmup=0, decay="constant", **shape)
    boxed = jax.eval_shape(lambda: {"backbone": model.init(jax.random.key(0))})
    optimizer, settings = make_optimizer(config, boxed), settings_of(config, case.NUM_STEPS)
    step = jax.jit(make_train_step(language_model(model), optimizer))
    state, losses = new_state(params, optimizer, 0, model.stream_carry(sizes.rows)), []
    for number, row in enumerate(rows):
        state, metrics = step(state, batch_of(row, number), settings)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4)
    before, found = (case.to_flat(tree["backbone"]) for tree in (params, nn.unbox(state.params)))
    for name in found:
        moved = np.abs(expected[name] - before[name]).max()
        difference = np.abs(found[name] - expected[name]).max()
        assert difference < 1e-4 * moved + 3e-6, f"{name}: {difference:.3g} of a movement of {moved:.3g}"
