"""The loss scale of runs in float16: its rules, and updates that overflow, against PyTorch's scaler and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_linear
from toy import KEEP_GRADIENT, SETTINGS, assert_trees_same

from jaxlm.objectives.objective import Objective
from jaxlm.training import loss_scale
from jaxlm.training.loss_scale import FIRST, LARGEST, LossScale, first_scale
from jaxlm.training.step import make_train_step, new_state, saved_part, settings_of

# torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=4) of PyTorch 2.13: 1 is a step with finite gradients,
# 0 one with an infinite gradient; the scales are those of get_scale() after each step's update().
STEPS = (0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1)
PYTORCH = (
    [16384] * 4 + [32768] * 4 + [65536] * 2 + [32768] + [16384] * 3 + [8192] * 4 + [16384] * 4 + [32768] * 2
    + [16384] * 4 + [32768]
)  # fmt: skip


def scale_of(scale: float, finite: int = 0) -> LossScale:
    return LossScale(jnp.float32(scale), jnp.int32(finite))


def test_the_scales_are_those_of_pytorch(monkeypatch):
    """Fails when the scale grows too early or late, a change does not begin the count anew, or a factor differs."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    scale, found = first_scale(), []
    for finite in STEPS:
        scale = scale.updated(jnp.bool_(finite), jnp.bool_(True))
        found.append(int(scale.scale))
    assert found == PYTORCH


def test_the_scale_has_limits_and_rests_when_a_run_has_ended():
    """Fails when the scale leaves its range, or an update at the smallest scale or of a halted run overflows."""
    true, false = jnp.bool_(True), jnp.bool_(False)
    assert float(scale_of(1.0).updated(false, true).scale) == 1.0
    assert float(scale_of(LARGEST, loss_scale.GROWTH_INTERVAL - 1).updated(true, true).scale) == LARGEST
    assert_trees_same(scale_of(8.0, 5).updated(false, false), scale_of(8.0, 5))
    answers = [bool(scale_of(scale).overflows(false, halted)) for scale in (2.0, 1.0) for halted in (false, true)]
    assert answers == [True, False, False, False]
    assert not bool(scale_of(2.0).overflows(true, false))


FACTOR = 3.0


@pytest.mark.parametrize("on_spike", ["report", "skip"])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(on_spike):
    """A regression with products in float16. A batch of large targets comes again until its gradient is finite.

    Fails when an overflow moves a bit of parameters, moments, average or median, is a spike, halts the run or does not
    count as a step; or when the gradient that is applied is not that of NumPy.
    """
    config = toy_linear.RUN.__class__(**vars(toy_linear.RUN) | {"momentum": 0.5})
    step, optimizer = toy_linear.regression(config, jnp.float16)
    settings = settings_of(config, 100, ema=0.9, spike_factor=FACTOR, on_spike=on_spike)
    state = toy_linear.start(optimizer, averages=True, finds_spikes=True, scales_loss=True)
    w, momentum = toy_linear.START["backbone"]["w"].astype(np.float64), np.zeros(toy_linear.WIDTH)
    norms, overflows, spikes = [], 0, 0
    for batch in toy_linear.rows(30):
        batch[:, -1] *= 300.0 if len(norms) == 12 else 1.0
        for _ in range(16):
            before = jax.device_get(state)
            state, metrics = step(state, batch, settings)
            spike = metrics["spike"]
            assert int(state.step) == before.step + 1 and not bool(metrics["halted"])
            assert float(metrics["loss_scale"]) == before.loss_scale.scale
            expected = np.median(norms) if norms else np.nan
            np.testing.assert_allclose(spike["median"], expected, rtol=2e-3)
            if np.isfinite(metrics["gradient_norm"]):
                break
            overflows += 1
            for name in ("params", "opt_state", "average"):
                assert_trees_same(getattr(state, name), getattr(before, name))
            assert float(state.loss_scale.scale) == before.loss_scale.scale / 2 and int(state.loss_scale.finite) == 0
            assert not bool(spike["found"]) and not bool(spike["skipped"])
            assert not any(np.any(size) for size in metrics["update_norm"].values())
        assert int(state.loss_scale.finite) == before.loss_scale.finite + 1
        gradient = toy_linear.gradient(w, batch)
        norms.append(np.linalg.norm(gradient))
        spikes += bool(spike["found"])
        if not bool(spike["skipped"]):
            momentum = 0.5 * momentum + gradient
            w = w - toy_linear.RATE * momentum
        assert float(metrics["gradient_norm"]) == pytest.approx(norms[-1], rel=2e-3)
        np.testing.assert_allclose(state.params["backbone"]["w"], w, rtol=2e-3, atol=2e-2)
    assert overflows > 3 and spikes > 0


@pytest.mark.parametrize("skips", [False, True])
def test_a_loss_that_no_scale_makes_finite_ends_the_run(skips):
    """Fails when a batch with NaN halts a run before its scale is the smallest, or is taken for an overflow for ever.

    With skip, two updates at the smallest scale are spikes, as in a run without a scale.
    """
    step, optimizer = toy_linear.regression(dtype=jnp.float16)
    settings = settings_of(toy_linear.RUN, 99, spike_factor=FACTOR, on_spike="skip" if skips else "report")
    state = toy_linear.start(optimizer, finds_spikes=skips, scales_loss=True)
    batch = toy_linear.rows(1)[0]
    batch[0, 0] = np.nan
    halvings = round(np.log2(FIRST))
    for number in range(halvings + 2 * skips):
        state, metrics = step(state, batch, settings)
        assert int(state.step) == number + 1 and not bool(state.halted)
        assert not skips or bool(metrics["spike"]["found"]) == (number >= halvings)
    assert float(state.loss_scale.scale) == 1.0
    halted, metrics = step(state, batch, settings)
    assert bool(halted.halted) and bool(metrics["halted"])
    assert_trees_same(saved_part(halted), saved_part(state))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_carry_of_an_overflow_is_kept_if_the_loss_is_finite(micro_batches):
    """Fails when a stream is read again after an overflow, or a carry that is not finite replaces the one before."""

    def sums(params, batch, carry, key):
        x = params["backbone"]["x"]
        marks = [lambda x: 0.0 * x, lambda x: jnp.sqrt(0.0 * x), lambda x: x + jnp.nan]  # 1: only the gradient, 2: both
        mark = jnp.where(batch[0] < 3, batch[0], 0).astype(jnp.int32)
        return {"total": x * jnp.sum(batch) + jax.lax.switch(mark, marks, x)}, carry + batch

    objective = Objective({"total": 1.0}, lambda batch: {"total": jnp.float32(1)}, sums)
    step = jax.jit(make_train_step(objective, KEEP_GRADIENT, micro_batches=micro_batches))
    carry = jnp.zeros((1, 4))
    state = new_state({"backbone": {"x": jnp.float32(3)}}, KEEP_GRADIENT, 0, carry, scales_loss=True)
    carries, losses, scales = [], [], []
    for mark in (5.0, 1.0, 2.0, 6.0):
        state, metrics = step(state, jnp.full(4, mark), SETTINGS)
        carries.append(float(state.carry[0, 0]))
        losses.append(float(metrics["loss"]))
        scales.append(float(state.loss_scale.scale))
    assert carries == [5.0, 6.0, 6.0, 12.0] and scales == [FIRST, FIRST / 2, FIRST / 4, FIRST / 4]
    assert losses[:2] == [60.0, 12.0] and np.isnan(losses[2]) and losses[3] == 72.0
    assert float(state.opt_state["backbone"]["x"]) == 24.0


def test_a_state_without_a_scale_has_none():
    """Fails when a run in another dtype gets another checkpoint or other metrics than before."""
    step, optimizer = toy_linear.regression()
    state, found = step(toy_linear.start(optimizer), toy_linear.rows(1)[0], settings_of(toy_linear.RUN, 9))
    assert "loss_scale" not in found and set(saved_part(state)) == {"step", "params", "opt_state"}
