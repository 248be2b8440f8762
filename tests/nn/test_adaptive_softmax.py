"""Adaptive input and softmax, against a direct computation in NumPy and against torch.nn.AdaptiveLogSoftmaxWithLoss."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import run_config
from jaxlm.models import build, with_vocabulary, without_dropout
from jaxlm.models.awd_lstm import AWDLSTMConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.models.lstm import LSTMConfig
from jaxlm.models.model import Inputs
from jaxlm.models.transformer_xl import TransformerXLConfig
from jaxlm.nn.config import Adaptive, Execution
from jaxlm.nn.output import AdaptiveOutput, Tables, embed_tokens, make_tables
from jaxlm.runs.directory import RunDirectory
from jaxlm.training.config import PretrainConfig, resolved_json

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
        return make_tables(
            self, SimpleNamespace(vocab_size=V, width=D, adaptive=self.adaptive), nn.initializers.normal(0.3), bias=True
        )


@functools.cache
def tables_of(name: str) -> Tables:
    """Return random tables of a case; the parameters that begin with 0 too."""
    holder, rng = Holder(CASES[name]), np.random.default_rng(3)
    params = nn.unbox(holder.init(jax.random.key(0)))
    params = jax.tree.map(lambda leaf: 0.4 * rng.standard_normal(leaf.shape).astype(np.float32), params)
    return jax.tree.map(np.asarray, holder.apply(params))


def direct(h_TD: np.ndarray, tables: Tables) -> np.ndarray:
    """Return the log-probability of each id in float64, as in the original code (pytorch/utils/proj_adaptive_softmax.py
    of kimiyoung/transformer-xl): the clusters' rows follow the head's, and its projection comes before both."""

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    sections = np.split(tables.bias_V, np.cumsum([len(table) for table in tables.tokens])[:-1])
    weights = [np.concatenate([tables.tokens[0], tables.clusters_KD]), *tables.tokens[1:]]
    biases = [np.concatenate([sections[0], tables.clusters_bias_K]), *sections[1:]]
    matrices = tables.outputs or [np.eye(D)] * len(weights)
    scores = [h_TD @ of.T @ rows.T + bias for of, rows, bias in zip(matrices, weights, biases, strict=True)]
    head, size = log_softmax(scores[0]), len(tables.tokens[0])
    tails = [head[:, size + i : size + i + 1] + log_softmax(tail) for i, tail in enumerate(scores[1:])]
    return np.concatenate([head[:, :size], *tails], axis=1)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_and_loss_are_those_of_a_direct_computation(name):
    """Fails when a cluster is taken for another, its bias is misplaced, its score skips the head's projection, or
    chunks change the loss or its gradient."""
    tables, rng = tables_of(name), np.random.default_rng(0)
    h_BLD = rng.standard_normal((2, 6, D)).astype(np.float32)
    targets, weights = rng.integers(V, size=(2, 6)), rng.random((2, 6)).astype(np.float32)
    wanted = direct(h_BLD.reshape(-1, D).astype(np.float64), tables).reshape(2, 6, V)

    @jax.jit
    def found(h_BLD, tables):
        def loss(chunks):
            of = lambda h, tables: AdaptiveOutput(CASES[name]).loss(None, h, tables, targets, weights, chunks)  # noqa: E731
            return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(h_BLD, tables)

        return AdaptiveOutput(CASES[name]).logits(None, h_BLD, tables), loss(1), loss(3)

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
    layer = AdaptiveOutput(CASES["one width"])
    full = layer.logits(None, jnp.asarray(h), Tables((np.concatenate(tokens),), (), (), bias))
    np.testing.assert_allclose(layer.logits(None, jnp.asarray(h), tied), jax.nn.log_softmax(full), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_rows_of_their_clusters(name):
    """Fails when an id is read from another cluster, or projected by the output's projection."""
    tables = tables_of(name)
    found = embed_tokens(tables, jnp.arange(V), Execution(dtype="float32"))
    inputs = tables.inputs or [np.eye(D, dtype=np.float32)] * len(tables.tokens)
    wanted = np.concatenate([table @ matrix for table, matrix in zip(tables.tokens, inputs, strict=True)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("clusters", ["projected", "unprojected"])
def test_torch_gives_the_same_log_probabilities(clusters):
    """Fails when a tail is multiplied by the probability of another cluster than in PyTorch, whose head has no
    projection: its rows are the products of ours with it, those of the clusters only where they are projected."""
    torch = pytest.importorskip("torch", reason="needs PyTorch, the extra [parity]")
    tables = tables_of("untied")
    tables = tables._replace(bias_V=np.where(np.arange(V) < len(tables.tokens[0]), tables.bias_V, 0))
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, [5, 11, 20], div_value=2.0, head_bias=True)
    rows = tables.clusters_KD @ tables.outputs[0] if clusters == "projected" else tables.clusters_KD
    head = np.concatenate([tables.tokens[0] @ tables.outputs[0], rows])
    state = {"head.weight": head, "head.bias": np.concatenate([tables.bias_V[:5], tables.clusters_bias_K])}
    for number in (1, 2, 3):
        state[f"tail.{number - 1}.0.weight"], state[f"tail.{number - 1}.1.weight"] = (
            tables.outputs[number],
            tables.tokens[number],
        )
    module.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    h = np.random.default_rng(2).standard_normal((6, D)).astype(np.float32)
    wanted = module.log_prob(torch.tensor(h)).detach().numpy()
    layer = AdaptiveOutput(replace(CASES["untied"], clusters=clusters))
    np.testing.assert_allclose(layer.logits(None, jnp.asarray(h), tables), wanted, atol=1e-5)


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
    with pytest.raises(InputError, match="cutoffs must be above 0 and ascending, got 0; give the first id"):
        Adaptive((0,)).check(D)
    with pytest.raises(InputError, match="cutoffs must be empty with model.tables one, got 3; give --model.tables two"):
        GPTConfig(vocab_size=V, tables="one", adaptive=Adaptive((3,))).check()
    with pytest.raises(InputError, match="divisor must leave each tail a width above 0, got 4"):
        Adaptive((3, 7), divisor=4).check(D)
    grown = with_vocabulary(GPTConfig(vocab_size=30, adaptive=Adaptive((7, 30, 31, 90))), 33)
    assert grown.vocab_size == 33 and grown.adaptive.sizes(33) == (7, 26), "special tokens have become a cluster"
    assert grown.adaptive.cutoffs == (7, 90), "a run of an earlier version has the cutoffs that have no effect"
    assert Adaptive((20_000, 40_000)).sizes(30_000) == (20_000, 10_000) and Adaptive((9,)).sizes(9) == (9,)


def test_a_run_of_an_earlier_version_keeps_its_scores_of_the_tails(tmp_path):
    """Fails when a model that was trained without the projection is read with it, or goes on with it."""
    for divisor, clusters in ((1, "projected"), (2, "unprojected")):
        model = TransformerXLConfig(width=D, num_heads=2, adaptive=Adaptive((7,), divisor))
        given = resolved_json(PretrainConfig(model=model, num_steps=9), {})
        saved = json.loads(json.dumps(given))
        del saved["model"]["adaptive"]["clusters"]
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with RunDirectory(tmp_path) as run:
            assert run_config(run).model.adaptive.clusters == clusters
            assert run.open(resolved_json(run_config(run), {})) == []
    with pytest.raises(InputError, match='model.adaptive.clusters: "unprojected" -> "projected"; give the saved val'):
        RunDirectory(tmp_path).open(given)
