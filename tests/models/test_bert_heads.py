"""BERT's heads and the objective of fine-tuning: which states they take, what padding and filler may do, the BiLSTM."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy import sums_of, weights_of
from toy_pairs import STILL_BERT, TOY_BERT, make_pair, random_bert, random_tree

from jaxlm.data.batch import ExampleBatch
from jaxlm.models import build
from jaxlm.models.bert.model import MaskedLMHead, NextSentenceHead
from jaxlm.models.heads.bilstm import ChosenLayers, LSTMHead
from jaxlm.models.heads.linear import PooledHead, SpanHead, TaggingHead
from jaxlm.models.model import Inputs
from jaxlm.nn.config import Execution
from jaxlm.nn.recurrence import BiLSTM
from jaxlm.objectives.objective import mean
from jaxlm.objectives.task import task_objective, task_outputs

KINDS = ["classification", "regression", "choice", "span", "tagging"]
CAUSAL = replace(STILL_BERT, attention="causal")
WIDTH = STILL_BERT.width


def head_of(kind: str, dropout_rate: float = 0.0):
    if kind == "span":
        return SpanHead(0.5)
    outputs = {"classification": 3, "regression": 1, "choice": 1, "tagging": 5}[kind]
    return TaggingHead(5, dropout_rate, 0.5) if kind == "tagging" else PooledHead(kind, outputs, dropout_rate, 0.5)


def examples(kind: str, length: int = 20, seed: int = 0) -> ExampleBatch:
    """Five examples and one filler, each of one sequence or three choices, one of which is absent."""
    rng = np.random.default_rng(seed)
    choices = 3 if kind == "choice" else 1
    lengths = rng.choice([7, 11, 16], size=(6, choices)).astype(np.int32)
    lengths[5] = 0
    if kind == "choice":
        lengths[1, 2] = 0
    ids, second = np.zeros((6, choices, length), np.int32), lengths.copy()
    for place in np.ndindex(lengths.shape):
        if n := int(lengths[place]):
            ids[place][:n], types = make_pair(rng, n)
            second[place] = int(types.argmax())
    spans, tags = rng.integers(16, size=(6, 2)), rng.integers(-1, 5, size=(6, 64))[:, :length]
    labels = {
        "regression": rng.random(6).astype(np.float32),
        "span": np.minimum(spans, np.maximum(lengths[:, :1] - 1, 0)).astype(np.int32),
        "tagging": np.where(np.arange(length) < lengths[:, :1], tags, -1).astype(np.int32),
    }.get(kind, rng.integers(2, size=6).astype(np.int32))
    weights, index = np.array([1, 1, 1, 1, 1, 0], np.float32), np.array([3, 0, 1, 4, 2, -1], np.int32)
    return ExampleBatch(ids, lengths, np.zeros_like(lengths), second, labels, weights, index)


def with_head(head, *inputs, seed: int = 5):
    """Random parameters of the toy's backbone and of a head."""
    shapes = jax.eval_shape(lambda: head.init(jax.random.key(0), *inputs, train=False)["params"])
    return {"backbone": random_bert(STILL_BERT)["backbone"], "head": random_tree(shapes, 0.5, seed)}


@pytest.fixture(scope="module")
def params():
    return {kind: with_head(head_of(kind), np.zeros((1, 1, WIDTH), np.float32)) for kind in KINDS}


def figures(objective, params, batch):
    """Means of all terms and metrics."""
    sums = jax.jit(functools.partial(sums_of, objective))(params, batch)
    weights = weights_of(objective, batch)
    assert set(sums) == set(weights) and set(objective.coefficients) == {"task_loss"}
    return {name: float(mean(sums[name], weights[name])) for name in sums}


@functools.cache
def states_of(config):
    """The model without padding or packing, compiled once for a length."""
    return jax.jit(lambda params, inputs: build(config)(params, inputs).states)


def spelt_out(kind: str, params, batch: ExampleBatch, config=STILL_BERT) -> dict[str, float]:
    """Section 3.2, one sequence at a time and without padding; the states are the model's own."""
    kernel, bias = (np.asarray(params["head"][name], np.float64) for name in ("kernel", "bias"))
    pooler = params["backbone"]["pooler"]
    log_softmax = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))  # noqa: E731
    losses, right = [], []
    for e in np.flatnonzero(batch.weights):
        scores = []
        for c in range(batch.ids.shape[1]):
            n = int(batch.lengths[e, c])
            if n == 0:
                continue
            index = np.arange(n)[None]
            types = (index >= batch.second[e, c]).astype(np.int32)
            inputs = Inputs(batch.ids[e, c, None, :n], index, None, types)
            h = np.asarray(states_of(config)(params, inputs)[0], np.float64)
            if kind in ("span", "tagging"):
                scores.append(h @ kernel + bias)
            else:
                state = h[-1] if config.attention == "causal" else h[0]
                scores.append(np.tanh(state @ pooler["kernel"] + pooler["bias"]) @ kernel + bias)
        label = batch.labels[e]
        if kind == "regression":
            losses.append((scores[0][0] - label) ** 2)
        elif kind == "span":
            log_p = log_softmax(scores[0].T)
            losses.append(-(log_p[0, label[0]] + log_p[1, label[1]]) / 2)
            right.append(np.array_equal(log_p.argmax(-1), label))
        elif kind == "tagging":
            log_p = log_softmax(scores[0])
            for at in np.flatnonzero(label >= 0):
                losses.append(-log_p[at, label[at]])
                right.append(log_p[at].argmax() == label[at])
        else:
            log_p = log_softmax(np.array(scores)[:, 0] if kind == "choice" else scores[0])
            losses.append(-log_p[label])
            right.append(log_p.argmax() == label)
    found = {"task_loss": float(np.mean(losses))}
    return found if kind == "regression" else found | {"accuracy": float(np.mean(right))}


def kinds_and_attentions() -> list:
    """Every kind in both directions. By default, to the left alone: one kind that pools and one that does not."""
    spare = {"regression", "choice", "span"}
    return [
        pytest.param(kind, config, id=f"{kind}-{config.attention}", marks=[pytest.mark.campaign] * on)
        for kind in KINDS
        for config in (STILL_BERT, CAUSAL)
        for on in [config is CAUSAL and kind in spare]
    ]


@pytest.mark.parametrize(("kind", "config"), kinds_and_attentions())
def test_the_task_loss_is_the_plain_one(params, kind, config):
    """Fails when filler, padding or absent choices count, a wrong state is pooled, or types begin elsewhere."""
    found = figures(task_objective(build(config), head_of(kind)), params[kind], examples(kind))
    assert found == pytest.approx(spelt_out(kind, params[kind], examples(kind), config), rel=1e-5)


@pytest.mark.parametrize("kind", ["classification", "choice", "span", "tagging"])
def test_padding_changes_nothing(params, kind):
    """Fails when what is predicted depends on how far a batch is padded, or on what stands in the padding."""
    model, head = build(STILL_BERT), head_of(kind)
    short, long = examples(kind, 17), examples(kind, 30)
    long = long.replace(ids=long.ids + 7 * (np.arange(30) >= long.lengths[..., None]))
    run = jax.jit(lambda params, batch: task_outputs(model, head, params, batch)[0])
    found, again = (np.asarray(run(params[kind], batch)) for batch in (short, long))
    if kind in ("span", "tagging"):
        real = np.arange(17) < short.lengths
        if kind == "span":
            assert np.all(found[~real] < -1e29) and np.all(again[:, 17:] < -1e29)
        found, again = found[real], again[:, :17][real]
    else:
        found, again = found[:5], again[:5]  # filler has no tokens and no score of its own
    np.testing.assert_allclose(found, again, rtol=1e-5, atol=1e-5)


def test_each_head_drops_what_it_says(params):
    """Fails when a span head drops, the others do not, or choices share one mask (in BERT each has its own)."""
    ones = jnp.ones((50, 3, WIDTH))
    for kind in ("classification", "choice", "tagging"):
        head = head_of(kind, 0.5)
        apply = lambda train, head=head, kind=kind: head.apply(  # noqa: E731
            {"params": params[kind]["head"]}, ones, train=train, rngs={"dropout": jax.random.key(0)}
        )
        assert np.ptp(np.asarray(apply(False)), axis=0).max() < 1e-6 < np.ptp(np.asarray(apply(True)), axis=0).min()
        if kind == "choice":
            assert np.ptp(np.asarray(apply(True)), axis=1).min() > 0
    span = head_of("span").apply({"params": params["span"]["head"]}, ones, train=True)
    assert np.ptp(np.asarray(span), axis=0).max() < 1e-6


def test_pretraining_heads_keep_the_dtype_that_they_should():
    """Fails when bfloat16 states come out of the masked LM's transform in float32, or scores in bfloat16."""
    states = jnp.ones((2, 3, WIDTH), jnp.bfloat16)
    params = nn.unbox(MaskedLMHead(TOY_BERT).init(jax.random.key(0), states)["params"])
    h, bias = MaskedLMHead(TOY_BERT).apply({"params": params}, states)
    assert h.dtype == jnp.bfloat16 and bias.dtype == jnp.float32 and bias.shape == (64,)
    head = NextSentenceHead(0.02)
    assert head.apply({"params": nn.unbox(head.init(jax.random.key(0), states)["params"])}, states).dtype == jnp.float32


# The BiLSTM and the heads on it


@pytest.fixture(scope="module")
def lstm_params():
    shapes = jax.eval_shape(
        lambda: BiLSTM(6, 2).init(jax.random.key(0), jnp.zeros((1, 1, 4)), jnp.ones((1, 1), bool))["params"]
    )
    return random_tree(shapes, 0.5)


def test_the_lstm_reads_both_ways_and_no_padding(lstm_params):
    """Fails when the backward direction begins in the padding, or a direction sees what it has not read."""
    x = np.random.default_rng(0).standard_normal((1, 9, 4)).astype(np.float32)
    apply = jax.jit(lambda x, n: BiLSTM(6, 2).apply({"params": lstm_params}, x, jnp.arange(x.shape[1])[None] < n))
    run = lambda x, n: np.asarray(apply(x, n))  # noqa: E731
    padded = np.concatenate([x, 100 * np.ones((1, 4, 4), np.float32)], axis=1)
    np.testing.assert_allclose(run(padded, 9)[:, :9], run(x, 9), rtol=1e-6, atol=1e-6)
    assert not run(padded, 9)[:, 9:].any()
    one = {name: value for name, value in lstm_params.items() if name.startswith("layer_0")}
    single = jax.jit(lambda x: BiLSTM(6, 1).apply({"params": one}, x, np.ones((1, 9), bool)))
    moved = x.copy()
    moved[:, 4] += 1
    changed = np.asarray(np.abs(single(moved) - single(x)))[0] > 0
    assert not changed[:4, :6].any() and changed[4:, :6].all()  # forwards
    assert changed[:5, 6:].all() and not changed[5:, 6:].any()  # backwards


def test_a_fresh_lstm():
    """Fails when kernels are not within 1 / sqrt(width), or the forget gate does not start open."""
    init = BiLSTM(16, 1).init(jax.random.key(0), jnp.zeros((1, 1, 8)), jnp.ones((1, 1), bool))["params"]
    for name, value in nn.unbox(init).items():
        if name.endswith("bias"):
            np.testing.assert_array_equal(value, np.repeat([0, 1, 0, 0], 16))
        else:
            assert 0.23 < np.abs(value).max() <= 0.25


def test_the_layers_of_table_7():
    """Fails when a row of the table takes other layers: twelve layers and the embeddings, each of its own number."""
    hidden = jnp.broadcast_to(2.0 ** jnp.arange(13)[:, None, None, None], (13, 1, 2, 3))
    wanted = {
        "embeddings": 1,
        "second_to_last": 2**11,
        "last": 2**12,
        "sum_last_four": 2**9 + 2**10 + 2**11 + 2**12,
        "weighted_last_four": (2**9 + 2**10 + 2**11 + 2**12) / 4,
        "weighted_all": (2**13 - 2) / 12,
    }
    for features, value in wanted.items():
        found = ChosenLayers(features).init_with_output(jax.random.key(0), hidden)[0]
        np.testing.assert_allclose(found, np.full((1, 2, 3), value), rtol=1e-6, err_msg=features)
    found = ChosenLayers("concatenated_last_four").apply({}, hidden)
    np.testing.assert_array_equal(found[0, 0], np.repeat(2.0 ** np.arange(9, 13), 3))


@pytest.mark.parametrize(
    ("frozen", "kind", "features"),
    [
        (True, "classification", "weighted_all"),
        (False, "tagging", "last"),
        pytest.param(False, "classification", "weighted_all", marks=pytest.mark.campaign),
        pytest.param(True, "tagging", "last", marks=pytest.mark.campaign),
    ],
)
def test_an_encoder_under_a_bilstm(kind, features, frozen):
    """Fails when a frozen encoder gets a gradient or drops, another gets none, a part of the head stays unused, or
    padding is read."""
    config, hidden = replace(TOY_BERT, num_layers=1), np.zeros((2, 1, 1, WIDTH), np.float32)
    head = LSTMHead(head_of(kind), features, frozen, width=6, num_layers=1)
    params = with_head(head, hidden, np.ones((1, 1), np.int32))
    params["backbone"]["blocks"] = jax.tree.map(lambda x: x[:1], params["backbone"]["blocks"])
    objective = task_objective(build(config, Execution(unroll=1)), head)

    def loss(params, batch, key):
        return sums_of(objective, params, batch, key)["task_loss"]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params, examples(kind), jax.random.key(0))
    moved = [np.abs(x).max() > 0 for x in jax.tree.leaves(gradient["backbone"]["blocks"])]
    assert not any(moved) if frozen else all(moved)
    for path, x in jax.tree_util.tree_leaves_with_path(gradient["head"]):
        # One layer's softmax is 1 whatever its weight.
        assert np.abs(x).max() > 0 or path[-1].key == "weights", path
    evaluate = jax.jit(lambda params, batch: loss(params, batch, None))
    still = float(evaluate(params, examples(kind)))
    assert (abs(float(value) - still) < 1e-5 * abs(still)) == frozen
    np.testing.assert_allclose(evaluate(params, examples(kind, 30)), still, rtol=1e-5)
    assert head.kind == kind
