"""What a GPT's states may depend on: earlier tokens of the same document, nothing else, however it is run."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import LENGTH, STILL, TOY, boxed_shapes, empty_params, inputs_of, packed, random_params, states_fn, windows

from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.gpt import GPT1
from jaxlm.models.gpt.model import empty_cache
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution


@pytest.fixture(scope="module")
def params():
    return random_params(STILL)


@pytest.fixture(scope="module")
def states():
    return states_fn(STILL)


@pytest.fixture(scope="module")
def with_dropout(params):
    return np.asarray(states_fn(TOY)(params, packed(4), jax.random.key(7)))


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norms_use_the_configs_eps(eps):
    """Fails when eps is forgotten or another: with a variance of 1e-6 it decides the result."""
    config = replace(STILL, norm_eps=eps, num_layers=1)
    x = 1e-3 * np.random.default_rng(0).standard_normal((STILL.vocab_size, STILL.width))
    params = tree_with(empty_params(config), "backbone", "embeddings", "tokens", x.astype(np.float32))
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)  # noqa: E731
    batch = windows(2)
    np.testing.assert_allclose(states_fn(config)(params, batch), norm(norm(x[batch.ids])), rtol=1e-3, atol=1e-5)


def products(jaxpr) -> int:
    """The matrix products in a program, those in its loops and rules counted once."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "dot_general"
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            part = getattr(value, "jaxpr", value)
            if hasattr(part, "eqns"):
                found += products(part)
    return found


def test_recomputing_all_but_products_makes_attentions_alone_again(params):
    """Fails when a rule of a product hides it from `remat dots`, so that every product is made twice."""
    batch = packed(2)

    def count(remat):
        model = build(STILL, Execution(remat=remat, unroll=1))

        def loss(params):
            return jnp.sum(model(params, inputs_of(batch)).states)

        return products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)

    scores_and_sums = 2
    assert count("dots") == count("none") + scores_and_sums
    assert count("full") > count("dots") + 4  # q, k, v and the feed-forward's first: what later products are made from


def test_causality_and_segments_by_gradient(params):
    """Fails when the gradient of one state reaches the embedding of a token it must not see, or misses one it must."""
    batch = packed(4)
    ids = np.arange(4 * LENGTH, dtype=np.int32).reshape(4, LENGTH)  # every place has a token of its own
    assert ids.max() < STILL.vocab_size
    model = build(STILL)
    row = np.random.default_rng(0).standard_normal(STILL.width).astype(np.float32)

    def one_state(params, at):
        h = model(params, inputs_of(batch.replace(ids=ids))).states
        return jnp.sum(h[:, at] @ row)

    gradient = jax.jit(jax.grad(one_state))
    for at in (0, 4, 9, LENGTH - 1):
        tokens = np.asarray(gradient(params, at)["backbone"]["embeddings"]["tokens"]).reshape(4, LENGTH, -1)
        seen = np.abs(tokens).max(-1) > 0
        expected = (batch.segments == batch.segments[:, at : at + 1]) & (np.arange(LENGTH) <= at)
        np.testing.assert_array_equal(seen, expected)


def test_packed_rows_equal_separate_rows(params, states):
    """Fails when a document's states depend on where in a row it stands, or on what else is packed there."""
    batch = packed(8)
    together = np.asarray(states(params, batch))
    model = jax.jit(build(STILL))
    for row in range(8):
        for segment in (1, 2):
            places = np.flatnonzero(batch.segments[row] == segment)
            ids = np.zeros((1, LENGTH), np.int32)  # a row of its own, padded at the end
            ids[0, : len(places)] = batch.ids[row, places]
            positions = np.arange(LENGTH, dtype=np.int32)[None]
            alone = np.asarray(model(params, Inputs(ids, positions)).states)[0, : len(places)]
            np.testing.assert_allclose(together[row, places], alone, rtol=1e-5, atol=1e-5)


def test_positions_are_used_as_given(params, states):
    """Fails when the position table is indexed by the place in the row instead of `positions`."""
    batch = windows(2)
    moved = batch.replace(positions=batch.positions[:, ::-1])
    assert np.abs(np.asarray(states(params, batch)) - np.asarray(states(params, moved))).max() > 0.1
    table = params["backbone"]["embeddings"]["positions"]
    reversed_table = {"tokens": params["backbone"]["embeddings"]["tokens"], "positions": table[::-1]}
    turned = {"backbone": params["backbone"] | {"embeddings": reversed_table}}
    np.testing.assert_allclose(states(turned, moved), states(params, batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("steps", [[1] * LENGTH, [7, 1, 1, 4, 3]])
def test_decoding_with_a_cache_equals_the_full_pass(params, states, steps, unroll):
    """Fails when a cached key lands at the wrong place or layer, or a query sees the empty rest of the cache."""
    batch = windows(3)
    model = build(STILL, Execution(unroll=unroll))

    @jax.jit
    def decode(cache, ids, positions):
        outputs = model(params, Inputs(ids, positions), cache)
        return outputs.states, outputs.carry

    cache, found, start = empty_cache(STILL, 3, LENGTH + 5, jnp.float32), [], 0
    for count in steps:
        place = slice(start, start + count)
        h, cache = decode(cache, batch.ids[:, place], batch.positions[:, place])
        found.append(h)
        start += count
    np.testing.assert_allclose(np.concatenate(found, axis=1), states(params, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "execution",
    [Execution(remat="dots"), Execution(remat="full", unroll=1), Execution(unroll=1)],
    ids=lambda e: f"{e.remat}-{e.unroll}",
)
def test_how_it_runs_does_not_change_dropout(params, with_dropout, execution):
    """Fails when recomputing or cutting the layer loop draws other masks: resuming may change either."""
    found = states_fn(TOY, execution)(params, packed(4), jax.random.key(7))
    np.testing.assert_allclose(found, with_dropout, rtol=1e-5, atol=1e-5)


def test_bfloat16_arithmetic_float32_parameters(params, states):
    """Fails when bfloat16 states stray from float32 ones by more than their eight bits allow."""
    batch = windows(2)
    found = states_fn(STILL, Execution(dtype="bfloat16"))(params, batch)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32) - np.asarray(states(params, batch))).mean() < 0.03
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_without_dropout_training_is_evaluation(params, states):
    batch = windows(2)
    np.testing.assert_array_equal(states(params, batch, jax.random.key(0)), states(params, batch))


# Dropout, seen through norms: with kernels of zeros a state is the norm of {0, 1 / (1 - rate)}, two values whose lower
# one marks what was dropped. Each rate is different, so that no two can be swapped.

WIDE = replace(STILL, width=256, num_heads=128, feed_forward_width=8, num_layers=1)
RATES = {"embedding_dropout_rate": 0.15, "dropout_rate": 0.3, "attention_dropout_rate": 0.45}


def share_dropped(h: np.ndarray) -> float:
    """The share of the lower of two values, position by position; a position of one value has none dropped."""
    low, high = h.min(-1, keepdims=True), h.max(-1, keepdims=True)
    assert np.all((np.abs(h - low) < 1e-3) | (np.abs(h - high) < 1e-3)), "more than two values"
    return float(((h - low < 1e-3) & (high - low > 1e-3)).mean())


def tree_with(params, *path_and_value):
    *path, value = path_and_value
    if not path:
        return value
    return params | {path[0]: tree_with(params[path[0]], *path[1:], value)}


@pytest.mark.parametrize(
    ("rate_name", "path"),
    [
        ("embedding_dropout_rate", ("embeddings", "tokens")),
        ("dropout_rate", ("blocks", "attention", "out_bias")),
        ("dropout_rate", ("blocks", "feed_forward", "out_bias")),
    ],
)
def test_each_rate_drops_where_it_says(rate_name, path):
    """Fails when a rate is applied to another place, twice, or not at all."""
    config = replace(WIDE, **RATES)
    batch = windows(32)
    params = empty_params(config)
    leaf = params["backbone"]
    for name in path:
        leaf = leaf[name]
    params = tree_with(params, "backbone", *path, jnp.ones_like(leaf))
    if path[-1] == "tokens":  # only the embedding's own dropout is left on
        config = replace(WIDE, embedding_dropout_rate=RATES[rate_name])
    found = share_dropped(np.asarray(states_fn(config)(params, batch, jax.random.key(1))))
    rate = RATES[rate_name]
    assert abs(found - rate) < 5 * math.sqrt(rate * (1 - rate) / (32 * LENGTH * config.width))


def test_the_residual_itself_is_never_dropped():
    """Fails when dropout is put over the sum instead of the branch: with branches of 0 there is nothing to drop."""
    config = replace(WIDE, dropout_rate=0.5, attention_dropout_rate=0.5)
    tokens = np.random.default_rng(0).standard_normal((config.vocab_size, config.width), np.float32)
    params = tree_with(empty_params(config), "backbone", "embeddings", "tokens", tokens)
    states, batch = states_fn(config), windows(2)
    np.testing.assert_allclose(states(params, batch, jax.random.key(0)), states(params, batch), rtol=1e-5, atol=1e-5)


def test_attention_rate_drops_weights():
    """Fails when attention's rate is not the one used on its weights: a lone key is dropped whole, head by head."""
    config = replace(WIDE, **RATES | {"dropout_rate": 0.0, "embedding_dropout_rate": 0.0})
    batch = windows(2048, length=1)
    params = empty_params(config)
    attention = params["backbone"]["blocks"]["attention"]
    bias = attention["qkv_bias"].copy()
    bias[:, 2] = 1  # the values
    identity = jnp.eye(config.width).reshape(attention["out_kernel"].shape)
    params = tree_with(
        params, "backbone", "blocks", "attention", attention | {"qkv_bias": bias, "out_kernel": identity}
    )
    found = share_dropped(np.asarray(states_fn(config)(params, batch, jax.random.key(1))))
    rate = RATES["attention_dropout_rate"]
    assert abs(found - rate) < 5 * math.sqrt(rate * (1 - rate) / (2048 * config.num_heads))


def test_layers_draw_masks_of_their_own():
    """Fails when all layers share one key: a position of two layers would then hold two values, not four."""
    config = replace(WIDE, num_layers=2, dropout_rate=0.3)
    params = empty_params(config)
    bias = jnp.ones_like(params["backbone"]["blocks"]["attention"]["out_bias"])
    params = tree_with(params, "backbone", "blocks", "attention", "out_bias", bias)
    h = np.asarray(states_fn(config)(params, windows(1), jax.random.key(0)))[0]
    assert {len(np.unique(np.round(position, 3))) for position in h} == {4}


def test_embedding_dropout_of_the_sum_and_of_the_tables():
    """Fails when `one` does not share its mask with the softmax and between all uses of a token, or `two` does; when
    `one` does not give the softmax the positions' rows."""
    config = replace(STILL, embedding_dropout_rate=0.3)
    params = random_params(config)
    ids = np.tile(windows(1).ids, (2, 1))  # the same row twice
    tables = params["backbone"]["embeddings"]

    def run(mode):
        model = build(replace(config, tables=mode))

        @jax.jit
        def apply(params, key):
            outputs = model(params, Inputs(ids, windows(2).positions), key=key)
            return outputs.states, outputs.output.tokens[0]

        return [np.asarray(x) for x in apply(params, jax.random.key(5))]

    h, table = run("two")
    np.testing.assert_array_equal(table, tables["tokens"])
    assert np.abs(h[0] - h[1]).max() > 0.1
    h, table = run("one")
    np.testing.assert_array_equal(h[0], h[1])
    dropped = table == 0
    assert abs(dropped.mean() - 0.3) < 5 * math.sqrt(0.21 / table.size)
    whole = np.concatenate([tables["tokens"], tables["positions"]])  # the softmax is over the positions' rows too
    np.testing.assert_allclose(table[~dropped], whole[~dropped] / 0.7, rtol=1e-4)


def test_gpt1_is_gpt1():
    """Fails when the published sizes change: 117 M parameters (section 4.1), of which the tables are 31.5 M."""
    GPT1.check()
    shapes = jax.tree.leaves(boxed_shapes(GPT1))
    assert sum(math.prod(leaf.shape) for leaf in shapes) == 40_478 * 768 + 512 * 768 + 12 * 7_087_872 == 116_534_784
    assert GPT1.num_positions == 512 and GPT1.norm_eps == 1e-5 and GPT1.init_std == 0.02
    assert {GPT1.dropout_rate, GPT1.embedding_dropout_rate, GPT1.attention_dropout_rate} == {0.1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 5}, "model.width must be divisible by model.num_heads 5, got 32"),
        ({"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        replace(TOY, **change).check()


def test_parameters_by_layer_give_the_same_states(params):
    """Fails when a layer reads the parameters of another one, or when the split changes a bit of the states."""
    model, inputs = build(STILL, Execution(dtype="float32")), inputs_of(packed(2))
    on_device = jax.device_put(params, jax.devices()[0])
    split = model.by_layer(on_device)
    assert [*map(type, split["backbone"]["blocks"])] == [dict] * STILL.num_layers
    found, expected = (jax.jit(lambda params: model(params, inputs).states)(some) for some in (split, on_device))
    np.testing.assert_array_equal(found, expected)
    assert model.by_layer(split) is split
    looped = build(STILL, Execution(dtype="float32", unroll=1))
    assert looped.by_layer(on_device) is on_device  # a loop reads stacked parameters


def test_execution_refuses_an_unroll_beyond_the_layers():
    assert Execution().layers_per_iteration(12) == 12  # on the CPU
    with pytest.raises(InputError, match="execution.unroll must be .*, got 13"):
        Execution(unroll=13).check(12)
    assert Execution().compute_dtype() == jnp.float32
