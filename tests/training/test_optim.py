"""Rates at the edges of their schedules, what is decayed, and the updates against statements in plain NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from parity import openai_adam
from toy import TOY, boxed_shapes

from jaxlm.errors import InputError
from jaxlm.ranges import checked
from jaxlm.training.optimizer import OptimizerConfig, learning_rate, make_optimizer, parameter_rules, schedule_of


def rates(num_steps: int, **fields) -> np.ndarray:
    rate = rate_of(OptimizerConfig(peak_lr=1.0, **fields), num_steps)
    return np.array([float(rate(t)) for t in range(num_steps + 1)])


def rate_of(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    schedule = schedule_of(config, num_steps)
    return lambda t: learning_rate(config, t, schedule)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_adamw_rises_to_the_peak_and_falls_to_zero(decay):
    """Fails when the warmup starts at 0, misses the peak, is a step too long, or the fall ends early or late."""
    r = rates(20, warmup=4, decay=decay)
    np.testing.assert_allclose(r[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    for t in range(4, 21):
        x = (t - 4) / 16
        expected = {"cosine": (1 + math.cos(math.pi * x)) / 2, "linear": 1 - x, "constant": 1.0}[decay]
        np.testing.assert_allclose(r[t], expected, rtol=1e-5, atol=1e-7)
    assert 0 < r[19], "the last update of the run still moves"


def test_warmup_in_steps_or_as_a_share():
    """Fails when a share is not of the run, or is rounded down; 0.2 % of a small set's run is one whole step."""
    for share, num_steps, steps in [
        (0.1, 50, 5),
        (0.002, 1000, 2),
        (0.002, 804, 2),
        (0.002, 100, 1),
        (0.5, 3, 2),
        (0.0, 9, 0),
    ]:
        config = OptimizerConfig(warmup=share)
        assert config.warmup_steps(num_steps) == steps
        assert math.isclose(
            OptimizerConfig(kind="openai_adam", warmup=share).warmup_steps(num_steps), share * num_steps
        )
    np.testing.assert_array_equal(rates(50, warmup=0.1), rates(50, warmup=5.0))
    np.testing.assert_array_equal(rates(100, warmup=0.002, decay="linear"), rates(100, warmup=1, decay="linear"))
    assert rates(100, warmup=0.002, decay="linear")[0] == 1.0  # a warmup of one step is at the peak
    assert rates(100, warmup=0, decay="linear")[0] == 1.0
    assert rates(1, warmup=0, decay="linear")[0] == 1.0 and rates(0, warmup=0)[0] == 1.0  # nothing divides by 0
    assert OptimizerConfig().warmup_steps(10**6) == 2000  # the paper's, section 4.1


def test_a_warmup_longer_than_the_run_never_reaches_the_peak():
    r = rates(10, warmup=40)
    np.testing.assert_allclose(r[:10], np.arange(1, 11) / 40, rtol=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "num_steps"), [(0.002, 804), (0.002, 24), (0.3, 10), (2.0, 10), (0.0, 10)])
def test_openai_schedules_are_the_codes(decay, warmup, num_steps):
    """Fails when x is not measured from the start of the run, or the peak rate is lost without a warmup."""
    share = warmup if warmup < 1 else warmup / num_steps
    r = rates(num_steps, kind="openai_adam", warmup=warmup, decay=decay)
    first = 0 if share else 1  # without a warmup the code divides 0 by 0 there
    for t in range(first, num_steps):
        expected = openai_adam.SCHEDULES[decay](t / num_steps, share)
        np.testing.assert_allclose(r[t], expected, rtol=1e-5, atol=1e-6, err_msg=f"update {t}")
    assert r[0] == (0.0 if share else 1.0)  # the first update of a warmup does nothing
    twice = rate_of(OptimizerConfig(kind="openai_adam", peak_lr=2.0, warmup=warmup, decay=decay), num_steps)
    np.testing.assert_allclose([float(twice(t)) for t in range(num_steps)], 2 * r[:num_steps], rtol=1e-6)


def test_which_rates_depend_on_the_length_of_the_run():
    """Fails when a run could go on longer under the same name with other rates than it was started with."""
    assert OptimizerConfig().depends_on_num_steps()
    assert OptimizerConfig(decay="linear", warmup=0).depends_on_num_steps()
    assert OptimizerConfig(decay="constant", warmup=0.1).depends_on_num_steps()
    assert OptimizerConfig(kind="openai_adam", decay="constant").depends_on_num_steps()
    for warmup in (0, 100):
        config = OptimizerConfig(decay="constant", warmup=warmup)
        assert not config.depends_on_num_steps()
        for t in (0, 5, 99, 150):
            assert float(rate_of(config, 200)(t)) == float(rate_of(config, 10_000)(t))


def test_matrices_and_tables_are_decayed_by_their_axes():
    """Fails when decay goes by rank: stacked biases and gains have rank 2 or more, `qkv_bias` rank 4."""
    boxed = boxed_shapes(TOY)
    ranks = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)):
        ranks[path[-1].key] = len(leaf.shape)
    assert ranks["qkv_bias"] == 4 and ranks["scale"] == 2
    for path, rule in jax.tree_util.tree_leaves_with_path(parameter_rules(boxed)):
        assert rule.decayed == path[-1].key.endswith(("kernel", "tokens", "positions")), path


@pytest.fixture(scope="module")
def small():
    """A matrix and a vector, and ten gradients, some larger than the clip."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(5)}
    size = lambda t: 0.02 if t % 3 else 2.0  # noqa: E731
    gradients = [{k: size(t) * rng.standard_normal(x.shape) for k, x in params.items()} for t in range(10)]
    return params, gradients


SMALL = {
    "w": nn.LogicallyPartitioned(jnp.zeros((3, 4)), ("width", "classes")),
    "b": nn.LogicallyPartitioned(jnp.zeros(5), ("classes",)),
}


def run_optimizer(config: OptimizerConfig, params, gradients, num_steps: int):
    optimizer, schedule = make_optimizer(config, SMALL), schedule_of(config, num_steps)
    params = jax.tree.map(jnp.float32, params)
    state = optimizer.transformation.init(params)
    for t, gradient in enumerate(gradients):
        gradient, rate = jax.tree.map(jnp.float32, gradient), optimizer.rate(t, schedule)
        updates, state = optimizer.transformation.update(gradient, state, params, learning_rate=rate)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0.002, 0.35])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_ten_steps_of_openai_adam(small, decay, warmup, clip_norm):
    """Fails when eps is put elsewhere, decay misses the bias correction, or the clip comes after the moments."""
    params, gradients = small
    config = OptimizerConfig(
        kind="openai_adam", peak_lr=0.05, warmup=warmup, decay=decay, eps=1e-3, weight_decay=0.3, clip_norm=clip_norm
    )
    wanted = openai_adam.run(
        params,
        lambda _, t: gradients[t],
        num_steps=10,
        peak_lr=0.05,
        schedule=decay,
        warmup=warmup,
        e=1e-3,
        l2=0.3,
        max_grad_norm=clip_norm,
    )
    found = run_optimizer(config, params, gradients, 10)
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=1e-5)
        assert np.abs(wanted[name] - params[name]).max() > 0.05


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_ten_steps_of_adamw(small, clip_norm):
    """Fails when decay is not decoupled, is applied to the vector, or the moments are not corrected."""
    params, gradients = small
    config = OptimizerConfig(peak_lr=0.05, warmup=3, decay="linear", eps=1e-3, weight_decay=0.3, clip_norm=clip_norm)
    p = {name: x.copy() for name, x in params.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for t, g in enumerate(gradients):
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
        rate = 0.05 * ((t + 1) / 3 if t < 3 else 1 - (t - 3) / 7)
        for name in p:
            m[name] = 0.9 * m[name] + 0.1 * scale * g[name]
            v[name] = 0.999 * v[name] + 0.001 * (scale * g[name]) ** 2
            direction = m[name] / (1 - 0.9 ** (t + 1)) / (np.sqrt(v[name] / (1 - 0.999 ** (t + 1))) + 1e-3)
            p[name] = p[name] - rate * (direction + (0.3 * p[name] if name == "w" else 0.0))
    found = run_optimizer(config, params, gradients, 10)
    for name in p:
        np.testing.assert_allclose(found[name], p[name], rtol=2e-5, atol=1e-5)


def test_ten_steps_of_bert_adamw(small):
    """Fails when a bias is corrected, eps stands inside the root, the first update moves, or the warmup is added to."""
    params, gradients = small
    config = OptimizerConfig(
        kind="bert_adamw", peak_lr=0.05, warmup=0.39, decay="linear", eps=1e-3, weight_decay=0.3, clip_norm=1.0
    )
    p = {name: x.copy() for name, x in params.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for t, g in enumerate(gradients):
        scale = 1.0 / max(1.0, math.sqrt(sum((x**2).sum() for x in g.values())))
        rate = 0.05 * (t / 3 if t < 3 else 1 - t / 10)
        for name in p:
            m[name] = 0.9 * m[name] + 0.1 * scale * g[name]
            v[name] = 0.999 * v[name] + 0.001 * (scale * g[name]) ** 2
            decay = 0.3 * p[name] if name == "w" else 0.0
            p[name] = p[name] - rate * (m[name] / (np.sqrt(v[name]) + 1e-3) + decay)
    found = run_optimizer(config, params, gradients, 10)
    for name in p:
        np.testing.assert_allclose(found[name], p[name], rtol=2e-5, atol=1e-5)
        assert np.abs(p[name] - params[name]).max() > 0.05
    same = run_optimizer(config, params, gradients[:1], 10)
    np.testing.assert_array_equal(same["w"], np.float32(params["w"]))


def test_adamw_is_that_of_optax(small):
    params, gradients = small
    config = OptimizerConfig(peak_lr=0.05, warmup=3, decay="cosine", weight_decay=0.3, clip_norm=1.0)
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate_of(config, 10), 0.9, 0.999, 1e-8, weight_decay=0.3, mask={"w": True, "b": False}),
    )
    wanted = jax.tree.map(jnp.float32, params)
    state = theirs.init(wanted)
    for gradient in gradients:
        updates, state = theirs.update(jax.tree.map(jnp.float32, gradient), state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    found = run_optimizer(config, params, gradients, 10)
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "openai_adam", "bert_adamw"])
def test_a_refused_gradient_leaves_the_state(small, kind):
    params, gradients = small
    config = OptimizerConfig(kind=kind, warmup=0)
    update, rate = make_optimizer(config, SMALL).transformation.update, jnp.float32(0.1)
    params, good = jax.tree.map(jnp.float32, params), jax.tree.map(jnp.float32, gradients[0])
    _, before = update(good, make_optimizer(config, SMALL).transformation.init(params), params, learning_rate=rate)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.nan), good)
    _, after = update(bad, before, params, learning_rate=rate, applied=jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(before.count) == 1


@pytest.mark.parametrize(("field", "value"), [("peak_lr", -1.0), ("peak_lr", float("nan")), ("warmup", -0.1)])
def test_values_that_cannot_be_meant_are_refused(field, value):
    with pytest.raises(InputError, match=f"optimizer.{field}"):
        checked(OptimizerConfig(**{field: value}), "optimizer")
