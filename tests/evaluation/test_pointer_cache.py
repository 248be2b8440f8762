"""The continuous cache against a loop over the tokens of a text, in NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy_runs import assert_one_line, make_stores, pretrain_arguments, run_here

from jaxlm.data.batch import Batch
from jaxlm.evaluation.arguments import PointerCache
from jaxlm.evaluation.perplexity import make_cached_step, with_history
from jaxlm.models import build
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.models.awd_lstm.model import empty_state
from jaxlm.models.model import Inputs

pytestmark = pytest.mark.usefixtures("two_devices")

TOY = AWDLSTMConfig(vocab_size=11, num_layers=1, width=6, init_range=1.0)


def direct(states, targets, logits, cache):
    """Return the log-probability of each target of one stream, and whether it is the likeliest word."""
    found = []
    for t, target in enumerate(targets):
        p = np.exp(logits[t] - logits[t].max())
        p /= p.sum()
        if t >= cache.window:
            scores = np.array([cache.theta * states[t] @ states[i] for i in range(t - cache.window, t)])
            attention = np.exp(scores - scores.max())
            attention /= attention.sum()
            p_cache = np.zeros_like(p)
            for weight, i in zip(attention, range(t - cache.window, t), strict=True):
                p_cache[targets[i]] += weight
            p = cache.weight * p_cache + (1 - cache.weight) * p
        found.append((np.log(p[target]), p.argmax() == target))
    return np.array(found, np.float64)


@pytest.mark.parametrize(
    ("window", "length", "theta", "weight"), [(4, 7, 1.0, 0.1), (9, 3, 0.6, 0.5), (1, 5, 2.0, 0.3)]
)
def test_the_mixture_is_that_of_a_direct_computation(window, length, theta, weight):
    """Fails when a token sees itself or the future, the window is off by one, or the history of a stream is lost."""
    cache, rng = PointerCache(window, theta, weight), np.random.default_rng(window)
    model = build(TOY)
    params = {"backbone": nn.unbox(model.init(jax.random.key(1)))}
    streams = rng.integers(11, size=(2, 4 * length + 1)).astype(np.int32)
    step = jax.jit(make_cached_step(model, cache))
    carry = with_history(model, cache, lambda rows: empty_state(TOY, rows))(2)
    total, hits = 0.0, 0.0
    for number in range(4):
        span = streams[:, number * length : (number + 1) * length + 1]
        ones = np.ones((2, length), np.int32)
        batch = Batch(span[:, :-1], span[:, 1:], ones, ones, np.float32(ones), np.full(2, number == 0))
        sums, carry = step(params, batch, carry)
        total, hits = total + float(sums["nll"][0]), hits + float(sums["accuracy"][0])
    ids = streams[:, :-1]
    outputs = model(params, Inputs(ids, ids))
    logits = np.asarray(model.logits(params, outputs.states, outputs.output), np.float64)
    states = np.asarray(outputs.states, np.float64)
    wanted = sum(direct(states[b], streams[b, 1:], logits[b], cache).sum(axis=0) for b in range(2))
    np.testing.assert_allclose([-total, hits], wanted, rtol=1e-5)
    again = Batch(ids[:, :length], ids[:, 1 : length + 1], ones, ones, np.float32(ones), np.full(2, True))
    fresh = with_history(model, cache, lambda rows: empty_state(TOY, rows))(2)
    restarted, new = step(params, again, carry)[0], step(params, again, fresh)[0]
    assert float(restarted["nll"][0]) == float(new["nll"][0])
    assert jnp.isfinite(restarted["nll"][0])


def test_the_command_reports_its_cache(tmp_path):
    """Fails when the flags do not reach the evaluation, or rows that do not continue each other are cached."""
    stores = make_stores(tmp_path)
    run = tmp_path / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, "--data.layout", "streams", "--num-steps", 2))
    assert ended.code == 0, ended.errors
    words = ("evaluate", "perplexity", "--run", run, "--data.store", stores[1], "--batch-size", 8)
    plain, cached = (
        json.loads(run_here(*words, *flags).output.splitlines()[-1])
        for flags in ((), ("--cache.window", 50, "--cache.weight", 0.2))
    )
    streams = [len(part) for part in np.array_split(np.arange(cached["tokens"]), 8)]
    mixed = sum(tokens - 50 for tokens in streams) / cached["tokens"]
    wanted = {"window": 50, "theta": 1.0, "weight": 0.2, "mixed": pytest.approx(mixed)}
    assert cached["cache"] == wanted and "cache" not in plain and plain["streams"] == 8
    assert cached["validation_loss"] < plain["validation_loss"] and cached["tokens"] == plain["tokens"]
    longest, most = max(streams), (cached["tokens"] - 1) // 900
    for flags, said in (
        (("--layout", "windows", "--cache.window", 50), "layout must be streams with --cache.window, got windows"),
        (("--cache.theta", 0.5), "--cache.theta must be left out without --cache.window, got 0.5"),
        (("--cache.window", 900), f"below {longest}, the tokens of each of the 8 streams of the batch, got 900: "),
        (("--cache.window", 900), f"give a --batch-size of at most {most}, or a smaller one"),
        (("--cache.window", 10**6), "it would never be full; give a smaller one"),
    ):
        assert_one_line(run_here(*words, *flags), 2, said)
    PointerCache(window=900).check_streams(cached["tokens"], most)
