"""Perplexity and log-probabilities: against one token at a time, for any batch, bucket, device count and length."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import toy

from jaxlm.data.batch import Batch
from jaxlm.distributed.mesh import MeshConfig, make_mesh, to_devices, use_mesh
from jaxlm.inference.decoding import prefix_token
from jaxlm.inference.rows import PaddedSizes, batch_length
from jaxlm.inference.scoring import Scored, Scorer, _chunks, text_sequence
from jaxlm.models import build
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.objectives.language_model import language_model
from jaxlm.training.step import make_eval_step
from jaxlm.training.validation import metrics_of, totals

MODEL = build(toy.STILL, Execution(dtype="float32"))
PARAMS = toy.random_params(toy.STILL)
P = toy.STILL.num_positions


@pytest.fixture(scope="module")
def log_probs():
    """(ids of at most P) -> the log-probability of each id after the first, float64 (len - 1,), by a plain softmax."""

    @jax.jit
    def logits(ids):
        outputs = MODEL(PARAMS, Inputs(ids, np.arange(P)[None]))
        return outputs.states[0] @ outputs.output.tokens[0].T

    def run(ids):
        padded = np.zeros((1, P), np.int32)
        padded[0, : len(ids) - 1] = ids[:-1]
        scores = np.asarray(logits(padded), np.float64)[: len(ids) - 1]
        scores -= scores.max(axis=1, keepdims=True)
        table = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return table[np.arange(len(ids) - 1), list(ids[1:])]

    return run


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def sequences(count, seed=0, longest=P + 1):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, size=count)
    return [Scored(rng.integers(64, size=n).tolist(), int(rng.integers(1, n))) for n in lengths]


def run(scored, batch_size=4, mesh=None):
    found = Scorer(MODEL, mesh=mesh or one_device(), batch_size=batch_size)(PARAMS, scored)
    return np.array([(score.log_probability, score.tokens) for score in found])


def test_scores_equal_a_plain_softmax_in_order(log_probs):
    # Fails when rows are not put back in order, when targets are shifted, or when padding counts.
    scored = sequences(37)
    found = run(scored)
    expected = [(log_probs(s.ids)[s.first - 1 :].sum(), len(s.ids) - s.first) for s in scored]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_scores_depend_on_neither_batch_nor_devices_nor_neighbours():
    scored = sequences(29)
    expected = run(scored, batch_size=1)
    np.testing.assert_allclose(run(scored, batch_size=16), expected, rtol=1e-5, atol=1e-4)
    eight = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose(run(scored, batch_size=8, mesh=eight), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(run(scored[::-1], batch_size=4), expected[::-1], rtol=1e-5, atol=1e-4)


def test_a_long_sequence_is_scored_in_pieces(log_probs):
    ids = np.random.default_rng(5).integers(64, size=5 * P + 3).tolist()
    expected = log_probs(ids[: P + 1]).sum()
    at = P + 1
    while at < len(ids):  # half a table of new tokens at a time
        end = min(at + P - P // 2, len(ids))
        expected += log_probs(ids[end - P - 1 : end])[-(end - at) :].sum()
        at = end
    ((found, tokens),) = run([Scored(ids)])
    assert tokens == len(ids) - 1
    assert found == pytest.approx(expected, rel=1e-4)


def beyond_is_nan(params, length):
    """Positions from `length` on are not a number: what touches them shows it."""
    embeddings = dict(params["backbone"]["embeddings"])
    embeddings["positions"] = embeddings["positions"].copy()
    embeddings["positions"][length:] = np.nan
    return {"backbone": params["backbone"] | {"embeddings": embeddings}}


def test_positions_that_were_not_trained_are_not_touched():
    """Rows shorter than the position table. Fails on 2968321, which scored over the whole table."""
    scored = sequences(17, longest=3 * P)
    short = P // 2
    sizes = {"mesh": one_device(), "batch_size": 4}
    untrained = beyond_is_nan(PARAMS, short)
    found = list(Scorer(MODEL, positions=short, **sizes)(untrained, scored))
    assert np.isnan([score.log_probability for score in Scorer(MODEL, **sizes)(untrained, scored)]).any()
    # The same model with a table that ends there.
    cut = {"backbone": untrained["backbone"] | {"embeddings": dict(untrained["backbone"]["embeddings"])}}
    cut["backbone"]["embeddings"]["positions"] = PARAMS["backbone"]["embeddings"]["positions"][:short]
    model = build(replace(toy.STILL, num_positions=short), Execution(dtype="float32"))
    expected = list(Scorer(model, **sizes)(cut, scored))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("longest", [2, 3, 8, 9])
@pytest.mark.parametrize("first", [0, 1, 4, 9, 30])
def test_pieces_score_each_token_once_with_enough_before_it(longest, first):
    for length in range(1, 40):
        ids = list(range(length))
        seen = []
        for piece, start, _ in _chunks(Scored(ids, first), longest):
            assert start >= 1 and len(piece) - 1 <= longest
            assert piece == ids[piece[0] : piece[0] + len(piece)]
            for place in range(start, len(piece)):
                assert place >= min(piece[place], longest // 2)  # tokens before it: all, or half a table at least
            seen += piece[start:]
        assert seen == ids[max(first, 1) :]


def test_nothing_to_score():
    assert run([Scored([7]), Scored([]), Scored([1, 2, 3], 3), Scored([1, 2])])[:, 1].tolist() == [0, 0, 0, 1]
    assert run([]).tolist() == []
    assert math.isnan(next(Scorer(MODEL, mesh=one_device(), batch_size=1)(PARAMS, [Scored([7])])).per_token)


def test_sequences_are_read_a_block_at_a_time():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield Scored([1, 2, 3])

    first = next(Scorer(MODEL, mesh=one_device(), batch_size=2)(PARAMS, endless()))
    assert first.tokens == 2
    assert len(taken) <= 2 * 64


class Words:
    """A stand-in tokenizer: a letter is an id, blanks are 32."""

    def __init__(self, **specials):
        self.specials = specials

    def encode(self, text):
        return [ord(letter) % 64 for letter in text]


def test_what_a_text_is_predicted_from():
    end, none = Words(end=1, start=2), Words(pad=0)
    assert prefix_token(end) == [1] and prefix_token(end, finetuned=True) == [2] and prefix_token(none) == []
    assert text_sequence(end, "ab", left=[1]) == Scored([1, 33, 34], 1)
    assert text_sequence(none, "ab", left=[]) == Scored([33, 34], 1)  # the first token is not scored
    assert text_sequence(end, "ab", left=[1], context="c") == Scored([1, 35, 32, 33, 34], 2)
    assert text_sequence(end, "ab", left=[1], context="c", separator="") == Scored([1, 35, 33, 34], 2)


def rows_of(ids, length, batch_size):
    """A store of one document in rows, as the loader makes them: every token after the first is a target once."""
    pairs = len(ids) - 1
    rows = -(-pairs // length)
    rows_padded = -(-rows // batch_size) * batch_size
    batch = Batch(
        *(np.zeros((rows_padded, length), np.int32) for _ in range(4)), np.zeros((rows_padded, length), np.float32)
    )
    batch.positions[:] = np.arange(length)
    for row in range(rows):
        n = min(length, pairs - row * length)
        batch.ids[row, :n] = ids[row * length : row * length + n]
        batch.targets[row, :n] = ids[row * length + 1 : row * length + 1 + n]
        batch.segments[row, :n] = batch.weights[row, :n] = 1
    for start in range(0, rows_padded, batch_size):
        yield jax.tree.map(lambda x, start=start: x[start : start + batch_size], batch)


def measured(ids, batch_size, mesh, words=50, size=200):
    with use_mesh(mesh):
        step = jax.jit(make_eval_step(language_model(MODEL)))
        batches = (to_devices(batch, mesh, batch_size) for batch in rows_of(ids, P, batch_size))
        return metrics_of(totals(step, PARAMS, batches), words=words, bytes=size)


def test_perplexity_is_that_of_the_tokens_for_any_batch_and_mesh(log_probs):
    # 201 tokens do not fill the last row, and 13 rows fill no batch of 8: what pads them must weigh nothing.
    ids = np.random.default_rng(3).integers(64, size=201)
    total = -sum(log_probs(ids[at : at + P + 1]).sum() for at in range(0, 200, P))
    one = measured(ids, 1, one_device())
    assert one["tokens"] == 200
    assert one["validation_loss"] == pytest.approx(total / 200, rel=1e-5)
    assert one["perplexity"] == pytest.approx(math.exp(total / 200), rel=1e-4)
    assert one["word_perplexity"] == pytest.approx(math.exp(total / 50), rel=1e-3)
    assert one["bits_per_byte"] == pytest.approx(total / 200 / math.log(2), rel=1e-5)
    assert 0 <= one["accuracy"] <= 1
    for other in (measured(ids, 5, one_device()), measured(ids, 8, make_mesh(MeshConfig(data=4, tensor=2)))):
        assert other["tokens"] == 200 and other["accuracy"] == one["accuracy"]
        assert other["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-6)


def test_figures_over_nothing_or_over_the_range():

    def step(params, batch, carry):
        return {"nll": (9000.0, 3.0), "accuracy": (0.0, 3.0)}, carry

    found = metrics_of(totals(step, None, [None]), words=1, bytes=0)
    assert found["word_perplexity"] == math.inf and math.isnan(found["bits_per_byte"])
    assert math.isnan(metrics_of(totals(step, None, []), words=0, bytes=0)["validation_loss"])


def test_lengths_of_batches():
    """Fails when a batch is cut, is longer than the model, or is padded by more than a fourth of its length."""
    lengths = range(1, 2000)
    assert all(length <= batch_length(length, 4096) <= max(length, 1.25 * length) for length in lengths)
    assert {batch_length(length, 4096) for length in range(1, 33)} == {*range(1, 17), 20, 24, 28, 32}
    assert len({batch_length(length, 4096) for length in range(33, 257)}) == 12
    assert [batch_length(length, 50) for length in (49, 50)] == [50, 50]


def test_sizes_of_batches_are_worth_their_programs():
    """A few batches of 32 sentences share a program; many do not, nor do those of a large model.

    Fails when a short evaluation compiles a program per length, when a long one pads, when a batch does not fit, or
    when earlier blocks are forgotten.
    """

    def sizes_of(flops_per_token):
        return PaddedSizes(32, lambda *sizes: flops_per_token * sum(sizes), program=3e10)

    wanted = [(length, 8) for length in range(16, 8, -1) for _ in range(2)]
    assert set(sizes_of(1e6)([(20, 20), *wanted])) == {(20, 20)}
    assert len(set(sizes_of(1e9)([(20, 20), *wanted]))) > 3
    sizes = sizes_of(1e6)
    blocks = [sizes(wanted * 4) for _ in range(60)]
    for block in blocks:
        assert all(a >= b and c >= d for (a, c), (b, d) in zip(block, wanted * 4, strict=True))
    padding = [32 * (sum(map(sum, block)) - sum(map(sum, wanted * 4))) for block in blocks]
    assert len(set(blocks[0])) < len(set(blocks[-1])) and padding[0] <= 3e4 and padding[-1] < padding[0] / 3
    assert sizes_of(1e6)([]) == []
