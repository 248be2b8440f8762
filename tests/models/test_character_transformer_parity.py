"""The character Transformer against PyTorch: scores, every loss, the gradient, and ten updates of momentum SGD.

The frozen twin (tests/golden/character_transformer_parity.npz, written by tests/parity/freeze_character_transformer.py
in float64) runs everywhere; with the extra [parity] the same is computed live on random sizes. A norm or positions at
another place, a second target taken across a segment, a coefficient or a layer that stops at another step fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import character_transformer_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.character_transformer import CharacterTransformerConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import LanguageModel
from jaxlm.objectives.language_model import AuxiliaryLosses, language_model
from jaxlm.objectives.objective import mean
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

pytestmark = pytest.mark.usefixtures("room_for_programs")


def test_frozen_twin():
    sizes = case.Sizes()
    check(sizes, case.make_tree(sizes, 1), case.make_batches(sizes, 2), frozen("character_transformer"))


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(4))
def test_pytorch_live_at_random_sizes(seed):
    pytest.importorskip("torch", reason=WHY)
    from parity import character_transformer_torch

    rng = np.random.default_rng(seed)
    limits = [(2, 6), (1, 4), (4, 7), (1, 20), (2, 40), (12, 20), (1, 5), (4, 12)]
    sizes = case.Sizes(*(int(rng.integers(low, high)) for low, high in limits))
    tree, batches = case.make_tree(sizes, seed), case.make_batches(sizes, seed + 100)
    check(sizes, tree, batches, character_transformer_torch.answers(sizes, tree, batches))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import character_transformer_torch

    sizes = case.Sizes()
    assert_frozen(
        "character_transformer",
        character_transformer_torch.answers(sizes, case.make_tree(sizes, 1), case.make_batches(sizes, 2)),
    )


def flat(tree: dict) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(entry.key for entry in path): np.asarray(leaf) for path, leaf in leaves}


def check(sizes: case.Sizes, tree: dict, batches: list, expected: dict) -> None:
    config = CharacterTransformerConfig(
        vocab_size=sizes.vocab_size,
        num_positions=sizes.positions,
        num_layers=sizes.num_layers,
        width=sizes.width,
        num_heads=sizes.heads,
        feed_forward_width=sizes.hidden,
        attention_dropout_rate=0.0,
        relu_dropout_rate=0.0,
    )
    model, params = build(config, Execution(dtype="float32")), case.nested(tree)
    coefficients = {"intermediate_coefficient": case.INTERMEDIATE, "second_target_coefficient": case.SECOND}
    losses = AuxiliaryLosses(model, LanguageModel(**coefficients))
    objective, key = language_model(model, further=[losses.further_loss()]), jax.random.key(0)
    first = Batch(**batches[0])
    weights = objective.weights(first)

    def loss_of(params):
        sums, _ = objective.sums(params, first, None, key)
        means = {name: mean(sums[name], weights[name]) for name in objective.coefficients}
        factors = {name: objective.coefficient(name, 0, case.NUM_STEPS) for name in means}
        return sum((factors[name] * value).sum() for name, value in means.items()), means

    (total, means), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    np.testing.assert_allclose(total, expected["first"]["loss"], rtol=1e-5)
    for name in ("nll", "second_nll"):
        np.testing.assert_allclose(means[name], expected["first"][name], rtol=1e-5)
    for name in ("layer_nll", "layer_second_nll"):
        wanted = [expected["first"][f"{name}/{layer}"] for layer in range(sizes.num_layers - 1)]
        np.testing.assert_allclose(means[name], wanted, rtol=1e-5, atol=1e-7)
    outputs = model(params, Inputs(first.ids, first.positions, first.segments))
    scores, wanted = model.logits(params, outputs.states, outputs.output), expected["first"]["scores"]
    real = first.segments > 0
    assert np.abs(np.asarray(scores) - wanted)[real].max() < 1e-5 * np.abs(wanted).max()
    for name, found in flat(gradient).items():
        wanted = expected["gradient"][name]
        assert np.abs(found - wanted).max() < 1e-4 * max(np.abs(wanted).max(), 1e-3), name

    optimizer_config = OptimizerConfig(
        kind="sgd",
        peak_lr=case.RATE,
        momentum=case.MOMENTUM,
        warmup=0,
        decay="constant",
        weight_decay=0.0,
        clip_norm=0.0,
    )
    boxed = jax.eval_shape(
        lambda: {"backbone": model.init(key), "head": model.output_layer.init(key) | losses.init(key)}
    )
    optimizer = make_optimizer(optimizer_config, boxed)
    step, settings = jax.jit(make_train_step(objective, optimizer)), settings_of(optimizer_config, case.NUM_STEPS)
    state, found = new_state(jax.tree.map(jnp.asarray, params), optimizer, 0), []
    for batch in batches:
        state, metrics = step(state, Batch(**batch), settings)
        found.append(float(metrics["loss"]))
    assert step._cache_size() == 1, "a layer that stops compiles the step again"
    np.testing.assert_allclose(found, expected["steps"]["losses"], rtol=1e-4)
    for name, leaf in flat(state.params).items():
        moved = np.abs(expected["steps"][name] - tree[name]).max()
        difference = np.abs(leaf - expected["steps"][name]).max()
        assert difference < 1e-4 * moved + 1e-6, f"{name}: {difference:.3g} of a movement of {moved:.3g}"
