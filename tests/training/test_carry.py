"""The carry: what a model remembers from one batch to the next, through micro-batches, bad steps and checkpoints.

The toy has one weight per column and remembers, of each row, the sum of the numbers it has seen so far.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy import KEEP_GRADIENT, SETTINGS, assert_trees_close, assert_trees_same, packed

from jaxlm.distributed.mesh import MeshConfig, make_mesh, to_devices, use_mesh
from jaxlm.objectives.language_model import reset_carry
from jaxlm.objectives.objective import Objective
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training.initialization import resume
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import (
    abstract_state,
    from_saved,
    joined_rows,
    make_eval_step,
    make_fresh_state,
    make_train_step,
    new_state,
    saved_part,
    settings_of,
    split_rows,
)
from jaxlm.training.validation import totals

ROWS, WIDTH, STEPS = 8, 3, 4
PARAMS = {"backbone": {"w": np.array([0.5, -1.0, 2.0], np.float32)}}


class Carry(NamedTuple):
    """Two leaves of two layers: the sum of each column, and of each row."""

    columns: jax.Array  # (2, B, W)
    total: jax.Array  # (2, B)


def empty_carry(rows: int = ROWS) -> Carry:
    return Carry(jnp.zeros((2, rows, WIDTH)), jnp.zeros((2, rows)))


def init_params(key):
    return {"backbone": {"w": nn.with_logical_partitioning(nn.initializers.ones_init(), ("width",))(key, (WIDTH,))}}


class Prepared(NamedTuple):
    """A batch and a factor per row, as masks would be."""

    x: jax.Array  # (B, W)
    factor: jax.Array  # (B,)


def running(prepared_batches: list) -> Objective:
    """The mean over rows of factor (w (x + what was seen before))^2; each batch prepared is put into the list."""

    def prepare(x_BW):
        prepared_batches.append(x_BW.shape)
        return Prepared(x_BW, 1.0 + jnp.arange(len(x_BW)))

    def weights(prepared):
        return {"square": jnp.sum(prepared.factor)}

    def sums(params, prepared, carry, key):
        after_BW = carry.columns[0] + prepared.x
        square_B = (after_BW @ params["backbone"]["w"] + carry.total[1]) ** 2
        columns = jnp.stack([after_BW, carry.columns[1] + 1])
        total = jnp.stack([carry.total[0] + 1, carry.total[1] + prepared.x.sum(1)])
        return {"square": jnp.sum(prepared.factor * square_B)}, jax.lax.stop_gradient(Carry(columns, total))

    return Objective({"square": 1.0}, weights, sums, prepare)


def batches(count: int = STEPS, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, rows, WIDTH)).astype(np.float32)


RUN = OptimizerConfig(peak_lr=0.05, warmup=0, decay="constant", weight_decay=0.0, clip_norm=0.0)


def train(micro_batches: int):
    """The losses, and the state after each step."""
    optimizer = make_optimizer(RUN, jax.eval_shape(init_params, jax.random.key(0)))
    prepared: list = []
    step = jax.jit(make_train_step(running(prepared), optimizer, micro_batches=micro_batches))
    state, losses, states = new_state(PARAMS, optimizer, 0, empty_carry()), [], []
    for batch in batches():
        state, metrics = step(state, batch, settings_of(RUN, STEPS))
        losses.append(float(metrics["loss"]))
        states.append(state)
    assert prepared == [(ROWS, WIDTH)], "a step prepares the whole batch, once"
    return losses, states


@pytest.fixture(scope="module")
def whole():
    return train(1)


def test_the_carry_is_what_was_seen(whole):
    """Fails when a step begins with another carry than the one before it left, or the loss does not see it."""
    seen = np.cumsum(batches(), axis=0)
    for number, state in enumerate(whole[1]):
        np.testing.assert_allclose(state.carry.columns[0], seen[number], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.carry.total[1], seen[number].sum(1), rtol=1e-5, atol=1e-5)
        assert np.all(state.carry.columns[1] == number + 1) and np.all(state.carry.total[0] == number + 1)
    before, params = whole[1][1], whole[1][1].params["backbone"]["w"]
    square = (seen[2] @ np.asarray(params) + np.asarray(before.carry.total[1])) ** 2
    factor = 1.0 + np.arange(ROWS)
    assert whole[0][2] == pytest.approx((factor * square).sum() / factor.sum(), rel=1e-5)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_carry_the_rows_that_they_have(whole, micro_batches):
    """Fails when a micro-batch gets another's carry or preparation, or rows come back in another order."""
    losses, states = train(micro_batches)
    assert losses == pytest.approx(whole[0], rel=1e-5)
    assert_trees_close(states[-1].params, whole[1][-1].params, relative=1e-5)
    for found, wanted in zip(states, whole[1], strict=True):
        assert_trees_same(found.carry, wanted.carry)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_bad_step_leaves_the_carry(micro_batches):
    """Fails when the carry goes on over a batch that the parameters do not."""
    step = jax.jit(make_train_step(running([]), KEEP_GRADIENT, micro_batches=micro_batches))
    first, second = batches(2)
    state, _ = step(new_state(PARAMS, KEEP_GRADIENT, 0, empty_carry()), first, SETTINGS)
    bad = second.copy()
    bad[5, 1] = np.inf
    halted, metrics = step(state, bad, SETTINGS)
    assert bool(metrics["halted"]) and not np.isfinite(float(metrics["loss"]))
    assert_trees_same(halted.carry, state.carry)
    still, metrics = step(halted, second, SETTINGS)
    assert bool(metrics["halted"]) and np.isfinite(float(metrics["loss"]))
    assert_trees_same(still.carry, state.carry)


def test_a_checkpoint_has_the_carry_where_there_is_one(whole):
    """Fails when a resumed run begins with an empty carry, or a model without one gets a leaf in its checkpoints."""
    state = whole[1][-1]
    saved = saved_part(state)
    assert set(saved) == {"step", "params", "opt_state", "carry"}
    assert_trees_same(from_saved(saved, state, 0), state)
    without = state.replace(carry=None)
    assert set(saved_part(without)) == {"step", "params", "opt_state"}
    assert from_saved(saved_part(without), without, 0).carry is None


def test_a_carry_of_another_dtype_is_converted(whole, tmp_path):
    """Fails when a run cannot go on with another compute dtype, or the carry changes in more than its rounding."""
    state = whole[1][-1]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(STEPS, saved_part(state), config={})
        checkpoints.wait()
        other = state.carry._replace(columns=state.carry.columns.astype(jnp.bfloat16))
        abstract = jax.eval_shape(lambda: state.replace(carry=other))
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
        found, notes = resume(checkpoints, abstract, 0)
    assert_trees_same(found.replace(carry=None), state.replace(carry=None))
    assert_trees_same(found.carry, other)
    assert len(notes) == 1 and "converted from float32 to bfloat16" in notes[0]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_splitting_and_joining_rows(axis, parts):
    """Fails when the two are not inverse, or row r does not go to part r % parts."""
    rng = np.random.default_rng(0)
    shapes = {"vector": (8,), "matrix": (8, 5), "cube": (8, 3, 2)}
    tree = {name: jnp.asarray(rng.random((3,) * axis + shape)) for name, shape in shapes.items()} | {"none": None}
    split = split_rows(tree, axis, parts)
    for name in shapes:
        for part in range(parts):
            wanted = np.asarray(tree[name])[(slice(None),) * axis + (slice(part, None, parts),)]
            np.testing.assert_array_equal(split[name][part], wanted)
    assert_trees_same(joined_rows(split, axis), tree)
    assert split_rows(None, axis, parts) is None


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices; tests/conftest.py asks the CPU for them")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_carry_lies_where_the_rows_lie(micro_batches):
    """Fails when the carry is not sharded as the batch's rows are, or its sharding changes a number."""
    mesh, rows = make_mesh(MeshConfig(data=4, fsdp=2)), 2 * ROWS

    def carry():
        return empty_carry(rows)

    def run(placed: bool):
        abstract = abstract_state(init_params, KEEP_GRADIENT, mesh, carry)
        state = make_fresh_state(init_params, KEEP_GRADIENT, abstract, carry)(0)
        if placed:
            for leaf, batch_axis in ((state.carry.columns, 1), (state.carry.total, 1)):
                assert leaf.addressable_shards[0].data.shape[batch_axis] == rows // 8
            assert all(leaf.sharding.spec[0] is None for leaf in state.carry)
        else:
            state = jax.device_put(jax.device_get(state), jax.devices()[0])
        step = make_train_step(running([]), KEEP_GRADIENT, micro_batches=micro_batches)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        step = jax.jit(step, out_shardings=(shardings, None)) if placed else jax.jit(step)
        for batch in batches(rows=rows):
            state, metrics = step(state, to_devices(batch, mesh, rows) if placed else batch, SETTINGS)
        return state, float(metrics["loss"])

    with use_mesh(mesh):
        found, loss = run(placed=True)
        assert found.carry.columns.addressable_shards[0].data.shape == (2, rows // 8, WIDTH)
    wanted, wanted_loss = run(placed=False)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert_trees_same(jax.device_get(found.carry), jax.device_get(wanted.carry))


def test_an_evaluation_carries_too():
    """Fails when an evaluation forgets the batch before, or prepares a batch more than once."""
    prepared: list = []
    step = jax.jit(make_eval_step(running(prepared)))
    found = totals(step, PARAMS, batches(), empty_carry())
    assert prepared == [(ROWS, WIDTH)]
    seen = np.cumsum(batches().astype(np.float64), axis=0)
    before = np.concatenate([np.zeros((1, ROWS)), seen.sum(-1)[:-1]])
    factor = 1.0 + np.arange(ROWS)
    wanted = (factor * (seen @ PARAMS["backbone"]["w"] + before) ** 2).sum()
    assert found["square"] == pytest.approx((wanted, STEPS * factor.sum()), rel=1e-5)
    _, carry = step(PARAMS, batches()[0], empty_carry())
    assert_trees_close(carry.columns[0], seen[0], relative=1e-6)


def test_rows_that_begin_a_stream_begin_empty():
    """Fails when a new stream goes on from the one before it in that row, or another row is emptied."""
    begins = np.arange(ROWS) % 3 == 1
    carry = Carry(jnp.ones((2, ROWS, WIDTH)), jnp.full((2, ROWS), 2.0))
    found = reset_carry(carry, packed(ROWS).replace(begins=begins))
    np.testing.assert_array_equal(found.columns, np.broadcast_to(~begins[:, None], (2, ROWS, WIDTH)))
    np.testing.assert_array_equal(found.total, np.broadcast_to(2.0 * ~begins, (2, ROWS)))
    assert reset_carry(carry, packed(ROWS)) is carry and reset_carry(None, packed(ROWS).replace(begins=begins)) is None
