"""BERT against Hugging Face's, with random weights and the same masks, and its LSTM against PyTorch's.

The frozen twin (tests/golden/bert_parity.npz, written by tests/parity/freeze_bert.py in float64) runs everywhere; with
the extra [parity] the same numbers are made live, on other sizes. The masks of the case are made by a statement of
threefry and of the original's loops in plain Python, so that jaxlm's own must agree. A wrong scale, mask, norm order,
GELU, table, pooler, head, tie, decay or schedule fails.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import bert_case as case
from parity import bert_masks
from toy import assert_trees_close, sums_of, weights_of
from toy_pairs import CONTINUES, SPECIALS, bert_shapes, pair_rows

from jaxlm.data.batch import ExampleBatch, PairBatch
from jaxlm.models import build
from jaxlm.models.bert import BertConfig
from jaxlm.models.bert.model import NextSentenceHead
from jaxlm.models.heads.linear import PooledHead, SpanHead, TaggingHead
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.nn.recurrence import BiLSTM
from jaxlm.objectives.masked_lm import MaskingConfig, Specials, mask_tokens, masked_language_model
from jaxlm.objectives.objective import mean
from jaxlm.objectives.task import task_objective, task_outputs
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "bert_parity.npz"
WHY = "needs PyTorch and transformers, the extra [parity]; the frozen twin in tests/golden runs without"
SIZES = {"tanh": case.Sizes(), "erf": case.Sizes(activation="gelu_erf")}
# Biases that a softmax cancels have a gradient of 0 but for rounding; others are held to their own size.
NO_GRADIENT = 0.05
PARTS = ["forward", "gradient", "adamw", "bert_adamw"]


@pytest.fixture(scope="module")
def frozen() -> dict[str, dict[str, dict[str, np.ndarray]]]:
    found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    with np.load(GOLDEN, allow_pickle=False) as file:
        for key in file.files:
            name, group, member = key.split("/", 2)
            found.setdefault(name, {}).setdefault(group, {})[member] = file[key]
    return found


@pytest.fixture(scope="module")
def live():
    pytest.importorskip("torch", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    from parity import freeze_bert

    sizes = case.Sizes(3, 24, 3, 40, 61, 26, "gelu_erf")
    tree, batch = case.make_tree(sizes, seed=11), case.make_pairs(sizes, seed=12, rows=4)
    return sizes, tree, batch, freeze_bert.answers(sizes, tree, batch, seed=13), 13


def config_of(sizes: case.Sizes) -> BertConfig:
    return BertConfig(**vars(sizes), dropout_rate=0.0, embedding_dropout_rate=0.0, attention_dropout_rate=0.0)


def test_the_frozen_case_is_the_one_that_the_script_makes(frozen):
    """Fails when the file is stale: bert_case or bert_masks was changed and freeze_bert was not run again."""
    for sizes in SIZES.values():
        batch = case.make_pairs(sizes, seed=2)
        assert (batch["targets"] >= 0).sum() >= 8
    for name, value in case.to_flat(case.make_tree(SIZES["tanh"], seed=1)).items():
        np.testing.assert_array_equal(frozen["tanh"]["params"][name], value.astype(np.float32), err_msg=name)
    for name, value in case.make_pairs(SIZES["tanh"], seed=2).items():
        np.testing.assert_array_equal(frozen["tanh"]["batch"][name], value, err_msg=name)
    assert GOLDEN.stat().st_size < 400_000


@pytest.mark.parametrize(("name", "what"), [("tanh", part) for part in PARTS] + [("erf", part) for part in PARTS[:2]])
def test_frozen_twin(frozen, name, what):
    sizes = SIZES[name]
    check(what, sizes, case.make_tree(sizes, seed=1), case.make_pairs(sizes, seed=2), frozen[name])


@pytest.mark.parametrize("kind", case.TASKS)
def test_frozen_twin_of_a_task(frozen, kind):
    sizes = SIZES["tanh"]
    check_task(kind, sizes, case.make_tree(sizes, seed=1), frozen["tanh"][kind], seed=3)


def test_the_two_gelus_differ(frozen):
    """Fails when one activation is used for both: the frozen numbers would not show it."""
    difference = np.abs(frozen["tanh"]["forward"]["hidden"] - frozen["erf"]["forward"]["hidden"]).max()
    assert difference > 1e-4


@pytest.mark.parity
@pytest.mark.parametrize("what", PARTS)
def test_hugging_face_live(live, what):
    sizes, tree, batch, expected, _ = live
    check(what, sizes, tree, batch, expected)


@pytest.mark.parity
@pytest.mark.parametrize("kind", case.TASKS)
def test_hugging_face_tasks_live(live, kind):
    sizes, tree, _, expected, seed = live
    check_task(kind, sizes, tree, expected[kind], seed)


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers(frozen):
    """Fails when the statements in tests/parity were changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    pytest.importorskip("transformers", reason=WHY)
    from parity import bert_torch, freeze_bert

    for name, sizes in SIZES.items():
        tree, batch = case.make_tree(sizes, seed=1), case.make_pairs(sizes, seed=2)
        for group, members in freeze_bert.answers(sizes, tree, batch, seed=3).items():
            for key, value in members.items() if group in frozen[name] else ():
                wanted = frozen[name][group][key]
                np.testing.assert_allclose(wanted, value, rtol=1e-6, atol=1e-6, err_msg=f"{name}/{group}/{key}")
    for key, value in bert_torch.lstm(case.make_lstm(seed=4)).items():
        np.testing.assert_allclose(frozen["lstm"]["lstm"][key], value, rtol=1e-6, atol=1e-6, err_msg=key)


def check(what: str, sizes: case.Sizes, tree: dict, pairs: dict, expected: dict) -> None:
    """One part of the answers, found by jaxlm in float32."""
    config = config_of(sizes)
    batch = PairBatch(**{name: value for name, value in pairs.items() if name not in ("seen", "targets")})
    model = build(config, Execution(dtype="float32"))
    objective = masked_language_model(
        model,
        NextSentenceHead(config.init_std),
        masking=MaskingConfig(),
        specials=Specials(case.CLS, case.SEP, case.MASK),
        continues=None,
        slots=lambda batch: 4,
        loss_chunks=2,
    )

    @jax.jit
    def losses(params):
        weights, sums = weights_of(objective, batch), sums_of(objective, params, batch)
        return {name: mean(sums[name], weights[name]) for name in objective.coefficients}

    if what == "forward":
        inputs = Inputs(pairs["seen"], batch.positions, batch.segments, batch.types)
        hidden = jax.jit(lambda inputs: model(tree, inputs, layers=True).layers)(inputs)
        real = np.asarray(batch.segments) > 0
        size = np.abs(expected[what]["hidden"]).max()
        difference = np.abs(np.asarray(hidden) - expected[what]["hidden"])[:, real].max()
        print(f"largest difference of a state: {difference:.2g} of {size:.2g}")
        assert difference < 3e-6 * size
        pooled = model.pool(tree, hidden[-1][:, 0])
        np.testing.assert_allclose(pooled, expected[what]["pooled"], atol=1e-5)
        np.testing.assert_array_equal(hidden[-1], jax.jit(model)(tree, inputs).states)
        for name, value in losses(tree).items():
            np.testing.assert_allclose(value, expected[what][name], rtol=1e-5, err_msg=name)
        return
    if what == "gradient":
        found = case.to_flat(jax.jit(jax.grad(lambda params: sum(losses(params).values())))(tree))
        assert set(found) == set(expected[what])
        worst = 0.0
        for name, gradient in expected[what].items():
            size = max(np.abs(gradient).max(), NO_GRADIENT)
            worst = max(worst, np.abs(found[name] - gradient).max() / size)
            assert np.abs(found[name] - gradient).max() < 1e-5 * size, name
        print(f"largest relative difference of a gradient: {worst:.2g}")
        return
    optimizer_config = OptimizerConfig(
        kind=what,
        peak_lr=case.PEAK_LR,
        warmup=case.WARMUP_STEPS,
        decay="linear",
        beta1=case.BETA1,
        beta2=case.BETA2,
        eps=case.EPS,
        weight_decay=case.WEIGHT_DECAY,
        clip_norm=case.CLIP_NORM,
    )
    optimizer = make_optimizer(optimizer_config, bert_shapes(config))
    settings = settings_of(optimizer_config, case.NUM_STEPS)
    step = jax.jit(make_train_step(objective, optimizer))
    state, found_losses, clipped = new_state(tree, optimizer, 0), [], 0
    for _ in range(case.NUM_STEPS):
        state, metrics = step(state, batch, settings)
        found_losses.append(float(metrics["loss"]))
        clipped += float(metrics["gradient_norm"]) > case.CLIP_NORM
    assert clipped > 0, "the case must exercise the clip"
    if what == "adamw":
        np.testing.assert_allclose(found_losses, expected["forward"]["adamw_losses"], rtol=2e-5)
    before, found, wanted = (
        case.without_key_biases(flat) for flat in (case.to_flat(tree), case.to_flat(state.params), expected[what])
    )
    assert set(found) == set(wanted)
    worst = 0.0
    for name in wanted:
        moved = np.abs(wanted[name] - before[name]).max()
        difference = np.abs(found[name] - wanted[name]).max()
        assert moved > 1e-4, name
        assert difference < 3e-4 * moved + 1e-7, f"{name}: {difference:.3g} of a movement of {moved:.3g}"
        worst = max(worst, difference / moved)
    print(f"largest difference after {case.NUM_STEPS} steps: {worst:.2g} of the movement")


def check_task(kind: str, sizes: case.Sizes, tree: dict, expected: dict, seed: int) -> None:
    """Scores, loss and gradients of a fine-tuning head."""
    made, head_params = case.make_task(sizes, kind, seed)
    batch, model = ExampleBatch(**made), build(config_of(sizes), Execution(dtype="float32"))
    heads = {"span": SpanHead(0.02), "tagging": TaggingHead(case.TASKS["tagging"], 0.0, 0.02)}
    head = heads.get(kind) or PooledHead(kind, case.TASKS[kind], 0.0, 0.02)
    params, objective = {"backbone": tree["backbone"], "head": head_params}, task_objective(model, head)

    @jax.jit
    def run(params):
        def loss(params):
            return mean(sums_of(objective, params, batch)["task_loss"], weights_of(objective, batch)["task_loss"])

        return task_outputs(model, head, params, batch)[0], *jax.value_and_grad(loss)(params)

    scores, loss, gradient = run(params)
    assert scores.dtype == jnp.float32
    if kind == "tagging":
        scores, wanted = (np.asarray(x)[batch.labels >= 0] for x in (scores, expected["scores"]))
    else:
        wanted = expected["scores"]
    np.testing.assert_allclose(scores, wanted, atol=2e-6 * np.abs(wanted).max())
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    embeddings = gradient["backbone"]["embeddings"]
    found = gradient["head"] | {"types": embeddings["types"], "tokens": embeddings["tokens"]}
    for name, value in found.items():
        size = max(np.abs(expected[name]).max(), NO_GRADIENT)
        assert np.abs(np.asarray(value) - expected[name]).max() < 1e-5 * size, name


def test_the_lstm_is_pytorchs(frozen):
    """Fails on another order of gates, a backward direction that begins at the padding, or a wrong second layer."""
    made = case.make_lstm(seed=4)
    expected, units = frozen["lstm"]["lstm"], made["cotangent"].shape[-1] // 2
    real = np.arange(made["x"].shape[1]) < made["lengths"][:, None]
    lstm = BiLSTM(units, 2)
    apply = lambda params, x: lstm.apply({"params": params}, x, real)  # noqa: E731
    y, pull = jax.vjp(jax.jit(apply), made["params"], made["x"])
    np.testing.assert_allclose(y, expected["y"], atol=1e-6)
    d_params, d_x = pull(jnp.asarray(made["cotangent"]))
    wanted = {name: expected[f"d_{name}"] for name in d_params}
    assert_trees_close(d_params, wanted, relative=1e-5)
    assert_trees_close(d_x, expected["d_x"], relative=1e-5)


# Masks, against plain Python


@pytest.mark.parametrize(
    "masking", [MaskingConfig(), MaskingConfig(0.4, 0.3, 0.6), MaskingConfig(0.3, whole_word=True)], ids=str
)
def test_masks_are_the_loops(masking):
    """Fails when one token of forty packed rows is chosen or replaced otherwise than the plain loops say."""
    batch = pair_rows(40, seed=8)
    run = jax.jit(lambda batch: mask_tokens(batch, masking, SPECIALS, 64, CONTINUES, 32))
    found = jax.tree.map(np.asarray, run(batch))
    for row in range(40):
        seeds = tuple(int(word) for word in batch.mask_seeds[row])
        chosen: set[int] = set()
        for pair in np.flatnonzero(batch.pair_weights[row]).tolist():
            places = np.flatnonzero(batch.segments[row] == pair + 1)
            seen, at = bert_masks.mask_pair(
                batch.ids[row, places],
                seeds,
                pair,
                specials=tuple(SPECIALS),
                vocab_size=64,
                rate=masking.rate,
                share_mask=masking.share_mask,
                share_random=masking.share_random,
                continues=CONTINUES if masking.whole_word else None,
            )
            np.testing.assert_array_equal(found.ids_BL[row, places], seen)
            chosen |= set(places[at].tolist())
        ours = np.asarray(found.where_BM[row])[np.asarray(found.weights_BM[row]) > 0]
        assert set(ours.tolist()) == chosen


def test_threefry_is_the_published_one():
    """Fails when the plain statement is not threefry: the known answers of Salmon et al. (Random123's kat_vectors)."""
    ones = 0xFFFFFFFF
    assert bert_masks.threefry2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert bert_masks.threefry2x32((ones, ones), (ones, ones)) == (0x1CB996FC, 0xBB002BE7)
    assert bert_masks.threefry2x32((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)
