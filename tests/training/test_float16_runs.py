"""Runs in float16 on a CPU: their loss curves are those of float32, their loss scale is logged, saved and resumed."""

import contextlib
import functools
import signal

import numpy as np
import pytest
from toy_runs import Process, checksums, copy_at, make_stores, metrics, newest_step, pretrain_arguments, run_here

from jaxlm.training import loss_scale

pytestmark = pytest.mark.usefixtures("two_devices")

FAMILIES = {
    "gpt": ("debug/gpt",),
    "lstm": ("debug/lstm", "--optimizer.peak-lr", 1e-2),
    "transformer_xl": ("debug/transformer_xl", "--model.adaptive.cutoffs", 60, 160, "--model.adaptive.divisor", 2),
}
# Largest relative differences of a loss from float32's. In bfloat16 that of the GPT is 3.7e-4, of the LSTM 6.8e-4.
LIMITS = {"gpt": 1e-4, "lstm": 1e-4, "transformer_xl": 2e-4}
STEPS = 30
# Of the debug models at these lengths, a gradient overflows at this scale; it grows again within a few steps.
LARGE, INTERVAL = 2.0**22, 4


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def arguments(stores):
    """Return a function (family, run, flags) -> a command line of pretraining of STEPS steps."""

    def arguments(family, run, *more):
        config, *flags = FAMILIES[family]
        _, *words = pretrain_arguments(run, stores, "--num-steps", STEPS, "--checkpoint-every", 6, "--keep-newest", 9)
        return [config, *words, *flags, *more]

    return arguments


@pytest.fixture(scope="module")
def base(tmp_path_factory, arguments):
    """Return a function from a family and a dtype to its run, never stopped."""

    @functools.cache
    def make(family, dtype):
        run = tmp_path_factory.mktemp("runs") / f"{family}-{dtype}"
        ended = run_here("pretrain", *arguments(family, run, "--execution.dtype", dtype))
        assert ended.code == 0, ended.errors
        return run

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_curve_is_that_of_float32(base, family):
    """Fails when a mask, a loss or a norm leaves float16's range, or small gradients are lost: with a scale of 1, the
    losses of the LSTM differ by 1.3e-4.
    """
    found, wanted = (metrics(base(family, dtype)) for dtype in ("float16", "float32"))
    assert found.keys() == wanted.keys() and wanted[STEPS] < wanted[1] - 0.1
    difference = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    print(f"{family}: the losses differ by {difference:.1e} at most")
    assert 0 < difference < LIMITS[family]
    norms, others = (metrics(base(family, dtype), "gradient_norm") for dtype in ("float16", "float32"))
    np.testing.assert_allclose(list(norms.values()), list(others.values()), rtol=5e-3)
    assert set(metrics(base(family, "float16"), "loss_scale").values()) == {loss_scale.FIRST}
    assert not metrics(base(family, "float32"), "loss_scale")


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory, arguments):
    """A run whose first scale is too large, and the flags of its command."""
    run = tmp_path_factory.mktemp("overflowing") / "run"
    flags = ("--execution.dtype", "float16", "--spike-factor", 50, "--on-spike", "skip", "--ema", 0.9)
    with scales_from(LARGE):
        ended = run_here("pretrain", *arguments("gpt", run, *flags))
    assert ended.code == 0 and "is skipped" not in ended.errors, ended.errors
    return run, flags


@contextlib.contextmanager
def scales_from(first: float):
    """Let runs begin with another scale, which grows after INTERVAL finite updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "FIRST", first)
        patch.setattr(loss_scale, "GROWTH_INTERVAL", INTERVAL)
        yield


def rescaled(norms: dict[int, float], first: float) -> dict[int, float]:
    """The scale of each step by the rule: half after a norm that is not finite, twice after INTERVAL finite ones."""
    scales, scale, finite = {}, first, 0
    for step, norm in norms.items():
        scales[step] = scale
        finite = finite + 1 if np.isfinite(norm) else 0
        scale = scale * (1 if finite else 0.5) * (2 if finite == INTERVAL else 1)
        finite %= INTERVAL
    return scales


def test_overflows_halve_the_scale_and_are_no_spikes(overflowing):
    """Fails when an overflow ends the run, is reported as a spike, moves the parameters, or its step has no line."""
    run, _ = overflowing
    norms, scales = metrics(run, "gradient_norm"), metrics(run, "loss_scale")
    assert list(norms) == list(range(1, STEPS + 1)) and not metrics(run, "spike")
    assert scales == rescaled(norms, LARGE)
    lost = [step for step, norm in norms.items() if not np.isfinite(norm)]
    assert 3 < len(lost) < STEPS / 2 and lost[0] == 1 and lost[-1] > 6
    updates = metrics(run, "update_norm/blocks")
    assert [step for step, of_layers in updates.items() if not any(of_layers)] == lost
    assert all(np.isfinite(loss) for loss in metrics(run).values())


@pytest.mark.parametrize("step", [6, 18])
def test_a_run_with_overflows_resumes_to_the_bit(overflowing, arguments, step, tmp_path):
    """Fails when a checkpoint lacks the scale or the finite updates since its last change."""
    whole, flags = overflowing
    run = copy_at(whole, step, tmp_path / "run")
    with scales_from(LARGE):
        ended = run_here("pretrain", *arguments("gpt", run, *flags))
    assert ended.code == 0 and f"resumed at step {step}" in ended.errors, ended.errors
    for name in ("loss", "gradient_norm", "loss_scale", "validation_loss"):
        assert metrics(run, name) == metrics(whole, name), name
    assert checksums(run) == checksums(whole)
    assert {"loss_scale/scale", "loss_scale/finite"} <= checksums(run).keys()


def test_a_killed_process_goes_on_to_the_bit(base, arguments, tmp_path):
    """A real kill. Fails when anything of a run in float16 depends on where its process began."""
    run, flags = tmp_path / "run", ("--execution.dtype", "float16")
    process = Process("pretrain", *arguments("lstm", run, *flags), log=tmp_path / "killed", devices=2)
    process.until(lambda: newest_step(run) >= 8, "step 8")
    process.kill(signal.SIGKILL)
    ended = run_here("pretrain", *arguments("lstm", run, *flags))
    assert ended.code == 0, ended.errors
    whole = base("lstm", "float16")
    for name in ("loss", "loss_scale", "validation_loss"):
        assert metrics(run, name) == metrics(whole, name), name
    assert checksums(run) == checksums(whole)


def test_a_run_goes_on_in_float16_and_back(base, arguments, tmp_path):
    """Fails when a checkpoint without a scale, or with one, cannot be continued in another dtype."""
    run = copy_at(base("gpt", "float32"), 6, tmp_path / "run")
    ended = run_here("pretrain", *arguments("gpt", run, "--execution.dtype", "float16"))
    assert ended.code == 0 and '"float32" -> "float16"' in ended.errors, ended.errors
    assert metrics(run, "loss_scale") == dict.fromkeys(range(7, STEPS + 1), loss_scale.FIRST)
    wanted = metrics(base("gpt", "float32"))
    assert all(loss == pytest.approx(wanted[step], rel=2e-4) for step, loss in metrics(run).items())
    back = copy_at(run, 12, tmp_path / "back")
    ended = run_here("pretrain", *arguments("gpt", back, "--execution.dtype", "float32"))
    assert ended.code == 0 and "resumed at step 12" in ended.errors, ended.errors
    assert max(metrics(back, "loss_scale")) == 12
    assert not [name for name in checksums(back) if name.startswith("loss_scale")]


def test_another_run_begins_with_the_state_of_one_without_a_scale(base, arguments, tmp_path):
    """Fails when --start-with state needs a scale of the other run, or takes one that this run has no use for."""
    for dtype, other in (("float16", "float32"), ("float32", "float16")):
        run = tmp_path / dtype
        start = ("--start", f"{base('gpt', other)}@24", "--start-with", "state", "--execution.dtype", dtype)
        ended = run_here("pretrain", *arguments("gpt", run, *start))
        assert ended.code == 0, ended.errors
        assert ("has no loss scale to continue" in ended.errors) == (dtype == "float16")
        assert bool(metrics(run, "loss_scale")) == (dtype == "float16")
