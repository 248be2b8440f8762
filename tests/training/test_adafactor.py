"""Adafactor against algorithm 4 of Shazeer and Stern (2018) in NumPy, and against optax on single matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as Spec

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import abstract_state, make_fresh_state

# name -> logical axes, shape, axes of the stack, of the rows and of the columns (none: a moment for each entry)
LEAVES = {
    "qkv_kernel": (("layers", "width", "qkv", "heads", "head_width"), (2, 128, 3, 4, 40), (0, 2), (1,), (3, 4)),
    "out_kernel": (("layers", "heads", "head_width_in", "whole_width"), (2, 4, 40, 128), (0,), (1, 2), (3,)),
    "qkv_bias": (("layers", "qkv", "heads", "head_width"), (2, 3, 4, 40), (0, 1), (2, 3), ()),
    "scale": (("layers", "norm"), (2, 128), (0,), (1,), ()),
    "tokens": (("vocabulary", "width"), (300, 128), (), (0,), (1,)),
    "types": (("types", "width"), (2, 128), (), (0, 1), ()),
    "gamma": ((), (), (), (), ()),
}
STEPS, RATE = 5, 0.02


def statement(p, gradients):
    """Algorithm 4 on one matrix or vector, in sums as the paper has it; `None` in place of R and C for a vector."""
    matrix = p.ndim == 2
    r, c, v = 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        b = 1 - t**-0.8
        square = g**2 + 1e-30
        if matrix:
            r, c = b * r + (1 - b) * square.sum(1), b * c + (1 - b) * square.sum(0)
            v = np.outer(r, c) / r.sum()
        else:
            v = b * v + (1 - b) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt((u**2).mean()) / 1.0)
        p = p - max(1e-3, np.sqrt((p**2).mean())) * RATE * u
    return p


def expected(name, p, gradients):
    """Each stacked matrix or vector by itself."""
    _, _, stack, rows, columns = LEAVES[name]
    order = stack + rows + columns
    sizes = [int(np.prod([p.shape[axis] for axis in axes])) for axes in ((rows, columns) if columns else (rows,))]

    def parts(x):
        return np.float64(x).transpose(order).reshape(-1, *sizes)

    values, each = parts(p), [parts(g) for g in gradients]
    new = np.stack([statement(values[k], [g[k] for g in each]) for k in range(len(values))])
    return new.reshape([p.shape[axis] for axis in order]).transpose(np.argsort(order))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    size = {"scale": 1.0, "gamma": 1.0, "qkv_bias": 1e-5}  # a bias below eps2
    params = {
        name: np.asarray(size.get(name, 0.3) * rng.standard_normal(leaf[1]), np.float32)
        for name, leaf in LEAVES.items()
    }
    params["out_kernel"][1] *= 30.0  # layers of other sizes, and gradients of other sizes
    gradients = [
        {name: np.float32(rng.standard_normal(np.shape(p))) for name, p in params.items()} for _ in range(STEPS)
    ]
    for t, gradient in enumerate(gradients):
        for name in gradient:
            gradient[name] = gradient[name] * np.float32([1.0, 5.0, 0.1][t % 3])
        gradient["qkv_kernel"][:, :, 1] *= 100.0
    return params, gradients


def boxed(names=tuple(LEAVES)):
    return {
        name: nn.LogicallyPartitioned(jax.ShapeDtypeStruct(LEAVES[name][1], jnp.float32), LEAVES[name][0])
        for name in names
    }


CONFIG = OptimizerConfig(kind="adafactor", peak_lr=RATE, weight_decay=0.0, clip_norm=0.0)


def run(params, gradients):
    optimizer = make_optimizer(CONFIG, boxed(tuple(params)))
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.transformation.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.transformation.update(gradient, state, params, learning_rate=jnp.float32(RATE))
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state


@pytest.fixture(scope="module")
def trained(case):
    return run(*case)


@pytest.mark.parametrize("name", LEAVES)
def test_each_matrix_is_that_of_the_paper(case, trained, name):
    """Fails when moments, the clip or the size of a parameter are of several matrices, or b is late by an update."""
    params, gradients = case
    wanted = expected(name, params[name], [gradient[name] for gradient in gradients])
    moved = np.abs(wanted - params[name]).max()
    assert moved > 0
    np.testing.assert_allclose(trained[0][name], wanted, rtol=1e-5, atol=2e-5 * moved)


def test_a_matrix_is_that_of_optax(case, trained):
    params, gradients = case
    theirs = optax.adafactor(RATE)
    tokens = jnp.asarray(params["tokens"])
    state = theirs.init(tokens)
    for gradient in gradients:
        updates, state = theirs.update(jnp.asarray(gradient["tokens"]), state, tokens)
        tokens = optax.apply_updates(tokens, updates)
    np.testing.assert_allclose(trained[0]["tokens"], tokens, rtol=1e-5, atol=1e-6)


def test_moments_of_a_matrix_are_those_of_its_rows_and_columns(trained):
    """Fails when a large kernel has a moment for each entry, which is what Adafactor is meant to save."""
    state = trained[1]
    shapes = [{name: leaf.shape for name, leaf in tree.items() if hasattr(leaf, "shape")} for tree in state[1:]]
    assert shapes == [
        {"qkv_kernel": (2, 128, 3, 1, 1), "out_kernel": (2, 4, 40, 1), "tokens": (300, 1)},
        {"qkv_kernel": (2, 1, 3, 4, 40), "out_kernel": (2, 1, 1, 128), "tokens": (1, 128)},
        {name: LEAVES[name][1] for name in ("qkv_bias", "scale", "types", "gamma")},
    ]


def test_moments_are_sharded_like_their_parameters():
    """Fails when the moments of a sharded kernel are born whole on every device."""
    axes = {name: LEAVES[name][0] for name in ("tokens", "scale", "out_kernel")}

    def init(key):
        return {name: nn.LogicallyPartitioned(jnp.ones(LEAVES[name][1]), names) for name, names in axes.items()}

    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    optimizer = make_optimizer(CONFIG, jax.eval_shape(init, jax.random.key(0)))
    abstract = abstract_state(init, optimizer, mesh)
    state = make_fresh_state(init, optimizer, abstract, lambda: None)(0)
    found = {name: state.opt_state.v_row[name].sharding.spec for name in ("tokens", "out_kernel")}
    assert found == {"tokens": Spec("tensor", None), "out_kernel": Spec(None, "tensor", "fsdp", None)}
    assert state.opt_state.v_col["tokens"].sharding.spec == Spec(None, "fsdp")
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, abstract)
