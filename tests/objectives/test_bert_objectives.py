"""BERT's losses: packed rows against pairs one by one, plain statements over whole logits, weights of their own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_masking import masks
from toy import assert_trees_close, sums_of
from toy_pairs import (
    LENGTH,
    PLAIN,
    SLOTS,
    STILL_BERT,
    TOY_BERT,
    inputs_of,
    one_by_one,
    pair_rows,
    pretraining,
    random_bert,
)

from jaxlm.models import build
from jaxlm.models.bert.model import MaskedLMHead
from jaxlm.nn.output import projected_cross_entropy
from jaxlm.objectives.masked_lm import MaskingConfig, left_to_right_language_model
from jaxlm.objectives.objective import mean

NAMES = {"masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy"}


@pytest.fixture(scope="module")
def params():
    return random_bert(STILL_BERT)


COMPILED: dict[tuple[int, bool], tuple] = {}  # what `figures` runs, with the objectives, so that no id comes again


def figures(objective, params, batch, *, gradient: bool = True):
    """Means of all terms and metrics, the loss, and its gradient."""

    @jax.jit
    def run(params, batch):
        prepared = objective.prepare(batch)
        weights = objective.weights(prepared)

        def loss(params):
            sums, _ = objective.sums(params, prepared, None, None)
            means = {name: mean(sums[name], weights[name]) for name in sums}
            return sum(factor * means[name] for name, factor in objective.coefficients.items()), means

        return jax.value_and_grad(loss, has_aux=True)(params) if gradient else (loss(params), None)

    run, _ = COMPILED.setdefault((id(objective), gradient), (run, objective))
    (loss, means), gradient_found = run(params, batch)
    return {"loss": float(loss)} | {name: float(value) for name, value in means.items()}, gradient_found


PIECES, WORDS = MaskingConfig(), MaskingConfig(whole_word=True)


@pytest.mark.parametrize(
    ("coefficient", "masking"),
    [
        pytest.param(1.0, PIECES, id="1.0-pieces"),
        pytest.param(0.0, WORDS, id="0.0-words"),
        pytest.param(1.0, WORDS, id="1.0-words", marks=pytest.mark.campaign),
        pytest.param(0.0, PIECES, id="0.0-pieces", marks=pytest.mark.campaign),
    ],
)
def test_packed_rows_equal_pairs_one_by_one(params, masking, coefficient):
    """Fails when a pair sees its neighbours, is masked or placed otherwise among them, or loses its CLS or a slot."""
    packed = pair_rows(6, seed=1)
    alone = one_by_one(packed)
    objective = pretraining(STILL_BERT, masking=masking, coefficient=coefficient)
    found, gradient = figures(objective, params, packed)
    wanted, gradient_wanted = figures(objective, params, alone)
    assert len(alone.ids) == 12 and found == pytest.approx(wanted, rel=1e-5)
    worst = assert_trees_close(gradient, gradient_wanted, relative=1e-5, absolute=1e-8)
    print(f"packed against one by one: largest relative difference of a gradient {worst:.2g}")


def test_packing_equality_would_notice(params):
    """Fails when the equality above holds whatever is done: with one segment for all pairs of a row it must not."""
    packed = pair_rows(6, seed=1)
    wrong = packed.replace(segments=np.minimum(packed.segments, 1))
    objective = pretraining(STILL_BERT)
    found, wanted = (
        figures(objective, params, wrong, gradient=False),
        figures(objective, params, packed, gradient=False),
    )
    assert abs(found[0]["next_sentence_loss"] - wanted[0]["next_sentence_loss"]) > 1e-3


def test_the_losses_are_the_plain_ones(params):
    """Fails when places, targets, bias, CLS or labels are mixed up: whole logits at every place, spelt out."""
    batch = pair_rows(9, seed=2)
    found, _ = figures(pretraining(STILL_BERT, loss_chunks=3), params, batch, gradient=False)
    rows = masks(batch, slots=SLOTS)
    outputs = jax.jit(build(STILL_BERT))(params, inputs_of(batch.replace(ids=rows.ids_BL)))
    h, table = outputs.states, outputs.output
    transformed, bias = MaskedLMHead(STILL_BERT).apply({"params": params["head"]["masked_lm"]}, h)
    logits = np.asarray(transformed @ table.T + bias)
    nll, hits, count, nsp, right = 0.0, 0, 0, 0.0, 0
    for row, at, target, weight in zip(range(9), rows.where_BM, rows.targets_BM, rows.weights_BM, strict=True):
        for place, word, on in zip(at, target, weight, strict=True):
            if on:
                scores = logits[row, place].astype(np.float64)
                nll += np.log(np.exp(scores).sum()) - scores[word]
                hits, count = hits + (scores.argmax() == word), count + 1
    pooler, head = params["backbone"]["pooler"], params["head"]["next_sentence"]
    for row, pair in zip(*np.nonzero(batch.pair_weights), strict=True):
        pooled = np.tanh(np.asarray(h[row, batch.firsts[row, pair]]) @ pooler["kernel"] + pooler["bias"])
        scores = (pooled @ head["kernel"] + head["bias"]).astype(np.float64)
        label = batch.next_labels[row, pair]
        nsp, right = nsp + np.log(np.exp(scores).sum()) - scores[label], right + (scores.argmax() == label)
    pairs = batch.pair_weights.sum()
    wanted = {
        "masked_lm_loss": nll / count,
        "masked_lm_accuracy": hits / count,
        "next_sentence_loss": nsp / pairs,
        "next_sentence_accuracy": right / pairs,
        "loss": nll / count + nsp / pairs,
    }
    assert found == pytest.approx(wanted, rel=1e-5)


def test_terms_and_coefficients(params):
    """Fails when NSP's coefficient is not its own, or a run without NSP still has its head or its figures."""
    batch = pair_rows(4)
    one, half, none = (
        figures(pretraining(STILL_BERT, coefficient=c), params, batch, gradient=False)[0] for c in (1.0, 0.5, 0.0)
    )
    assert set(one) == NAMES | {"loss"} and set(none) == {"loss", "masked_lm_loss", "masked_lm_accuracy"}
    assert half["loss"] == pytest.approx(one["masked_lm_loss"] + 0.5 * one["next_sentence_loss"])
    assert none["loss"] == pytest.approx(one["masked_lm_loss"])
    without = {"backbone": params["backbone"], "head": {"masked_lm": params["head"]["masked_lm"]}}
    assert figures(pretraining(STILL_BERT, coefficient=0.0), without, batch, gradient=False)[0] == none


def test_filler_weighs_nothing(params):
    """Fails when rows of padding alone, or absent pairs, change a loss."""
    batch = pair_rows(5)
    filler = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
    objective = pretraining(STILL_BERT)
    found, wanted = (figures(objective, params, b, gradient=False)[0] for b in (filler, batch))
    assert found == pytest.approx(wanted, rel=1e-6)
    scrambled = batch.replace(next_labels=np.where(batch.pair_weights > 0, batch.next_labels, 1))
    assert figures(objective, params, scrambled, gradient=False)[0] == wanted


@pytest.fixture(scope="module")
def in_one_piece(params):
    return figures(pretraining(STILL_BERT, loss_chunks=1), params, pair_rows(6))


@pytest.mark.parametrize("chunks", [3, 5, pytest.param(8, marks=pytest.mark.campaign), 100])
def test_any_number_of_chunks(params, in_one_piece, chunks):
    """Fails when places are lost or counted twice where the pieces do not divide the slots, loss or gradient."""
    batch = pair_rows(6)
    found, gradient = figures(pretraining(STILL_BERT, loss_chunks=chunks), params, batch)
    wanted, gradient_wanted = in_one_piece
    assert found == pytest.approx(wanted, rel=1e-6)
    assert_trees_close(gradient, gradient_wanted, relative=2e-6, absolute=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_bias_and_its_gradient(chunks, dtype):
    """Fails when the bias is left out of the logits, or its gradient of a piece: against optax over whole logits."""
    rng = np.random.default_rng(0)
    h, table = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((3, 8, 6), (50, 6)))
    bias, targets = jnp.asarray(rng.standard_normal(50), jnp.float32), rng.integers(50, size=(3, 8))
    weights = jnp.asarray(rng.random((3, 8)), jnp.float32)

    def plain(h, table, bias):
        logits = h.astype(jnp.float32) @ table.astype(jnp.float32).T + bias
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return 3 * jnp.sum(weights * nll)

    ours = lambda h, t, b: 3 * projected_cross_entropy(h, t, targets, weights, chunks, b)[0]  # noqa: E731
    found, gradient = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2)))(h, table, bias)
    wanted, gradient_wanted = jax.value_and_grad(plain, argnums=(0, 1, 2))(h, table, bias)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    tolerance = 2e-6 if dtype == jnp.float32 else 1.2e-2
    assert [x.dtype for x in gradient] == [dtype, dtype, jnp.float32]
    assert_trees_close(gradient, gradient_wanted, relative=tolerance)
    np.testing.assert_allclose(gradient[2], gradient_wanted[2], rtol=1e-5, atol=1e-6)  # never rounded to bfloat16


def test_chunks_hold_few_logits():
    """Fails when a chunked loss of BERT-sized vocabulary holds all slots' logits at once."""
    config = replace(STILL_BERT, vocab_size=3000)
    batch, params = pair_rows(8, vocab_size=3000), random_bert(config)

    def program(chunks):
        objective = pretraining(config, PLAIN, loss_chunks=chunks)

        def loss(params):
            return sums_of(objective, params, batch)["masked_lm_loss"]

        return jax.jit(jax.grad(loss)).lower(params).compile().as_text()

    assert f"f32[{8 * SLOTS},3000]" in program(1)
    text = program(4)
    assert f"f32[{8 * SLOTS // 4},3000]" in text and f"f32[{8 * SLOTS},3000]" not in text


def test_evaluation_sees_the_same_masks_and_training_drops(params):
    """Fails when evaluation is random, or training without a difference: dropout must be on with a key."""
    objective = pretraining(TOY_BERT)
    run = jax.jit(lambda key: sums_of(objective, params, pair_rows(4), key))
    found, again = sums_of(objective, params, pair_rows(4)), sums_of(objective, params, pair_rows(4))
    assert {k: float(v) for k, v in found.items()} == {k: float(v) for k, v in again.items()}
    losses = [float(run(jax.random.key(seed))["masked_lm_loss"]) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2] and losses[0] != float(found["masked_lm_loss"])


# The left-to-right ablation


def test_left_to_right_predicts_the_next_token_of_the_same_pair(params):
    """Fails when a target crosses into the next pair or padding, or a place is lost: n - 1 for a pair of n tokens."""
    config = replace(STILL_BERT, attention="causal")
    head, model, batch = MaskedLMHead(config), build(config), pair_rows(6, seed=3)
    objective = left_to_right_language_model(model)
    wanted = 0.0
    outputs = jax.jit(model)(params, inputs_of(batch))
    transformed, bias = head.apply({"params": params["head"]["masked_lm"]}, outputs.states)
    logits = np.asarray(transformed @ outputs.output.T + bias, np.float64)
    count = 0
    for row in range(6):
        for at in range(LENGTH - 1):
            if batch.segments[row, at] > 0 and batch.segments[row, at] == batch.segments[row, at + 1]:
                wanted += np.log(np.exp(logits[row, at]).sum()) - logits[row, at, batch.ids[row, at + 1]]
                count += 1
    found, _ = figures(objective, params, batch, gradient=False)
    assert count == (batch.segments > 0).sum() - batch.pair_weights.sum()
    assert found["loss"] == pytest.approx(wanted / count, rel=1e-5) == found["nll"]


def test_left_to_right_packed_equals_one_by_one(params):
    """Fails when a causal pair sees the pairs to its left."""
    objective = left_to_right_language_model(build(replace(STILL_BERT, attention="causal")), loss_chunks=2)
    packed = pair_rows(6, seed=1)
    found, gradient = figures(objective, params, packed)
    wanted, gradient_wanted = figures(objective, params, one_by_one(packed))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert_trees_close(gradient, gradient_wanted, relative=1e-5, absolute=1e-8)
