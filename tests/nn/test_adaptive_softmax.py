"""Adaptive input and softmax, against a direct computation in NumPy and against torch.nn.AdaptiveLogSoftmaxWithLoss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.models import (
    AWDLSTMConfig,
    GPTConfig,
    LSTMConfig,
    TransformerXLConfig,
    build,
    with_vocabulary,
    without_dropout,
)
from jaxlm.models.family import Inputs
from jaxlm.nn.adaptive_softmax import AdaptiveOutput, Tables, embed_tokens, make_tables
from jaxlm.nn.config import Adaptive
from jaxlm.nn.execution import Execution

V, D = 29, 12
CASES = {
    "one width": Adaptive((7, 12)),
    "tied": Adaptive((7, 12), divisor=2),
    "untied": Adaptive((5, 11, 20), divisor=2, projections="untied"),
}


class Holder(nn.Module):
    """A module with nothing but the tables."""

    adaptive: Adaptive

    @nn.compact
    def __call__(self) -> Tables:
        return make_tables(self, V, D, self.adaptive, nn.initializers.normal(0.3), bias=True)


@functools.cache
def tables_of(name: str) -> Tables:
    """Return random tables of a case; the parameters that begin with 0 too."""
    holder, rng = Holder(CASES[name]), np.random.default_rng(3)
    params = nn.unbox(holder.init(jax.random.key(0)))
    params = jax.tree.map(lambda leaf: 0.4 * rng.standard_normal(leaf.shape).astype(np.float32), params)
    return jax.tree.map(np.asarray, holder.apply(params))


def direct(h_TD: np.ndarray, tables: Tables) -> np.ndarray:
    """Return the log-probability of each id in float64, one cluster after the other."""

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    scores, start = [], 0
    for number, table in enumerate(np.asarray(t, np.float64) for t in tables.tokens):
        h = h_TD @ tables.outputs[number].T if tables.outputs else h_TD
        scores.append(h @ table.T + tables.bias_V[start : start + len(table)])
        start += len(table)
    size = scores[0].shape[1]
    head = log_softmax(np.concatenate([scores[0], h_TD @ tables.clusters_KD.T + tables.clusters_bias_K], axis=1))
    tails = [head[:, size + i : size + i + 1] + log_softmax(tail) for i, tail in enumerate(scores[1:])]
    return np.concatenate([head[:, :size], *tails], axis=1)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_and_loss_are_those_of_a_direct_computation(name):
    """Fails when a cluster is taken for another, its bias is misplaced, or chunks change the loss or its gradient."""
    tables, rng = tables_of(name), np.random.default_rng(0)
    h_BLD = rng.standard_normal((2, 6, D)).astype(np.float32)
    targets, weights = rng.integers(V, size=(2, 6)), rng.random((2, 6)).astype(np.float32)
    wanted = direct(h_BLD.reshape(-1, D).astype(np.float64), tables).reshape(2, 6, V)

    @jax.jit
    def found(h_BLD, tables):
        def loss(chunks):
            of = lambda h, tables: AdaptiveOutput().loss(None, h, tables, targets, weights, chunks)  # noqa: E731
            return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(h_BLD, tables)

        return AdaptiveOutput().logits(None, h_BLD, tables), loss(1), loss(3)

    log_probs, whole, chunked = jax.device_get(found(h_BLD, tables))
    np.testing.assert_allclose(log_probs, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.exp(log_probs.astype(np.float64)).sum(-1), 1, atol=1e-5)
    right = np.take_along_axis(wanted, targets[..., None], -1)[..., 0]
    (nll, hits), _ = whole
    np.testing.assert_allclose(nll, -(weights * right).sum(), rtol=1e-5)
    np.testing.assert_allclose(hits, (weights * (wanted.argmax(-1) == targets)).sum(), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, chunked)


def test_tails_that_are_tied_to_the_head_give_the_full_softmax():
    """Fails when a tail is not multiplied by the probability of its cluster. Ids of a tail have equal rows and biases;
    the row of the cluster is theirs, and its bias the logarithm of their number higher."""
    tables, rng = tables_of("one width"), np.random.default_rng(1)
    sizes = [len(table) for table in tables.tokens]
    starts = np.cumsum([0, *sizes])
    tokens = [tables.tokens[0], *(np.repeat(table[:1], len(table), 0) for table in tables.tokens[1:])]
    bias = tables.bias_V.copy()
    for start, size in zip(starts[1:], sizes[1:], strict=False):
        bias[start : start + size] = bias[start]
    clusters = np.concatenate([table[:1] for table in tokens[1:]])
    clusters_bias = np.array([bias[s] + np.log(n) for s, n in zip(starts[1:], sizes[1:], strict=False)], np.float32)
    tied = Tables(tuple(tokens), (), (), bias, clusters, clusters_bias)
    h = rng.standard_normal((5, D)).astype(np.float32)
    full = AdaptiveOutput().logits(None, jnp.asarray(h), Tables((np.concatenate(tokens),), (), (), bias))
    np.testing.assert_allclose(AdaptiveOutput().logits(None, jnp.asarray(h), tied), jax.nn.log_softmax(full), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_rows_of_their_clusters(name):
    """Fails when an id is read from another cluster, or projected by the output's projection."""
    tables = tables_of(name)
    found = embed_tokens(tables, jnp.arange(V), Execution(dtype="float32"))
    inputs = tables.inputs or [np.eye(D, dtype=np.float32)] * len(tables.tokens)
    wanted = np.concatenate([table @ matrix for table, matrix in zip(tables.tokens, inputs, strict=True)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parity
def test_torch_gives_the_same_log_probabilities():
    """Fails when a tail is multiplied by the probability of another cluster than in PyTorch."""
    torch = pytest.importorskip("torch", reason="needs PyTorch, the extra [parity]")
    tables = tables_of("untied")
    tables = tables._replace(bias_V=np.where(np.arange(V) < len(tables.tokens[0]), tables.bias_V, 0))
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, [5, 11, 20], div_value=2.0, head_bias=True)
    head = np.concatenate([tables.tokens[0] @ tables.outputs[0], tables.clusters_KD])
    state = {"head.weight": head, "head.bias": np.concatenate([tables.bias_V[:5], tables.clusters_bias_K])}
    for number in (1, 2, 3):
        state[f"tail.{number - 1}.0.weight"], state[f"tail.{number - 1}.1.weight"] = (
            tables.outputs[number],
            tables.tokens[number],
        )
    module.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    h = np.random.default_rng(2).standard_normal((6, D)).astype(np.float32)
    wanted = module.log_prob(torch.tensor(h)).detach().numpy()
    np.testing.assert_allclose(AdaptiveOutput().logits(None, jnp.asarray(h), tables), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        TransformerXLConfig(vocab_size=V, num_layers=1, width=D, num_heads=2, feed_forward_width=8),
        LSTMConfig(vocab_size=V, num_layers=1, width=D, units=6),
        AWDLSTMConfig(vocab_size=V, num_layers=1, width=D, units=6),
        GPTConfig(vocab_size=V, num_positions=12, num_layers=1, width=D, num_heads=2, feed_forward_width=8),
    ],
    ids=lambda config: config.kind,
)
def test_a_family_scores_by_its_clusters(config):
    """Fails when a family does not pass its tables on, or other ids than those of its vocabulary get a score."""
    from dataclasses import replace

    model = build(without_dropout(replace(config, adaptive=CASES["tied"])))
    params = {"backbone": nn.unbox(jax.jit(model.init)(jax.random.key(0)))}
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)

    @jax.jit
    def found(params):
        outputs = model(params, Inputs(ids, ids))
        loss = model.loss(params, outputs.states, outputs.output, ids, np.ones((2, 6), np.float32))
        return model.logits(params, outputs.states, outputs.output), loss

    logits, (nll, _) = found(params)
    right = np.take_along_axis(np.asarray(logits), ids[..., None], -1)
    np.testing.assert_allclose(np.exp(logits).sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(nll, -right.sum(), rtol=1e-5)


def test_cutoffs_that_no_vocabulary_has_are_refused():
    """Fails when unsorted cutoffs, or tails without a width, reach a model; cutoffs beyond the vocabulary are none."""
    with pytest.raises(InputError, match="cutoffs must be above 0 and ascending, got 7 3; sort them"):
        Adaptive((7, 3)).check(D)
    with pytest.raises(InputError, match="cutoffs must be empty with model.tables one, got 3; give --model.tables two"):
        GPTConfig(vocab_size=V, tables="one", adaptive=Adaptive((3,))).check()
    with pytest.raises(InputError, match="divisor must leave each tail a width above 0, got 4"):
        Adaptive((3, 7), divisor=4).check(D)
    grown = with_vocabulary(GPTConfig(vocab_size=30, adaptive=Adaptive((7, 30, 31, 90))), 33)
    assert grown.vocab_size == 33 and grown.adaptive.sizes(33) == (7, 26), "special tokens have become a cluster"
    assert grown.adaptive.cutoffs == (7, 90), "a run of an earlier version has the cutoffs that have no effect"
    assert Adaptive((20_000, 40_000)).sizes(30_000) == (20_000, 10_000) and Adaptive((9,)).sizes(9) == (9,)
