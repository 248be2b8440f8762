"""Learning rates of each decay against closed formulas, and Hugging Face's schedules."""

import math

import numpy as np
import pytest

from jaxlm.errors import InputError
from jaxlm.training.config import run_fields
from jaxlm.training.optimizer import OptimizerConfig, learning_rate, schedule_of

STEPS = 40


def rates(num_steps: int = STEPS, **fields) -> np.ndarray:
    """Return the rates of all updates, with a peak of 1."""
    config = OptimizerConfig(**{"peak_lr": 1.0} | fields)
    config.check()
    schedule = schedule_of(config, num_steps)
    return np.array([float(learning_rate(config, t, schedule)) for t in range(num_steps + 1)])


def formula(decay: str, t: int, *, warmup: int, floor: float, power: float, stable: float) -> float:
    """Return the rate of update t of an adamw as the module writes it, in float64."""
    if t < warmup:
        return (t + 1) / warmup
    x = (t - warmup) / (STEPS - warmup)
    if decay == "inverse_sqrt":
        return max(floor, 1 / math.sqrt(1 + (t - warmup) / (warmup or 10_000)))
    left = {
        "linear": 1 - x,
        "cosine": (1 + math.cos(math.pi * x)) / 2,
        "polynomial": (1 - x) ** power,
        "warmup_stable_decay": (1 - max(0.0, x - stable) / (1 - stable)) ** power,
    }[decay]
    return floor + (1 - floor) * left


@pytest.mark.parametrize("warmup", [0, 4, 25])
@pytest.mark.parametrize("floor", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("decay", ["linear", "cosine", "inverse_sqrt", "polynomial", "warmup_stable_decay"])
def test_each_decay_is_its_formula(decay, floor, warmup):
    """Fails when the floor is added instead of scaled to, or a power or a stable part is that of another decay."""
    numbers = {"power": 2.5 if decay in ("polynomial", "warmup_stable_decay") else 1.0}
    numbers["stable"] = 0.6 if decay == "warmup_stable_decay" else 0.8
    found = rates(decay=decay, floor=floor, warmup=warmup, **numbers)
    wanted = [formula(decay, t, warmup=warmup, floor=floor, **numbers) for t in range(STEPS + 1)]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    assert found.max() == pytest.approx(1.0) and found[warmup:].min() >= floor - 1e-6


def test_the_rate_of_t5_is_constant_for_ten_thousand_steps():
    """Fails when it falls from the first step on. The formula is 1 / sqrt(max(t, 10,000)) of T5's code."""
    config = OptimizerConfig(peak_lr=0.01, warmup=0, decay="constant_inverse_sqrt")
    schedule = schedule_of(config, 50_000)
    for step in (0, 1, 5_000, 10_000, 10_001, 40_000):
        wanted = 1 / math.sqrt(max(step, 10_000))
        assert float(learning_rate(config, step, schedule)) == pytest.approx(wanted, rel=1e-6), step


@pytest.mark.parametrize("kind", ["adamw", "openai_adam", "bert_adamw", "sgd"])
@pytest.mark.parametrize(("steps", "cut_frac", "ratio"), [(40, 0.1, 32), (107, 0.1, 32), (30, 1 / 3, 8), (7, 0.05, 4)])
def test_slanted_triangles_are_ulmfits(kind, steps, cut_frac, ratio):
    """Fails when the first rate is not max / ratio, the cut is rounded up, or the fall ends elsewhere than at the end.

    The formula is that of the published code (fastai's sgdr.py); it equals the paper's where cut_frac T is whole.
    """
    cut = math.floor(steps * cut_frac + 1e-9)
    wanted = []
    for t in range(steps + 1):
        p = t / cut if t < cut else 1 - (t - cut) / (steps - cut)
        wanted.append((1 + p * (ratio - 1)) / ratio)
        if cut == steps * cut_frac and t >= cut:
            paper = 1 - (t - cut) / (cut * (1 / cut_frac - 1))
            assert wanted[-1] == pytest.approx((1 + paper * (ratio - 1)) / ratio)
    found = rates(steps, kind=kind, decay="slanted_triangular", warmup=cut_frac, floor=1 / ratio)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert found[cut] == pytest.approx(1.0) and found[-1] == pytest.approx(1 / ratio, abs=1e-6)
    assert found[0] == pytest.approx(1 / ratio if cut else 1.0)


@pytest.mark.parametrize("kind", ["sgd", "bert_adamw", "openai_adam"])
def test_the_rate_of_cvt_is_its_formula(kind):
    """Fails when a rate is that of the step after, when the root is counted from the end of the warmup, or an optimizer
    with a schedule of its own has its own warmup. The formula is that of cvt_text (multitask_model.py:80-88)."""
    config = OptimizerConfig(kind=kind, peak_lr=0.5, warmup=5000, decay="one_plus_root")
    schedule = schedule_of(config, 20_000)
    assert not OptimizerConfig(kind="sgd", peak_lr=0.5, warmup=5000, decay="one_plus_root").depends_on_num_steps()
    for t in (0, 1, 2, 777, 4999, 5000, 5001, 19_999):
        wanted = 0.5 * (min(t, 5000) / 5000) / (1 + 0.005 * math.sqrt(t))
        assert float(learning_rate(config, t, schedule)) == pytest.approx(wanted, rel=1e-6), t
    assert set(rates(decay="one_plus_root", warmup=0)[:1]) == {1.0}


def test_the_stable_part_is_at_the_peak_and_no_longer():
    """Fails when the stable part is a fraction of the whole run, or the decay ends early."""
    found = rates(decay="warmup_stable_decay", warmup=8, stable=0.75)
    assert set(found[8:33]) == {1.0} and found[33] == pytest.approx(1 - 1 / 8)
    assert found[39] == pytest.approx(1 / 8) and found[40] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["openai_adam", "bert_adamw"])
def test_the_published_kinds_have_all_decays(kind):
    """Fails when a kind with a schedule of its own has no floor, or forgets its own origin of x for a polynomial."""
    falls = {"linear": lambda x: 1 - x, "polynomial": lambda x: (1 - x) ** 2}
    for decay, fall in falls.items():
        power = 2.0 if decay == "polynomial" else 1.0
        found = rates(kind=kind, decay=decay, floor=0.2, power=power, warmup=5)
        wanted = [0.2 + 0.8 * fall(t / STEPS) for t in range(6, STEPS + 1)]
        np.testing.assert_allclose(found[6:], wanted, rtol=1e-5)
    lowest = rates(kind=kind, decay="cosine", floor=0.2, warmup=5)
    np.testing.assert_allclose(lowest[6:], [0.6 + 0.4 * math.cos(math.pi * t / STEPS) for t in range(6, 41)], rtol=1e-5)
    for decay in ("inverse_sqrt", "warmup_stable_decay"):
        np.testing.assert_allclose(
            rates(kind=kind, decay=decay, warmup=5)[6:], rates(decay=decay, warmup=5)[6:], rtol=1e-6
        )


@pytest.mark.parametrize("name", ["inverse_sqrt", "polynomial", "warmup_stable_decay", "cosine"])
def test_decays_are_hugging_faces(name):
    """Fails when a decay has another shape than the one of the same name there. Their warmup begins at 0."""
    torch = pytest.importorskip("torch")
    from transformers import optimization

    warmup, floor = 6, 0.0 if name == "inverse_sqrt" else 0.25
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if name == "inverse_sqrt":
        schedule = optimization.get_inverse_sqrt_schedule(theirs, warmup)
    elif name == "polynomial":
        schedule = optimization.get_polynomial_decay_schedule_with_warmup(
            theirs, warmup, STEPS, lr_end=floor, power=3.0
        )
    elif name == "cosine":
        schedule = optimization.get_cosine_with_min_lr_schedule_with_warmup(theirs, warmup, STEPS, min_lr_rate=floor)
    else:  # 17 of the 34 steps after the warmup
        schedule = optimization.get_wsd_schedule(
            theirs, warmup, 17, num_stable_steps=17, decay_type="linear", min_lr_ratio=floor
        )
    wanted = []
    for _ in range(STEPS + 1):
        wanted.append(schedule.get_last_lr()[0])
        theirs.step()
        schedule.step()
    shape = {"polynomial": {"power": 3.0}, "warmup_stable_decay": {"stable": 0.5}}.get(name, {})
    found = rates(decay=name, warmup=warmup, floor=floor, **shape)
    np.testing.assert_allclose(found[warmup:], wanted[warmup:], rtol=1e-5, atol=1e-6)


def test_a_run_without_an_end_may_grow():
    """Fails when the length of a run whose rates do not depend on it is pinned, or that of another is not."""
    assert "num_steps" in run_fields(OptimizerConfig(decay="inverse_sqrt", warmup=4))
    for decay in ("polynomial", "warmup_stable_decay"):
        assert "num_steps" not in run_fields(OptimizerConfig(decay=decay, warmup=4))
    assert "num_steps" not in run_fields(OptimizerConfig(decay="inverse_sqrt", warmup=0.5))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"floor": 0.1, "decay": "constant"}, "optimizer.floor must be 0 with optimizer.decay constant, got 0.1"),
        ({"power": 2.0}, "optimizer.power must be 1 with optimizer.decay cosine, got 2"),
        ({"stable": 0.5, "decay": "polynomial"}, "optimizer.stable must be 0.8 with optimizer.decay polynomial"),
    ],
)
def test_numbers_out_of_range_or_without_effect_are_refused(fields, said):
    """Fails when a number that changes nothing is accepted silently."""
    with pytest.raises(InputError, match=said):
        OptimizerConfig(**fields).check()
