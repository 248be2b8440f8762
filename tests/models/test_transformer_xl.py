"""Transformer-XL: its memory and the distances.

Parity is in test_transformer_xl_parity, whole runs in test_family_runs.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.models import SIZES, build, without_dropout
from jaxlm.models.model import Inputs, Model
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.models.transformer_xl import model as transformer_xl
from jaxlm.models.transformer_xl.model import by_key
from jaxlm.nn import transformer
from jaxlm.training.config import PretrainConfig

TOY = TransformerXLConfig(
    vocab_size=31, num_layers=3, width=12, num_heads=3, feed_forward_width=20, memory_length=16, init_std=0.3
)
ROWS, LENGTH = 2, 14


@pytest.fixture(scope="module")
def model() -> Model:
    return build(without_dropout(TOY))


@pytest.fixture(scope="module")
def params(model):
    params = {"backbone": nn.unbox(model.init(jax.random.key(3)))}
    bias = np.random.default_rng(0).normal(size=31).astype(np.float32)
    params["backbone"]["embeddings"]["output_bias"] = bias
    return params


@functools.cache
def compiled(model: Model):
    return jax.jit(model)


def read(model: Model, params, ids, carry=None, segments=None):
    """Return the outputs of rows of tokens."""
    return compiled(model)(params, Inputs(ids, ids, segments), carry)


IDS = np.random.default_rng(5).integers(31, size=(ROWS, LENGTH)).astype(np.int32)


def in_parts(model, params, parts, *, cached=False):
    """Return the states of IDS, read in parts with a memory, and the last memory."""
    carry, found, at = model.stream_carry(ROWS, cached=cached), [], 0
    for tokens in parts:
        outputs = read(model, params, IDS[:, at : at + tokens], carry)
        carry, at = outputs.carry, at + tokens
        found.append(outputs.states)
    return np.concatenate(found, axis=1), carry


@functools.cache
def made(**change):
    """Return a model of TOY with other fields, and fresh parameters."""
    model = build(replace(without_dropout(TOY), **change))
    return model, {"backbone": nn.unbox(jax.jit(model.init)(jax.random.key(3)))}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("change", [{}, {"norm": "pre", "attention_biases": "per_layer", "clamp_length": 3}])
def test_any_segmentation_gives_the_states_of_one_row(params, cached, change):
    """Fails when an empty slot takes attention, a distance depends on the segment, or the memory loses a token."""
    model, params = made(**change)
    whole = read(model, params, IDS).states
    for parts in ((5, 5, 4), (1, 2, 11)):
        found, carry = in_parts(model, params, parts, cached=cached)
        np.testing.assert_allclose(found, whole, atol=2e-5)
        np.testing.assert_array_equal(carry.count_1B, [[LENGTH] * ROWS])


@pytest.mark.parametrize("cached", [False, True])
def test_same_length_makes_segments_irrelevant_with_any_memory(params, cached):
    """Fails when a token sees fewer or more than itself and memory_length tokens, as in the original's PyTorch code."""
    model, _ = made(memory_length=3, same_length=True)
    whole = read(model, params, IDS).states
    found, _ = in_parts(model, params, (4, 4, 6), cached=cached)
    np.testing.assert_allclose(found, whole, atol=2e-5)
    if cached:
        return
    small, params = made(memory_length=3, same_length=True, num_layers=1)
    embedded = lambda ids: read(small, params, ids).states  # noqa: E731
    reached = [bool(np.any(embedded(IDS)[:, 9] != embedded(changed(IDS, at))[:, 9])) for at in range(LENGTH)]
    assert reached == [6 <= at <= 9 for at in range(LENGTH)]


def changed(ids: np.ndarray, at: int) -> np.ndarray:
    ids = ids.copy()
    ids[:, at] = (ids[:, at] + 1) % 31
    return ids


def test_no_gradient_reaches_the_memory(model, params):
    """Fails when the loss of a row is differentiated through the states that an earlier row left."""
    _, carry = in_parts(model, params, (7,))

    def loss(x_NBMD):
        return jnp.sum(jnp.sin(model(params, Inputs(IDS, IDS), carry._replace(x_NBMD=x_NBMD)).states))

    value, gradient = jax.jit(jax.value_and_grad(loss))(carry.x_NBMD)
    assert not gradient.any() and float(value) != float(loss(jnp.zeros_like(carry.x_NBMD)))


def test_scores_of_distances_are_moved_to_their_keys():
    """A probe: the score of each distance is the distance itself. Fails when the shift is off by one."""
    for length, slots in ((1, 0), (1, 4), (5, 0), (3, 4), (5, 2)):
        num_keys = slots + length
        distances = np.broadcast_to(np.arange(num_keys - 1, -1, -1.0), (1, 2, length, num_keys))
        found = np.asarray(by_key(jnp.asarray(distances)))[0, 1]
        for query in range(length):
            seen = slots + query + 1
            np.testing.assert_array_equal(found[query, :seen], np.arange(seen)[::-1])


def test_blocks_of_queries_give_the_same_states(params, monkeypatch):
    """Fails when a block of queries, on the CPU, is given other keys, distances or segments than the whole."""
    model, params = made(same_length=True, memory_length=9)
    segments = np.array([[1] * LENGTH, [1] * 8 + [0] * 6], np.int32)
    carry = in_parts(model, params, (6,))[1]
    wanted = read(model, params, IDS, carry, segments).states
    monkeypatch.setattr(transformer_xl, "SMALLEST_BLOCK", 4)
    found = jax.jit(lambda: model(params, Inputs(IDS, IDS, segments), carry))().states
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    np.testing.assert_allclose(found[1, :8], wanted[1, :8], atol=1e-5)


def test_both_orders_of_the_products_agree(model, params):
    """Fails when decoding, which multiplies the queries first, has other scores than a whole row."""
    kernel = params["backbone"]["blocks"]["attention"]["relative_kernel"][0]
    rng = np.random.default_rng(0)
    q_BHLK, relative_SD = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 5, 4), (9, 12)))
    arguments = (jnp.asarray(relative_SD), kernel, model.execution)
    whole = transformer_xl._distance_scores(jnp.asarray(q_BHLK), *arguments)(0, 5, 9)
    one = transformer_xl._distance_scores(jnp.asarray(q_BHLK[:1, :, :1]), *arguments)(0, 1, 9)
    np.testing.assert_allclose(one[0, :, 0], whole[0, :, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_padding_does_not_enter_the_memory(model, params, cached):
    """Fails when padding takes a slot, for rows that end at different places."""
    segments = (np.arange(9) < [[4], [7]]).astype(np.int32)
    padded = np.where(segments, IDS[:, :9], 7)
    carry = model.stream_carry(ROWS, cached=cached)
    after = read(model, params, padded, carry, segments).carry
    np.testing.assert_array_equal(after.count_1B, [[4, 7]])
    for row, tokens in enumerate((4, 7)):
        ids = IDS[row : row + 1, :tokens]
        alone = read(model, params, ids, model.stream_carry(1, cached=cached)).carry
        for found, wanted in zip(after[:-1], alone[:-1], strict=True):
            np.testing.assert_allclose(found[:, row], wanted[:, 0], atol=1e-5)


def test_dropout_has_the_rates_of_the_config(params, monkeypatch):
    """Fails when a place of the original has no dropout, or the encodings of the distances have a mask per row."""
    drawn = []
    original = transformer_xl.dropout

    def recorded(x, rate, key, **more):
        if x.ndim < 4:  # the weights of the attention have a rate of their own
            drawn.append((x.shape, rate, key is not None))
        return original(x, rate, key, **more)

    monkeypatch.setattr(transformer_xl, "dropout", recorded)
    monkeypatch.setattr(transformer, "dropout", recorded)  # of the feed-forward
    regularized = build(replace(TOY, dropout_rate=0.25))
    found = jax.eval_shape(lambda: regularized(params, Inputs(IDS, IDS), key=jax.random.key(1)))
    assert found.undropped is not None
    states, hidden, encodings = (ROWS, LENGTH, 12), (ROWS, LENGTH, 20), (LENGTH, 12)
    shapes = {shape for shape, _, _ in drawn}
    assert shapes == {states, hidden, encodings} and all(rate == 0.25 and keyed for _, rate, keyed in drawn)
    assert sum(shape == states for shape, _, _ in drawn) >= 4  # embeddings, both branches, the last states


def test_the_published_sizes():
    """Fails when a part of the published models is missing: parameters computed from the original code."""
    for name, millions in (("transformer-xl-enwik8", 41.06), ("transformer-xl-enwik8-large", 277.23)):
        boxed = jax.eval_shape(build(SIZES[name]).init, jax.random.key(0))
        assert round(sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(boxed))) / 1e6, 2) == millions


def test_a_config_refuses_what_no_run_has():
    """Fails when sizes without a meaning, or packed rows, reach a run."""
    for field, value, rule in (
        ("width", 15, "even"),
        ("memory_length", -1, "at least 0"),
        ("num_layers", 0, "at least 1"),
        ("init_std", -1, "above 0"),
        ("norm_eps", 0, "above 0"),
    ):
        with pytest.raises(InputError, match=f"model.{field} must be {rule}.*got {value}; "):
            replace(TOY, **{field: value}).check()


def test_packed_rows_are_refused():
    """Fails when documents that must not see each other are given to a model that reads across them."""
    from jaxlm.data.config import Packed

    with pytest.raises(InputError, match="data.layout must be streams or windows for .*memory.*, got packed; give one"):
        PretrainConfig(model=TOY, data=Packed()).check()
