"""SGD, Adagrad and Adafactor against statements in NumPy, and groups of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from optax import tree

from jaxlm.errors import InputError
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training.optimizer import OptimizerConfig, ParameterGroup, make_optimizer, parameter_rules

AXES = {"blocks": {"kernel": ("layers", "width", "feed_forward"), "bias": ("layers", "feed_forward")}}
AXES |= {"head": {"kernel": ("width", "classes")}}
SHAPES = {"blocks": {"kernel": (3, 4, 5), "bias": (3, 5)}, "head": {"kernel": (4, 2)}}
NAMES = ("blocks/kernel", "blocks/bias", "head/kernel")
STEPS, RATE = 8, 0.05


def is_tuple(leaf) -> bool:
    return isinstance(leaf, tuple)


def boxed(axes, shapes):
    def box(names, shape):
        return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)

    return jax.tree.map(box, axes, shapes, is_leaf=is_tuple)


def random_tree(rng, shapes, size=1.0):
    return jax.tree.map(lambda shape: np.float32(size * rng.standard_normal(shape)), shapes, is_leaf=is_tuple)


def flat(params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(x, np.float64) for path, x in leaves}


@pytest.fixture(scope="module")
def case():
    """Parameters and gradients, some of which are clipped."""
    rng = np.random.default_rng(0)
    return random_tree(rng, SHAPES), [random_tree(rng, SHAPES, 1.0 if t % 3 else 0.1) for t in range(STEPS)]


def run(config: OptimizerConfig, params, gradients, *, axes=AXES, groups=()):
    """Parameters after all updates, and the last state, of a jitted update at a constant rate."""
    shapes = jax.tree.map(np.shape, params)
    optimizer = make_optimizer(config, boxed(axes, shapes), groups)

    @jax.jit
    def step(params, state, gradient, rate):
        updates, new = optimizer.transformation.update(gradient, state, params, learning_rate=rate)
        return optax.apply_updates(params, updates), new, optimizer.direction(gradient, new, params), updates

    state = optimizer.transformation.init(params)
    for gradient in gradients:
        params, state, direction, updates = step(params, state, gradient, jnp.float32(RATE))
        if not groups and not config.weight_decay:
            jax.tree.map(lambda u, d: np.testing.assert_allclose(u, -RATE * d, rtol=1e-5), updates, direction)
    return params, state


def clipped(gradient, largest: float):
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    return {name: g * min(1.0, largest / norm) if largest else g for name, g in gradient.items()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("decay", "clip"), [(0.3, 2.0), (0.0, 0.0)])
def test_sgd(case, momentum, decay, clip):
    """Fails when the decay is decoupled, comes before the clip or meets a bias, or the momentum is damped."""
    params, gradients = case
    p, b = flat(params), {name: 0.0 for name in NAMES}
    for gradient in map(flat, gradients):
        for name, g in clipped(gradient, clip).items():
            g = g + decay * p[name] * name.endswith("kernel")
            b[name] = momentum * b[name] + g
            p[name] = p[name] - RATE * b[name]
    config = OptimizerConfig(kind="sgd", momentum=momentum, weight_decay=decay, clip_norm=clip)
    found, state = run(config, params, gradients)
    for name, value in flat(found).items():
        np.testing.assert_allclose(value, p[name], rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(state)) == (3 if momentum else 0)


@pytest.mark.parity
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_torch(case, momentum):
    torch = pytest.importorskip("torch", reason="parity with PyTorch: launch/setup.sh cpu parity")

    params, gradients = case
    leaves = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in flat(params).items()}
    kernels = [leaf for name, leaf in leaves.items() if name.endswith("kernel")]
    groups = [{"params": kernels, "weight_decay": 0.3}, {"params": [leaves["blocks/bias"]]}]
    theirs = torch.optim.SGD(groups, lr=RATE, momentum=momentum)
    for gradient in map(flat, gradients):
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(gradient[name])
        theirs.step()
    config = OptimizerConfig(kind="sgd", momentum=momentum, weight_decay=0.3, clip_norm=0.0)
    for name, value in flat(run(config, params, gradients)[0]).items():
        np.testing.assert_allclose(value, leaves[name].detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "eps"), [(1.0, 0.0), (0.1, 1e-3), (0.0, 1e-7)])
def test_adagrad(case, first, eps):
    """Fails when eps is inside the root, or the sum is taken into account one update late. Of ELMo: 1.0 and 0."""
    params, gradients = case
    p, s = flat(params), {name: first for name in NAMES}
    for gradient in map(flat, gradients):
        for name, g in gradient.items():
            s[name] = s[name] + g**2
            p[name] = p[name] - RATE * g / (np.sqrt(s[name]) + eps)
    config = OptimizerConfig(kind="adagrad", initial_accumulator=first, eps=eps, weight_decay=0.0, clip_norm=0.0)
    for name, value in flat(run(config, params, gradients)[0]).items():
        np.testing.assert_allclose(value, p[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_groups_have_rates_of_their_own(case, kind):
    """Fails when a factor reaches the moments, is given to the wrong layer, or misses the decay."""
    params, gradients = case
    config = OptimizerConfig(kind=kind, weight_decay=0.3, clip_norm=0.0)
    groups = (ParameterGroup("head/.*", 0.5), ParameterGroup("blocks/.*", (0.25, 0.5, 2.0)))
    plain, _ = run(config, params, gradients[:1])
    found, _ = run(config, params, gradients[:1], groups=groups)
    moved, wanted = tree.sub(found, params), tree.sub(plain, params)
    np.testing.assert_allclose(moved["head"]["kernel"], 0.5 * wanted["head"]["kernel"], rtol=1e-4, atol=1e-6)
    for layer, rate in enumerate((0.25, 0.5, 2.0)):
        for name in ("kernel", "bias"):
            ours, plain_one = moved["blocks"][name][layer], wanted["blocks"][name][layer]
            np.testing.assert_allclose(ours, rate * plain_one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "openai_adam", "sgd", "adagrad"])
def test_a_frozen_group_stays_and_is_not_seen(case, kind):
    """Fails when a frozen parameter is decayed, has state, or counts in the norm that is clipped."""
    params, gradients = case
    config = OptimizerConfig(kind=kind, weight_decay=0.3, momentum=0.9 if kind == "sgd" else 0.0)
    found, state = run(config, params, gradients, groups=(ParameterGroup("blocks/.*", rate=0.0),))
    jax.tree.map(np.testing.assert_array_equal, found["blocks"], params["blocks"])
    heads = [{"head": gradient["head"]} for gradient in gradients]
    alone, own = run(config, {"head": params["head"]}, heads, axes={"head": AXES["head"]})
    np.testing.assert_array_equal(found["head"]["kernel"], alone["head"]["kernel"])
    names = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(s)] for s in (state, own)]
    assert names[0] == names[1]


def test_the_first_group_that_matches_decides():
    shapes = boxed(AXES, SHAPES)
    rules = parameter_rules(shapes, (ParameterGroup("head/kernel", 2.0), ParameterGroup(".*", 0.0)))
    assert rules["head"]["kernel"].rate == 2.0 and not rules["head"]["kernel"].frozen
    assert rules["blocks"]["bias"].frozen
    for group, said in [
        (ParameterGroup("heads/.*"), "must match a parameter"),
        (ParameterGroup("head/.*", (1.0, 2.0, 3.0)), "'head/.*': rate must have a factor"),
        (ParameterGroup("blocks/.*", (1.0, 2.0)), "each of the 3 layers of blocks/bias, got 2"),
    ]:
        with pytest.raises(InputError, match=said):
            parameter_rules(shapes, (group,))


def test_it_is_an_optax_transformation(case):
    params, gradients = case
    optimizer = make_optimizer(OptimizerConfig(), boxed(AXES, SHAPES))
    assert isinstance(optimizer.transformation, optax.GradientTransformationExtraArgs)
    chained = optax.chain(optimizer.transformation, optax.scale(2.0))
    state = chained.init(params)
    rate = {"learning_rate": jnp.float32(0.1)}
    twice, _ = chained.update(gradients[0], state, params, **rate)
    once, _ = optimizer.transformation.update(gradients[0], state[0], params, **rate)
    jax.tree.map(np.testing.assert_array_equal, twice, tree.scale(2.0, once))


@pytest.mark.parametrize(("kind", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adagrad", 0.0), ("adafactor", 0.0)])
def test_states_are_saved_and_restored(case, tmp_path, kind, momentum):
    """Fails when an empty node or an empty state is lost in a checkpoint, or comes back as something else."""
    config = OptimizerConfig(kind=kind, momentum=momentum)
    groups = (ParameterGroup("head/.*", 0.0),)
    saved = dict(zip(("params", "opt_state"), run(config, *case, groups=groups), strict=True))
    with Checkpoints(tmp_path / "checkpoints", keep_newest=1) as checkpoints:
        checkpoints.save(1, saved, config={})
        checkpoints.wait()
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
        restored = checkpoints.restore(abstract).state
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
