"""GPT-1 against statements of the same equations that share no code with it.

The frozen twin (tests/golden/gpt_parity.npz, written by tests/parity/freeze_gpt.py from float64 PyTorch and NumPy)
runs everywhere; with the extra [parity] the same numbers are made live, on other sizes, and Hugging Face's model with
random weights is asked too. A wrong scale, mask, norm order, GELU, split of queries and keys, decay or schedule fails.
"""

import jax
import numpy as np
import pytest
from parity import gpt_case as case
from parity.check import WHY, assert_frozen, file_of, frozen
from toy import NO_DROPOUT, boxed_shapes, inputs_of, sums_of

from jaxlm.data.batch import Batch
from jaxlm.models import build
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of


def config_of(sizes: case.Sizes) -> GPTConfig:
    return GPTConfig(**vars(sizes), **NO_DROPOUT)


def test_the_frozen_case_is_the_one_that_the_script_makes():
    """Fails when the file is stale: gpt_case was changed and freeze_gpt was not run again."""
    for name, value in case.to_flat(case.make_tree(case.Sizes(), seed=1)).items():
        np.testing.assert_array_equal(frozen("gpt")["params"][name], value, err_msg=name)
    for name, value in case.make_rows(case.Sizes(), seed=2).items():
        np.testing.assert_array_equal(frozen("gpt")["rows"][name], value, err_msg=name)
    assert file_of("gpt").stat().st_size < 100_000


@pytest.mark.parametrize("what", ["forward", "gradient", "adamw", "openai_cosine", "openai_linear"])
def test_frozen_twin(what):
    check(what, case.Sizes(), case.make_tree(case.Sizes(), seed=1), frozen("gpt")["rows"], frozen("gpt"))


@pytest.mark.parity
@pytest.mark.parametrize("what", ["forward", "gradient", "adamw", "openai_cosine", "openai_linear"])
def test_pytorch_live(live, what):
    check(what, *live)


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statements in tests/parity were changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import freeze_gpt

    sizes = case.Sizes()
    assert_frozen("gpt", freeze_gpt.answers(sizes, case.make_tree(sizes, seed=1), frozen("gpt")["rows"]))


@pytest.fixture(scope="module")
def live():
    pytest.importorskip("torch", reason=WHY)
    from parity import freeze_gpt

    sizes = case.Sizes(3, 32, 4, 64, 61, 20)
    tree, rows = case.make_tree(sizes, seed=11), case.make_rows(sizes, seed=12, rows=4)
    return sizes, tree, rows, freeze_gpt.answers(sizes, tree, rows)


def check(what: str, sizes: case.Sizes, tree: dict, rows: dict, expected: dict) -> None:
    """One part of the answers, found by jaxlm in float32."""
    config, batch, params = config_of(sizes), Batch(**rows), {"backbone": tree}
    model = build(config, Execution(dtype="float32"))
    objective = language_model(model, loss_chunks=2)
    mean_loss = jax.jit(lambda p: sums_of(objective, p, batch)["nll"] / batch.weights.sum())
    if what == "forward":
        states = jax.jit(model)(params, inputs_of(batch)).states
        np.testing.assert_allclose(states, expected["forward"]["states"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mean_loss(params), expected["forward"]["loss"], rtol=1e-6)
        return
    if what == "gradient":
        found = case.to_flat(jax.grad(mean_loss)(params)["backbone"])
        for name, gradient in expected["gradient"].items():
            size = max(np.abs(gradient).max(), 1e-3)
            assert np.abs(found[name] - gradient).max() < 1e-5 * size, name
        return
    kind, decay = ("adamw", "cosine") if what == "adamw" else what.replace("openai", "openai_adam").rsplit("_", 1)
    optimizer_config = OptimizerConfig(
        kind=kind,
        peak_lr=case.PEAK_LR,
        warmup=case.WARMUP_STEPS,
        decay=decay,
        beta1=case.BETA1,
        beta2=case.BETA2,
        eps=case.EPS,
        weight_decay=case.WEIGHT_DECAY,
        clip_norm=case.CLIP_NORM,
    )
    optimizer = make_optimizer(optimizer_config, boxed_shapes(config))
    settings = settings_of(optimizer_config, case.NUM_STEPS)
    step = jax.jit(make_train_step(objective, optimizer))
    state, losses, clipped = new_state(params, optimizer, 0), [], 0
    for _ in range(case.NUM_STEPS):
        state, metrics = step(state, batch, settings)
        losses.append(float(metrics["loss"]))
        clipped += float(metrics["gradient_norm"]) > case.CLIP_NORM
    assert clipped > 0, "the case must exercise the clip"
    if what == "adamw":
        np.testing.assert_allclose(losses, expected["forward"]["adamw_losses"], rtol=1e-5)
    before = case.to_flat(tree)
    found, wanted = (
        case.free_of_key_biases(case.to_flat(state.params["backbone"])),
        case.free_of_key_biases(expected[what]),
    )
    for name in wanted:
        moved = np.abs(wanted[name] - case.free_of_key_biases(before)[name]).max()
        difference = np.abs(found[name] - wanted[name]).max()
        assert moved > 1e-4 or name == "wpe", name
        assert difference < 3e-4 * moved + 1e-7, f"{name}: {difference:.3g} of a movement of {moved:.3g}"


@pytest.mark.parity
def test_hugging_face_gpt1_with_random_weights():
    """Fails when our blocks differ from transformers' OpenAIGPTModel, which loads the published GPT-1."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason="needs transformers, the extra [parity]")
    sizes = case.Sizes(3, 48, 4, 192, 83, 24)
    settings = transformers.OpenAIGPTConfig(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.num_positions,
        n_embd=sizes.width,
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    tree = case.make_tree(sizes, seed=21)
    flat = case.to_flat(tree)
    theirs = transformers.OpenAIGPTModel(settings).eval().float()
    names = {"we": "tokens_embed.weight", "wpe": "positions_embed.weight"}
    weights = {}
    for name, value in flat.items():
        if name not in names:
            layer, rest = name.split(".", 1)
            rest = rest if rest.startswith(("mlp", "ln")) else f"attn.{rest}"
            kind = {"w": "weight", "b": "bias", "g": "weight"}[rest.rsplit(".", 1)[1]]
            names[name] = f"h.{layer[1:]}.{rest.rsplit('.', 1)[0]}.{kind}"
        weights[names[name]] = torch.tensor(value, dtype=torch.float32)
    result = theirs.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys and all(key.endswith("attn.bias") for key in result.missing_keys), result
    ids = np.random.default_rng(22).integers(sizes.vocab_size, size=(3, sizes.num_positions)).astype(np.int32)
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids).long()).last_hidden_state.numpy()
    positions = np.broadcast_to(np.arange(sizes.num_positions, dtype=np.int32), ids.shape)
    model = build(config_of(sizes), Execution(dtype="float32"))
    found = model({"backbone": tree}, Inputs(ids, positions)).states
    difference = np.abs(np.asarray(found) - wanted).max()
    print(f"largest difference to transformers {transformers.__version__}: {difference:.3g}")
    assert difference < 2e-5 * np.abs(wanted).max()
