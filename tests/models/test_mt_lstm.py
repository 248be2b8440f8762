"""What holds for the MT-LSTM alone: the gradient of its decoder, dropout, beams, and halved learning rates.

That scores, gradients and steps are those of the authors' code is in test_mt_lstm_parity.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import mt_lstm_case as case
from parity.check import frozen
from test_mt_lstm_parity import parts
from toy import assert_trees_close

from jaxlm.inference.arguments import Sampling
from jaxlm.inference.decoding import CachedModel, Prompt
from jaxlm.inference.strategies import BeamSearch, Sampler
from jaxlm.models import build
from jaxlm.models.model import Inputs, source_inputs
from jaxlm.models.mt_lstm import MTLSTMConfig
from jaxlm.models.mt_lstm.model import DecoderState, Decoding, Factors, Source, _decoded, decode
from jaxlm.nn.recurrence import LSTMState
from jaxlm.training.weights import halved, no_halving


def test_the_gradient_of_the_decoder_is_jaxs_own():
    """Fails when a kernel's gradient lacks a position, a factor of dropout, or has one of padding."""
    rng, length, rows, d, size = np.random.default_rng(1), 5, 3, 4, 6

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    kernels = (normal(2 * d, 4 * d), normal(2 * d, 4 * d), normal(d, d))
    products = (normal(length, rows, 4 * d), normal(length, rows, 4 * d), normal(length, rows, d))
    real_S, real_LB = np.arange(size) < [[6], [2], [1]], np.arange(length)[:, None] < [5, 3, 1]
    source = Source(normal(1, rows, size, d), normal(1, rows, size, d), real_S[None])
    start = DecoderState(LSTMState(normal(2, rows, d), normal(2, rows, d)), normal(1, rows, d))
    factors = Factors(normal(length, rows, d), (normal(length, rows, d),), normal(length, rows, d))

    def loss(function):
        def of(kernels, products, parts, start):
            steps, end = function(kernels, products, Source(*parts, source.real), start, factors, real_LB)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in (steps, *jax.tree.leaves(end)))

        return jax.jit(jax.grad(of, argnums=(0, 1, 2, 3)))(kernels, products, tuple(source[:2]), start)

    assert_trees_close(loss(decode), loss(lambda *given: _decoded(*given)[0]), relative=1e-5, absolute=1e-6)


def test_what_the_decoder_reads_is_dropped_twice():
    """Fails when the word vectors or the fed output are dropped once (onmt/Models.py:114-118, :65), or layers not."""
    model = build(MTLSTMConfig(vocab_size=9, width=64, word_width=8, dropout_rate=0.2))
    factors = model.module.bind({}, rngs={})._factors((50, 20), jax.random.key(0))
    for rate, factor in ((0.36, factors.fed), (0.2, factors.output), (0.2, factors.between[0])):
        values, counts = np.unique(np.asarray(factor), return_counts=True)
        np.testing.assert_allclose(values, [0, 1 / (1 - rate)], rtol=1e-4)
        assert counts[0] / counts.sum() == pytest.approx(rate, abs=0.01)
    assert len(factors.between) == 1


def test_a_beam_that_keeps_all_texts_finds_the_best_one():
    """Against enumeration of all texts of up to three ids, each scored in a pass of its own. Fails when a beam
    continues from another beam's state, reads another row's source, or the padding of one.
    """
    model = build(MTLSTMConfig(vocab_size=5, width=6, word_width=3, dropout_rate=0.0))
    init = lambda key: {"backbone": model.init(key), "head": model.output_layer.init(key)}  # noqa: E731
    rng, end, most = np.random.default_rng(2), 1, 3
    params = jax.tree.map(
        lambda leaf: 2 * rng.standard_normal(leaf.shape).astype(np.float32), jax.eval_shape(init, jax.random.key(0))
    )
    params = jax.tree.map(lambda box: box.value, params, is_leaf=lambda leaf: hasattr(leaf, "value"))
    texts = [
        ids
        for n in range(1, most + 1)
        for ids in itertools.product(range(5), repeat=n)
        if end not in ids[:-1] and (ids[-1] == end or n == most)
    ]
    prompts = [Prompt([0], most, source=source) for source in ([2, 3, 4, 2, 2], [4, 3])]
    search = BeamSearch(CachedModel(model, params, end=end), 25)

    @jax.jit
    def log_probs(ids, source):
        outputs = model(params, Inputs(ids[None], np.arange(most)[None], source=source_inputs(source[None])))
        return jax.nn.log_softmax(model.logits(params, outputs.states[0], outputs.output))

    for prompt, found in zip(prompts, search(prompts), strict=True):
        scores = {}
        for ids in texts:
            given = np.pad([0, *ids[:-1]], (0, most - len(ids)))
            of = np.asarray(log_probs(given, np.array(prompt.source)))
            scores[ids] = of[np.arange(len(ids)), ids].sum() / len(ids)
        best = max(scores, key=scores.get)
        assert tuple(found[0].tokens) == best and found[0].score == pytest.approx(scores[best], rel=1e-5)


def test_a_prompt_of_one_token_is_read_in_one_step():
    """Greedy texts against whole passes over ever longer targets. Fails when the mark that begins a target is padded,
    or the state after it is another one; a prompt of three tokens is padded to four.
    """
    model, params, batch = parts("two")
    rows = [batch.source[row][batch.source_segments[row] > 0].tolist() for row in range(3)]
    cached, most = CachedModel(model, params), 6
    for begin in ([1], [1, 4, 2]):
        prompts = [Prompt(begin, most, number, source) for number, source in enumerate(rows)]
        assert cached.padded(prompts)[0].ids_BP.shape == (3, len(begin) if len(begin) == 1 else 4)
        found = np.stack([ids[:, 0] for ids in Sampler(cached, Sampling(temperature=0.0))(prompts)], axis=1)

        @jax.jit
        def scores(ids, source):
            inputs = Inputs(ids, jnp.zeros_like(ids), source=source_inputs(source))
            outputs = model(params, inputs)
            return model.logits(params, outputs.states, outputs.output)

        for row, source in enumerate(rows):
            text, length = list(begin), len(begin) + most
            for _ in range(most):
                at = len(text) - 1
                ids = np.array([text + [0] * (length - len(text))], np.int32)
                text.append(int(np.argmax(scores(ids, np.array([source]))[0, at])))
            assert text[len(begin) :] == found[row].tolist()


def test_a_step_needs_the_carry_alone():
    """Fails when a step of decoding encodes the source again, or the carry of the decoder is that of its own zeros."""
    model, params, batch = parts("two")
    inputs = Inputs(batch.ids, batch.positions, None, source=source_inputs(batch.source, batch.source_segments))
    whole = model(params, inputs).states
    carry: Decoding = model.decoding_carry(len(batch.ids), 6, jnp.float32)
    first = model(params, inputs._replace(ids=batch.ids[:, :1], positions=batch.positions[:, :1]), carry)
    second = model(params, Inputs(batch.ids[:, 1:2], batch.positions[:, 1:2]), first.carry)
    np.testing.assert_allclose(second.states[:, 0], whole[:, 1], atol=1e-6)


def test_rates_are_halved_as_in_the_original():
    """Fails when a loss that equals the one before halves the rate, or it is compared with the lowest one."""
    state, found = no_halving(), []
    for perplexity in case.PERPLEXITIES:
        state = halved(state, np.log(perplexity))
        found.append(float(state.factor))
    assert found == frozen("mt_lstm")["halving"]["rates"].tolist()
