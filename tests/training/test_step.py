"""The training step: what may change how it runs without changing what it computes, and what stops it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import (
    KEEP_GRADIENT,
    SETTINGS,
    STILL,
    TOY,
    assert_trees_close,
    assert_trees_same,
    boxed_shapes,
    examples,
    packed,
    random_params,
)

from jaxlm.models import build
from jaxlm.models.heads.linear import SequenceHead
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.task import task_objective
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import (
    TrainState,
    layer_norms,
    make_eval_step,
    make_train_step,
    new_state,
    saved_part,
    settings_of,
)

ROWS = 8
PLAIN = Execution()


@pytest.fixture(scope="module")
def params():
    return random_params(STILL)


def loss_and_gradient(params, config, execution=PLAIN, *, micro_batches=1, loss_chunks=1):
    objective = language_model(build(config, execution), loss_chunks=loss_chunks)
    step = jax.jit(make_train_step(objective, KEEP_GRADIENT, micro_batches=micro_batches))
    state, metrics = step(new_state(params, KEEP_GRADIENT, 3), packed(ROWS), SETTINGS)
    return {name: float(metrics[name]) for name in ("loss", "accuracy", "gradient_norm")}, state.opt_state


@pytest.fixture(scope="module")
def still(params):
    return loss_and_gradient(params, STILL)


@pytest.fixture(scope="module")
def dropping(params):
    return loss_and_gradient(params, TOY)


@pytest.mark.parametrize("micro_batches", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_micro_batches_do_not_change_the_gradient(params, still, micro_batches):
    """Fails when the loss is a mean of the pieces' means: their weights differ, rows hold different paddings."""
    metrics, gradient = loss_and_gradient(params, STILL, micro_batches=micro_batches)
    assert metrics == pytest.approx(still[0], rel=1e-6)
    worst = assert_trees_close(gradient, still[1], relative=2e-6, absolute=1e-8)
    print(f"{micro_batches} micro-batches: largest difference of a gradient {worst:.2g}")


@pytest.mark.parametrize("micro_batches", [pytest.param(2, marks=pytest.mark.campaign), 3])
def test_micro_batches_of_a_loss_with_two_weights(params, micro_batches):
    """Fails when L2 and L1 of fine-tuning are divided piece by piece: one counts examples, one sequences."""
    head = SequenceHead(kind="choice", outputs=1, dropout_rate=0.0, init_std=0.5)
    kernel = np.random.default_rng(1).standard_normal((STILL.width, 1)).astype(np.float32)
    params = params | {"head": {"kernel": kernel, "bias": np.zeros(1, np.float32)}}
    objective = task_objective(build(STILL, Execution(unroll=1)), head, auxiliary_lm=0.5)

    def gradient(micro_batches):
        step = jax.jit(make_train_step(objective, KEEP_GRADIENT, micro_batches=micro_batches))
        state, metrics = step(new_state(params, KEEP_GRADIENT, 0), examples("choice"), SETTINGS)
        return float(metrics["loss"]), state.opt_state

    found, wanted = gradient(micro_batches), gradient(1)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert_trees_close(found[1], wanted[1], relative=1e-5, absolute=1e-7)  # the head's bias moves nothing: 0


@pytest.mark.parametrize(
    ("execution", "loss_chunks"),
    [
        (Execution(remat="dots"), 1),
        (Execution(remat="full"), 4),
        pytest.param(Execution(remat="dots", unroll=1), 1, marks=pytest.mark.campaign),
        pytest.param(Execution(remat="full", unroll=1), 1, marks=pytest.mark.campaign),
        (Execution(unroll=1), 2),
    ],
    ids=lambda x: f"{x.remat}-{x.unroll}" if isinstance(x, Execution) else f"chunks-{x}",
)
def test_recomputing_and_cutting_do_not_change_the_gradient(params, dropping, execution, loss_chunks):
    """Fails when the backward pass recomputes with other dropout masks, or a layer's gradient lands on another."""
    metrics, gradient = loss_and_gradient(params, TOY, execution, loss_chunks=loss_chunks)
    assert metrics == pytest.approx(dropping[0], rel=1e-6)
    assert_trees_close(gradient, dropping[1], relative=5e-6, absolute=1e-8)


def test_three_layers_at_once(params):
    """Fails when a layer count that the unroll does not divide drops a layer or runs one twice."""
    config = replace(STILL, num_layers=3)
    params = random_params(config)
    wanted = loss_and_gradient(params, config, Execution(unroll=1))
    found = loss_and_gradient(params, config, Execution(unroll=2))
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert_trees_close(found[1], wanted[1], relative=2e-6, absolute=1e-8)


RUN = OptimizerConfig(peak_lr=3e-3, warmup=2)
EACH_STEP = settings_of(RUN, 40)


@pytest.fixture(scope="module")
def training():
    """A step of AdamW on a toy with dropout, and the state it starts from."""
    optimizer = make_optimizer(RUN, boxed_shapes(TOY))
    plain = language_model(build(TOY))
    spoil = {
        101: lambda tokens: jnp.float32(jnp.inf),
        102: lambda tokens: jnp.float32(jnp.nan),
        103: lambda tokens: jnp.sqrt(jnp.sum(tokens * 0.0)),  # 0, but its gradient is not finite
    }

    def sums(params, batch, carry, key):
        """The language model's, spoilt where the first target says so."""
        found, carry = plain.sums(params, batch.replace(targets=batch.targets % TOY.vocab_size), carry, key)
        for mark, term in spoil.items():
            tokens = params["backbone"]["embeddings"]["tokens"]
            found["nll"] += jax.lax.cond(batch.targets[0, 0] == mark, term, lambda _: jnp.float32(0), tokens)
        return found, carry

    spoilable = Objective(plain.coefficients, plain.weights, sums)
    compiled = jax.jit(make_train_step(spoilable, optimizer, stacks=("blocks",)))
    start = new_state(jax.tree.map(jnp.asarray, random_params(replace(TOY, init_std=0.1))), optimizer, 5)
    return SimpleNamespace(step=lambda *inputs: compiled(*inputs, *[EACH_STEP] * (len(inputs) < 3)), start=start)


def marked(batch, mark: int):
    targets = np.array(batch.targets)
    targets[0, 0] = mark
    return batch.replace(targets=targets)


@pytest.mark.parametrize("mark", [101, 102, 103], ids=["infinite loss", "nan loss", "only the gradient"])
def test_a_loss_that_is_not_finite_keeps_the_state_for_good(training, mark):
    """Fails when one bit of the state changes at the bad step, or a later sound batch trains on."""
    batch = packed(ROWS)
    state, _ = training.step(training.start, batch)
    halted, metrics = training.step(state, marked(batch, mark))
    assert bool(metrics["halted"]) and bool(halted.halted)
    assert np.isfinite(float(metrics["loss"])) == (mark == 103)
    assert np.isfinite(float(metrics["gradient_norm"])) == (mark != 103)
    assert_trees_same(halted.replace(halted=state.halted), state)
    for _ in range(2):  # sticky
        halted, metrics = training.step(halted, batch)
        assert bool(metrics["halted"]) and np.isfinite(float(metrics["loss"]))
        assert_trees_same(halted.replace(halted=state.halted), state)
    resumed, metrics = training.step(halted.replace(halted=jnp.zeros((), jnp.bool_)), batch)
    assert not bool(metrics["halted"]) and int(resumed.step) == 2


def test_update_norms_are_made_in_every_so_manieth_step(training):
    """Fails when a step that is logged has none, or the state depends on whether it has."""
    seldom = settings_of(RUN, 40, norms_every=2)
    state, batch = training.start, packed(ROWS)
    for number in (1, 2):
        other, metrics = training.step(state, batch)
        state, found = training.step(state, batch, seldom)
        assert_trees_same(state, other)
        expected = np.asarray(metrics["update_norm"]["blocks"]) * (number == 2)
        np.testing.assert_allclose(found["update_norm"]["blocks"], expected, rtol=1e-6)


def test_metrics_of_a_step(training):
    """Fails when a norm or a rate in the log is not the one that was applied."""
    batch = packed(ROWS)
    state, metrics = training.step(training.start, batch)
    assert float(metrics["learning_rate"]) == pytest.approx(1.5e-3) and int(state.step) == 1
    moved = jax.tree.map(
        lambda new, old: np.asarray(new, np.float64) - np.asarray(old), state.params, training.start.params
    )
    blocks, embeddings = moved["backbone"]["blocks"], moved["backbone"]["embeddings"]
    by_layer = sum((x.reshape(len(x), -1) ** 2).sum(-1) for x in jax.tree.leaves(blocks))
    np.testing.assert_allclose(metrics["update_norm"]["blocks"], np.sqrt(by_layer), rtol=1e-4)
    total = sum((x**2).sum() for x in jax.tree.leaves(embeddings))
    np.testing.assert_allclose(metrics["update_norm"]["embeddings"], np.sqrt(total), rtol=1e-4)
    assert set(metrics) == {"loss", "nll", "accuracy", "learning_rate", "gradient_norm", "update_norm", "halted"}
    assert float(metrics["loss"]) == pytest.approx(float(metrics["nll"])) and 0 <= float(metrics["accuracy"]) <= 1
    assert set(
        layer_norms(
            {"head": {"kernel": jnp.ones((3, 3))}, "backbone": {"blocks": {"a": jnp.ones((2, 4))}}}, 1.0, ("blocks",)
        )
    ) == {
        "head",
        "blocks",
    }


def test_randomness_comes_from_seed_and_step_alone(training):
    """Fails when dropout depends on anything that a resumed run does not have, or repeats from step to step."""
    batch = packed(ROWS)

    def loss(step: int, seed: int) -> float:
        state = training.start.replace(step=jnp.int32(step), seed=jnp.uint32(seed))
        return float(training.step(state, batch)[1]["loss"])

    assert loss(0, 5) == loss(0, 5) == float(training.step(training.start, batch)[1]["loss"])
    assert len({loss(0, 5), loss(1, 5), loss(2, 5), loss(0, 6), loss(0, 2**32 - 1)}) == 5


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_micro_batch_has_its_rows_and_the_key_of_the_step(micro_batches):
    """Fails when micro-batches have other keys, are not strided slices, or keys are not of seed and step."""

    def sums(params, ids, carry, key):
        return {"total": jnp.sum(ids * jax.random.uniform(key)) + 0 * params["backbone"]["x"]}, carry

    drawn = Objective({"total": 1.0}, lambda batch: {"total": jnp.float32(1)}, sums)
    ids = 2.0 ** np.arange(8, dtype=np.float32)[:, None]
    state = new_state({"backbone": {"x": jnp.float32(0)}}, KEEP_GRADIENT, 9).replace(step=jnp.int32(3))
    _, metrics = make_train_step(drawn, KEEP_GRADIENT, micro_batches=micro_batches)(state, ids, SETTINGS)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 3), 0)
    expected = ids.sum() * float(jax.random.uniform(key))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_coefficient_is_scheduled_without_compiling_anew(micro_batches, room_for_programs):
    """Fails when a coefficient is fixed at the first step, is that of another step, or each step is a new program."""

    def scheduled(step, num_steps):
        return jnp.where(step < 2, 0.0, 0.5 * step)

    def sums(params, rows, carry, key):
        return {"plain": params["backbone"]["x"] * jnp.sum(rows), "extra": params["backbone"]["y"] * len(rows)}, carry

    objective = Objective(
        {"plain": 1.0, "extra": scheduled}, lambda rows: dict.fromkeys(("plain", "extra"), jnp.float32(rows.size)), sums
    )
    step = jax.jit(make_train_step(objective, KEEP_GRADIENT, micro_batches=micro_batches))
    params = {"backbone": {"x": jnp.float32(3), "y": jnp.float32(5)}}
    state, rows = new_state(params, KEEP_GRADIENT, 0), jnp.arange(4.0)
    for number in range(5):
        assert int(state.step) == number
        factor = 0.0 if number < 2 else 0.5 * number
        state, metrics = step(state, rows, SETTINGS)
        assert float(metrics["loss"]) == pytest.approx(3 * 1.5 + factor * 5)
        assert float(metrics["extra"]) == pytest.approx(5)  # the term itself is logged without its coefficient
        gradient = state.opt_state["backbone"]
        assert (float(gradient["x"]), float(gradient["y"])) == pytest.approx((1.5, factor))
    assert step._cache_size() == 1
    assert objective.coefficient("plain", 4, 9) == 1.0 and float(objective.coefficient("extra", 4, 9)) == 2.0


def test_it_learns(training):
    """Fails when updates have the wrong sign or size: forty steps on one batch must learn much of it by heart."""
    batch, state = packed(ROWS), training.start
    losses = []
    for _ in range(40):
        state, metrics = training.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0] and not bool(state.halted)


def test_evaluation_gives_sums_and_weights_without_dropout(params):
    """Fails when evaluation drops, or a mean is taken where only a sum can be added up over batches."""
    evaluate = jax.jit(make_eval_step(language_model(build(TOY))))
    batch = packed(ROWS)
    found, again = evaluate(params, batch)[0], evaluate(params, batch)[0]
    assert_trees_same(found, again)
    without, carry = jax.jit(make_eval_step(language_model(build(STILL))))(params, batch)
    assert carry is None
    np.testing.assert_allclose(found["nll"], without["nll"], rtol=1e-6)
    assert float(found["nll"][1]) == batch.weights.sum() == float(found["accuracy"][1])
    halves = [evaluate(params, jax.tree.map(lambda x, s=s: np.roll(x, s, 0)[:4], batch))[0] for s in (0, 4)]
    np.testing.assert_allclose(sum(float(half["nll"][0]) for half in halves), float(found["nll"][0]), rtol=1e-6)


def test_the_state_is_what_a_checkpoint_holds(training):
    fields = ["step", "params", "opt_state", "seed", "halted", "carry", "average", "iterates", "recent_norms"]
    fields += ["loss_scale", "selected", "selection", "halving"]
    assert [field for field in TrainState.__dataclass_fields__] == fields
    assert set(saved_part(training.start)) == {"step", "params", "opt_state"}
    assert int(training.start.step) == 0 and not bool(training.start.halted)
