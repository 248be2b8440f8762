"""Decoding with a cache: against full forward passes, against plain NumPy, and against its own seeds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.inference.decoding import CachedModel, Prompt, length_bucket
from jaxlm.inference.strategies import ENDED, Sampler, Sampling, candidates, sample_ids
from jaxlm.models import build
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.ranges import checked

CONFIG = GPTConfig(
    vocab_size=40, num_positions=96, num_layers=2, width=32, num_heads=4, feed_forward_width=64, init_std=0.3
)


@pytest.fixture(scope="module")
def model():
    return build(CONFIG, Execution(dtype="float32"))


@pytest.fixture(scope="module")
def params(model):
    return {"backbone": nn.unbox(jax.jit(model.init)(jax.random.key(1)))}


@pytest.fixture(scope="module")
def full_logits(model, params):
    """The scores (L, V) of what follows each token, without a cache; one program for all lengths (causal: padded)."""
    positions = np.arange(CONFIG.num_positions)[None]

    @jax.jit
    def run(ids):
        outputs = model(params, Inputs(ids, positions))
        return outputs.states[0] @ outputs.output.tokens[0].T

    def logits(ids):
        padded = np.zeros((1, CONFIG.num_positions), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(run(padded))[: len(ids)]

    return logits


@pytest.fixture(scope="module")
def greedy(model, params):
    return sampler(model, params, sampling=Sampling(temperature=0))


def sampler(model, params, *, sampling=None, seed=0, **settings):
    return Sampler(CachedModel(model, params, **settings), sampling or Sampling(), seed=seed)


def decode(decoder, prompt, *, length, samples=1, number=0):
    return np.concatenate(list(decoder([Prompt(prompt, length, number)], samples=samples))).T


def test_ids_beyond_the_tokenizers_are_never_given_out(model, params):
    """Fails on 2968321: published tables are padded, and an id without a piece ends in a traceback."""
    decoder = sampler(model, params, sampling=Sampling(temperature=5.0), forbidden=[0], size=9)
    found = decode(decoder, [3, 4], length=30, samples=8)
    assert found.min() >= 1 and found.max() < 9 and len(np.unique(found)) == 8


@pytest.mark.parametrize("prompt_length", [1, 7, 64, 70])
def test_greedy_equals_repeated_full_passes(greedy, full_logits, prompt_length):
    # Fails when a cache position is off by one, when padding is seen, or when positions and cache disagree; prompts of
    # 64 and 70 lie on and over the border of a bucket.
    prompt = np.random.default_rng(prompt_length).integers(40, size=prompt_length).tolist()
    got = decode(greedy, prompt, length=20)
    expected = list(prompt)
    for _ in range(20):
        expected.append(int(full_logits(expected)[-1].argmax()))
    assert got[0].tolist() == expected[prompt_length:]


def test_the_whole_position_table_can_be_used_and_not_more(greedy):
    assert decode(greedy, [1, 2, 3], length=93).shape == (1, 93)
    with pytest.raises(InputError, match=r"3 tokens and 94 new ones are 97 positions, and the model has 96.* 93 new"):
        greedy([Prompt([1, 2, 3], 94)])


def test_draws_follow_the_distribution_of_the_full_pass(model, params, full_logits):
    # 4,000 samples of the token after the second: frequencies against softmax, total variation; a wrong temperature,
    # a key shared by all samples or a shifted position all exceed the bound (expected noise about 0.03).
    sampling = Sampling(temperature=1.5, top_k=12)
    first = decode(sampler(model, params, sampling=sampling, seed=3), [5, 6], length=1, samples=4000)[:, 0]
    logits = full_logits([5, 6])[-1].astype(np.float64) / 1.5
    kept = np.sort(logits)[-12]
    expected = np.where(logits >= kept, np.exp(logits - logits.max()), 0)
    expected /= expected.sum()
    found = np.bincount(first, minlength=40) / 4000
    assert 0.5 * np.abs(found - expected).sum() < 0.05
    assert not found[expected == 0].any()


def plain_candidates(logits, temperature, top_k, top_p):
    """Probabilities (V,) by a loop over tokens, most likely first."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    kept = order[: top_k or len(order)]
    weights = np.exp(scaled - scaled.max())
    total = weights[kept].sum()
    nucleus, mass = [], 0.0
    for i in kept:
        if nucleus and mass >= top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    shares = np.zeros(len(logits))
    shares[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return shares


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.6), (1.3, 8, 0.83), (1.0, 1, 0.5), (2.0, 99, 0.01)],
)
def test_candidates_equal_a_plain_statement(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(6, 20)).astype(np.float32) * 3
    logits[0, :4] = 2.5  # equal scores: the lower id first
    logits[1, 5:] = -np.inf  # forbidden ones never come back
    scores, ids = candidates(jnp.asarray(logits), Sampling(temperature, top_k, top_p))
    got = np.zeros(logits.shape)
    np.put_along_axis(got, np.asarray(ids), np.asarray(jax.nn.softmax(scores, axis=-1)), axis=1)
    expected = np.stack([plain_candidates(row, temperature, top_k, top_p) for row in logits])
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_draw_at_temperature_zero_takes_the_highest():
    logits = jnp.asarray([[0.0, 3.0, 1.0], [2.0, -jnp.inf, 1.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert sample_ids(logits, keys, Sampling(temperature=0)).tolist() == [1, 0]
    assert sample_ids(logits, keys, Sampling(temperature=1e-30)).tolist() == [1, 0]
    assert sample_ids(logits, keys, Sampling(temperature=1e-4)).tolist() == [1, 0]


def test_draws_depend_on_seed_prompt_and_sample_alone(model, params):
    decoder, other = sampler(model, params, seed=0), sampler(model, params, seed=1)
    three = decode(decoder, [1, 2], length=12, samples=3)
    assert (decode(decoder, [1, 2], length=12, samples=3) == three).all()
    assert (decode(decoder, [1, 2], length=12, samples=1)[0] == three[0]).all()  # sample 0, however many there are
    assert (decode(decoder, [1, 2], length=80, samples=3)[:, :12] == three).all()  # another bucket of the cache
    assert len({tuple(row) for row in three.tolist()}) == 3
    assert (decode(other, [1, 2], length=12, samples=3) != three).any()
    assert (decode(decoder, [1, 2], length=12, samples=3, number=1) != three).any()


def test_forbidden_ids_never_come_and_the_end_stops(model, params):
    forbidden = list(range(0, 30))
    decoder = sampler(model, params, forbidden=forbidden, end=3, sampling=Sampling(temperature=5.0), seed=2)
    rows = decode(decoder, [1], length=60, samples=8)
    assert set(np.unique(rows)) <= {ENDED, 3, *range(30, 40)}
    ended = 0
    for row in rows.tolist():
        if 3 in row:
            at = row.index(3)
            ended += 1
            assert set(row[at + 1 :]) <= {ENDED}  # nothing but the mark after the end
            assert ENDED not in row[:at]
    assert ended > 0
    everyone_ends = sampler(model, params, forbidden=[i for i in range(40) if i != 3], end=3)
    assert decode(everyone_ends, [1], length=60, samples=2).tolist() == [[3], [3]]


def test_positions_that_were_not_trained_are_not_touched(model, params):
    """Rows shorter than the position table. Fails on 2968321, which had room for the whole table."""
    embeddings = dict(params["backbone"]["embeddings"])
    embeddings["positions"] = np.array(embeddings["positions"])
    embeddings["positions"][40:] = np.nan
    untrained = {"backbone": params["backbone"] | {"embeddings": embeddings}}
    decoder = sampler(model, untrained, sampling=Sampling(temperature=0), positions=40)
    assert decoder.cached.room([1, 2, 3]) == 37
    found = decode(decoder, [1, 2, 3], length=37)
    whole = decode(sampler(model, params, sampling=Sampling(temperature=0)), [1, 2, 3], length=37)
    assert found.tolist() == whole.tolist() and len(set(found[0].tolist())) > 1
    with pytest.raises(InputError, match=r"41 positions, and the model was trained on 40: .* 37 new .*--beyond-length"):
        decoder([Prompt([1, 2, 3], 38)])


def test_the_step_is_compiled_once(model, params, room_for_programs):
    decoder = sampler(model, params)
    decode(decoder, [1, 2], length=9, samples=2)
    decode(decoder, [4, 5, 6, 7], length=12, samples=2)
    assert decoder._next._cache_size() == 1
    assert decoder._first._cache_size() == 1


def test_a_step_copies_no_stack_of_keys_or_values(model, params):
    """Fails when a step reads a layer's cache from a stacked array: XLA for CPUs copies it."""
    decoder = sampler(model, jax.device_put(params, jax.devices()[0]))
    compiled = decoder.lowered(decoder.cached.params, 2, 64).compile()
    stacked = f"f32[{CONFIG.num_layers},2,{CONFIG.num_heads},64,8]"
    assert stacked.replace("[2,", "[1,", 1) in compiled.as_text() and stacked not in compiled.as_text()


def test_bfloat16_weights_are_cast_once_to_the_same_result(params):
    # The cast of all weights ahead must not change a number: norms stay float32, all else is cast at its use anyway.
    model = build(CONFIG, Execution(dtype="bfloat16"))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    got = decode(sampler(model, params, sampling=Sampling(temperature=0)), prompt, length=1)
    outputs = model(params, Inputs(np.asarray([prompt]), np.arange(8)[None]))
    logits = jnp.dot(outputs.states[0, -1:], outputs.output.tokens[0].T, preferred_element_type=jnp.float32)
    assert got[0, 0] == int(jnp.argmax(logits[0]))
    decoder = sampler(model, params)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(decoder.cached.params)}
    assert kinds == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_what_is_no_way_to_draw_is_refused(field, value):
    with pytest.raises(InputError, match=f"^{field} must be .*got {value}"):
        checked(dataclasses.replace(Sampling(), **{field: value}))


def test_length_buckets():
    assert [length_bucket(n, 200, smallest=64) for n in (1, 64, 65, 128, 129, 200)] == [64, 64, 128, 128, 200, 200]
    assert length_bucket(3, 40, smallest=64) == 40
