"""What BERT's states may depend on: every token of the same sequence, nothing else, however it is run."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy import KEEP_GRADIENT, SETTINGS, assert_trees_close, sums_of
from toy_pairs import (
    LENGTH,
    PLAIN,
    STILL_BERT,
    TOY_BERT,
    bert_shapes,
    inputs_of,
    one_by_one,
    pair_rows,
    pretraining,
    random_bert,
)

from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.bert import BERT_BASE, BERT_LARGE, TABLE_6, BertConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import make_train_step, new_state, settings_of

CAUSAL = replace(STILL_BERT, attention="causal")


@pytest.fixture(scope="module")
def params():
    return random_bert(STILL_BERT)


def states_of(config: BertConfig, execution: Execution = PLAIN):
    """Jitted (params, batch, key) -> states (B, L, D); with a key it is a training pass."""

    @jax.jit
    def states(params, batch, key=None):
        return build(config, execution)(params, inputs_of(batch), key=key).states

    return states


def layers_of(config: BertConfig, execution: Execution = PLAIN):
    """Jitted (params, inputs) -> the outputs with all layers."""
    return jax.jit(lambda params, inputs: build(config, execution)(params, inputs, layers=True))


@pytest.fixture(scope="module")
def states():
    return states_of(STILL_BERT)


@pytest.mark.parametrize("config", [STILL_BERT, CAUSAL], ids=lambda c: c.attention)
def test_what_a_state_sees_by_changing_one_token(params, config):
    """Fails when a pair sees another or its padding, a bidirectional state misses a side, a causal one sees right."""
    states, batch = states_of(config), pair_rows(6)
    base = np.asarray(states(params, batch))
    for at in (0, 6, 11, 17, LENGTH - 1):
        ids = np.array(batch.ids)
        ids[:, at] = (ids[:, at] + 1) % 64
        changed = np.abs(np.asarray(states(params, batch.replace(ids=ids))) - base).max(-1) > 0
        expected = batch.segments == batch.segments[:, at : at + 1]
        if config.attention == "causal":
            expected &= np.arange(LENGTH) >= at
        np.testing.assert_array_equal(changed, expected)


def test_packed_rows_equal_pairs_one_by_one(params, states):
    """Fails when a pair's states depend on where in a row it stands, or on what else is packed there."""
    packed = pair_rows(6)
    alone = one_by_one(packed, TOY_BERT.num_positions)
    together, apart = np.asarray(states(params, packed)), np.asarray(states(params, alone))
    number = 0
    for row in range(6):
        for pair in np.flatnonzero(packed.pair_weights[row]):
            inside = packed.segments[row] == pair + 1
            np.testing.assert_allclose(together[row, inside], apart[number, : inside.sum()], rtol=1e-5, atol=1e-5)
            number += 1


def test_positions_and_types_are_used_as_given(params, states):
    """Fails when a table is indexed by the place in the row, or types are left out: reversed tables must undo it."""
    batch = pair_rows(4)
    embeddings = params["backbone"]["embeddings"]
    for field, table, other in (
        ("positions", "positions", LENGTH - 1 - np.asarray(batch.positions)),
        ("types", "types", 1 - np.asarray(batch.types)),
    ):
        moved = batch.replace(**{field: other})
        assert np.abs(np.asarray(states(params, batch)) - np.asarray(states(params, moved))).max() > 0.1
        turned = embeddings | {table: embeddings[table][::-1]}
        turned = params | {"backbone": params["backbone"] | {"embeddings": turned}}
        np.testing.assert_allclose(states(turned, moved), states(params, batch), rtol=1e-5, atol=1e-5)


def test_without_types_and_segments(params, states):
    """Fails when None is not what it says: all of the first type, one sequence a row, no padding."""
    batch = pair_rows(3)
    plain = batch.replace(types=np.zeros_like(batch.types), segments=np.ones_like(batch.segments))
    found = jax.jit(build(STILL_BERT))(params, Inputs(batch.ids, batch.positions)).states
    np.testing.assert_allclose(found, states(params, plain), rtol=1e-5, atol=1e-5)


def test_all_hidden_states(params, states):
    """Fails when a layer is missing, out of order, or the first is not the embeddings' norm."""
    batch = pair_rows(3)
    outputs = layers_of(STILL_BERT)(params, inputs_of(batch))
    hidden = np.asarray(outputs.layers)
    np.testing.assert_array_equal(hidden[-1], outputs.states)
    assert jax.eval_shape(build(STILL_BERT), params, inputs_of(batch)).layers is None
    assert hidden.shape == (STILL_BERT.num_layers + 1, 3, LENGTH, STILL_BERT.width)
    np.testing.assert_allclose(hidden[-1], states(params, batch), rtol=1e-5, atol=1e-5)
    one = replace(STILL_BERT, num_layers=1)
    first = params["backbone"] | {"blocks": jax.tree.map(lambda x: x[:1], params["backbone"]["blocks"])}
    np.testing.assert_allclose(hidden[1], states_of(one)({"backbone": first}, batch), rtol=1e-5, atol=1e-5)
    tables = params["backbone"]["embeddings"]
    x = tables["tokens"][batch.ids] + tables["positions"][batch.positions] + tables["types"][batch.types]
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    np.testing.assert_allclose(hidden[0], x * tables["norm"]["scale"] + tables["norm"]["bias"], rtol=1e-4, atol=1e-4)
    for execution in (Execution(remat="full", unroll=1), Execution(remat="dots")):
        again = layers_of(STILL_BERT, execution)(params, inputs_of(batch)).layers
        np.testing.assert_allclose(again, hidden, rtol=1e-5, atol=1e-5)


def test_norms_use_the_configs_eps(params):
    """Fails when eps is forgotten or another: with tables of 1e-3 an eps of 0.3 decides the result."""
    names = ("tokens", "positions", "types")
    tables = params["backbone"]["embeddings"]
    tables = tables | {name: np.float32(1e-3) * tables[name] for name in names}
    batch = pair_rows(2)
    changed = {"backbone": params["backbone"] | {"embeddings": tables}}
    x = sum(tables[name][values] for name, values in zip(names, (batch.ids, batch.positions, batch.types), strict=True))
    for eps in (0.3, 1e-12):
        hidden = layers_of(replace(STILL_BERT, norm_eps=eps))(changed, inputs_of(batch)).layers
        wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        wanted = wanted * tables["norm"]["scale"] + tables["norm"]["bias"]
        np.testing.assert_allclose(hidden[0], wanted, rtol=1e-3, atol=1e-4)


# How it runs


def loss_and_gradient(params, config, execution=PLAIN, *, micro_batches=1, loss_chunks=0):
    objective = pretraining(config, execution, loss_chunks=loss_chunks)
    step = jax.jit(make_train_step(objective, KEEP_GRADIENT, micro_batches=micro_batches))
    state, metrics = step(new_state(params, KEEP_GRADIENT, 3), pair_rows(8), SETTINGS)
    names = ("loss", "masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy")
    return {name: float(metrics[name]) for name in names}, state.opt_state


@pytest.fixture(scope="module")
def still(params):
    return loss_and_gradient(params, STILL_BERT)


@pytest.fixture(scope="module")
def dropping(params):
    return loss_and_gradient(params, TOY_BERT)


@pytest.mark.parametrize("micro_batches", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_micro_batches_do_not_change_the_gradient(params, still, micro_batches):
    """Fails when MLM and NSP are divided piece by piece (masked tokens and pairs differ), or masks by micro-batch."""
    metrics, gradient = loss_and_gradient(params, STILL_BERT, micro_batches=micro_batches)
    assert metrics == pytest.approx(still[0], rel=1e-6)
    worst = assert_trees_close(gradient, still[1], relative=5e-6, absolute=1e-7)
    print(f"{micro_batches} micro-batches: largest difference of a gradient {worst:.2g}")


@pytest.mark.parametrize(
    ("execution", "loss_chunks"),
    [
        (Execution(remat="dots"), 1),
        (Execution(remat="full", unroll=1), 4),
        pytest.param(Execution(unroll=1), 2, marks=pytest.mark.campaign),
    ],
    ids=lambda x: f"{x.remat}-{x.unroll}" if isinstance(x, Execution) else f"chunks-{x}",
)
def test_recomputing_and_cutting_do_not_change_the_gradient(params, dropping, execution, loss_chunks):
    """Fails when the backward pass recomputes with other dropout masks, or a layer's gradient lands on another."""
    metrics, gradient = loss_and_gradient(params, TOY_BERT, execution, loss_chunks=loss_chunks)
    assert metrics == pytest.approx(dropping[0], rel=1e-6)
    assert_trees_close(gradient, dropping[1], relative=1e-5, absolute=1e-7)


def test_dropout_is_on_in_training(still, dropping):
    assert abs(still[0]["masked_lm_loss"] - dropping[0]["masked_lm_loss"]) > 1e-3
    assert abs(still[0]["next_sentence_loss"] - dropping[0]["next_sentence_loss"]) > 1e-4


def test_bfloat16_arithmetic_float32_losses(params, states):
    """Fails when bfloat16 states stray from float32 ones by more than eight bits allow, or losses are bfloat16."""
    batch, execution = pair_rows(3), Execution(dtype="bfloat16")
    found = states_of(STILL_BERT, execution)(params, batch)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32) - np.asarray(states(params, batch))).mean() < 0.03
    sums = sums_of(pretraining(STILL_BERT, execution), params, batch)
    wanted = sums_of(pretraining(STILL_BERT), params, batch)
    for name, value in sums.items():
        assert value.dtype == jnp.float32
        if name.endswith("loss"):
            np.testing.assert_allclose(value, wanted[name], rtol=0.05)


# Dropout, seen through norms: with kernels of zeros a state is the norm of {0, 1 / (1 - rate)}, two values of which the
# lower one marks what was dropped.

WIDE = replace(STILL_BERT, width=256, num_heads=128, feed_forward_width=8, num_layers=1)


def share_dropped(h: np.ndarray) -> float:
    low, high = h.min(-1, keepdims=True), h.max(-1, keepdims=True)
    assert np.all((np.abs(h - low) < 1e-3) | (np.abs(h - high) < 1e-3)), "more than two values"
    return float(((h - low < 1e-3) & (high - low > 1e-3)).mean())


@pytest.mark.parametrize(
    ("rates", "leaf"),
    [
        ({"embedding_dropout_rate": 0.15}, ("embeddings", "norm", "bias")),
        ({"dropout_rate": 0.3, "attention_dropout_rate": 0.4}, ("blocks", "attention", "out_bias")),
        ({"dropout_rate": 0.3, "attention_dropout_rate": 0.4}, ("blocks", "feed_forward", "out_bias")),
    ],
)
def test_each_rate_drops_where_it_says(rates, leaf):
    """Fails when a rate is applied to another place (before the embeddings' norm, over the residual), or not at all."""
    config = replace(WIDE, **rates)

    def fill(path, x):
        names = tuple(entry.key for entry in path)[1:]
        return np.full(x.shape, float(names == leaf or (names[-1] == "scale" and names[0] == "blocks")), np.float32)

    params = jax.tree_util.tree_map_with_path(fill, nn.unbox(bert_shapes(config)))
    found = share_dropped(np.asarray(states_of(config)(params, pair_rows(32), jax.random.key(1))))
    rate = rates.get("embedding_dropout_rate", 0.3)
    assert abs(found - rate) < 5 * math.sqrt(rate * (1 - rate) / (32 * LENGTH * config.width))


def test_attention_dropout_is_on(params):
    """Fails when attention's rate is not used at all."""
    config = replace(STILL_BERT, attention_dropout_rate=0.3)
    batch, states = pair_rows(2), states_of(config)
    assert np.abs(np.asarray(states(params, batch, jax.random.key(0))) - np.asarray(states(params, batch))).max() > 0.1


# Sizes


def test_the_published_sizes():
    """Fails when a size changes: 110 M and 340 M parameters (section 3); exactly, of the published checkpoints."""
    for config, backbone in ((BERT_BASE, 109_482_240), (BERT_LARGE, 335_141_888)):
        config.check()
        shapes = bert_shapes(config)
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes["backbone"])) == backbone
        head = config.width**2 + 3 * config.width + config.vocab_size + 2 * config.width + 2
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes["head"])) == head
        assert (config.norm_eps, config.init_std, config.num_positions, config.num_types) == (1e-12, 0.02, 512, 2)
        rates = {config.dropout_rate, config.embedding_dropout_rate, config.attention_dropout_rate}
        assert rates == {0.1} and config.activation == "gelu_tanh"
    assert len(TABLE_6) == 6 and TABLE_6["12x768x12"] == BERT_BASE and TABLE_6["24x1024x16"] == BERT_LARGE
    for config in TABLE_6.values():
        config.check()
    assert len(BertConfig.__dataclass_fields__) <= 16


def test_flops_are_the_peers():
    """Fails when FLOPs are counted otherwise than bench_torch.py does: 20 masked of 128, 19 by Python's round."""
    projected = 19 / 128
    wanted = 6 * (12 * 12 * 768**2 + projected * 30_522 * 768) + 12 * 12 * 768 * 128
    assert build(BERT_BASE).flops_per_token(128) == pytest.approx(wanted)
    causal = 6 * (12 * 12 * 768**2 + 30_522 * 768) + 6 * 12 * 768 * 128
    assert build(replace(BERT_BASE, attention="causal")).flops_per_token(128) == pytest.approx(causal)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": 5}, "model.width must be divisible by model.num_heads 5, got 32"),
        ({"num_types": 1}, "model.num_types must be at least 2, got 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        replace(TOY_BERT, **change).check()


def test_it_learns(params):
    """Fails when the loss does not fall on one batch: masks learnt by heart, NSP too."""
    config = OptimizerConfig(peak_lr=3e-3, warmup=5, decay="linear")
    optimizer, settings = make_optimizer(config, bert_shapes(STILL_BERT)), settings_of(config, 60)
    step = jax.jit(make_train_step(pretraining(STILL_BERT), optimizer))
    state, losses = new_state(jax.tree.map(jnp.asarray, params), optimizer, 0), []
    for _ in range(60):
        state, metrics = step(state, pair_rows(8), settings)
        losses.append([float(metrics[name]) for name in ("masked_lm_loss", "next_sentence_loss")])
    assert losses[-1][0] < 0.5 * losses[0][0] and losses[-1][1] < 0.5
