"""The character Transformer: its sizes, dropout and auxiliary losses.

Parity with PyTorch is in test_character_transformer_parity, whole runs in test_family_runs.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from toy import packed

from jaxlm.errors import InputError
from jaxlm.models import build, without_dropout
from jaxlm.models.character_transformer import T12, T64, CharacterTransformerConfig
from jaxlm.models.model import Inputs, Model
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import LanguageModel
from jaxlm.objectives.language_model import AuxiliaryLosses, contributes, further_losses, language_model
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.pretraining import make_pretraining

TOY = CharacterTransformerConfig(
    vocab_size=31, num_positions=16, num_layers=3, width=8, num_heads=2, feed_forward_width=12, init_std=0.4
)
STILL = without_dropout(TOY)
KEY = jax.random.key(0)


def auxiliary(model: Model, intermediate: float, second_target: float, **more) -> AuxiliaryLosses:
    coefficients = {"intermediate_coefficient": intermediate, "second_target_coefficient": second_target}
    return AuxiliaryLosses(model, LanguageModel(**coefficients, **more))


def params_of(model: Model, losses: AuxiliaryLosses | None = None) -> dict:
    head = model.output_layer.init(KEY) | ({} if losses is None else losses.init(KEY))
    return nn.unbox({"backbone": model.init(KEY), "head": head})


@pytest.fixture(scope="module")
def model() -> Model:
    return build(STILL)


def ids_of(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(rows + length).integers(TOY.vocab_size, size=(rows, length)).astype(np.int32)


# The model


@pytest.mark.parametrize(
    ("config", "published"), [(T12, (44.0e6, 40.9e6)), (T64, (234.9e6, 218.1e6))], ids=["T12", "T64"]
)
def test_the_sizes_are_the_published_ones(config, published):
    """Fails when a layer lacks a matrix or positions, or a loss its classifier.

    The published numbers are those of matrices and position tables: without norms, biases and the token table. That for
    inference is also without the classifier of the last layer.
    """
    objective = LanguageModel(intermediate_coefficient=1.0, second_target_coefficient=0.5)
    pretraining = make_pretraining(PretrainConfig(model=config, objective=objective), None)
    shapes = nn.unbox(jax.eval_shape(pretraining.init_params, KEY))
    blocks = shapes["backbone"]["blocks"]
    matrices = [leaf for part in ("attention", "feed_forward") for leaf in jax.tree.leaves(blocks[part])]
    layers = sum(leaf.size for leaf in matrices if leaf.ndim > 2 and leaf.size > 3 * 64 * 512)
    n = config.num_layers
    layers += blocks["positions"].size
    assert layers == n * (4 * 512**2 + 2 * 512 * 2048 + 512**2) == pytest.approx(published[1], rel=1e-3)
    classifiers = [leaf.size for leaf in jax.tree.leaves(shapes["head"]) if leaf.shape[-2:] == (256, 512)]
    assert sum(classifiers) == 2 * n * 256 * 512
    assert layers + sum(classifiers) == pytest.approx(published[0], rel=1e-3)
    extra = pretraining.flops_per_token(512) - pretraining.model.flops_per_token(512)
    assert extra == 6 * (2 * n - 1) * 256 * 512


@pytest.mark.parametrize("rate", ["attention_dropout_rate", "relu_dropout_rate"])
def test_each_dropout_acts_in_its_branch_alone(rate):
    """Fails when a rate is not used, or also drops the embeddings, the states or the other branch."""
    other = {"attention_dropout_rate": "feed_forward", "relu_dropout_rate": "attention"}[rate]
    model = build(dataclasses.replace(STILL, **{rate: 0.5}))
    params, ids = params_of(model), ids_of(2, 9)
    inputs = Inputs(ids, np.broadcast_to(np.arange(9), ids.shape))
    blocks = params["backbone"]["blocks"]

    def states(branch: str, key) -> np.ndarray:
        silenced = blocks | {branch: blocks[branch] | {"out_kernel": jnp.zeros_like(blocks[branch]["out_kernel"])}}
        return np.asarray(model({"backbone": params["backbone"] | {"blocks": silenced}}, inputs, key=key).states)

    own = ({"attention", "feed_forward"} - {other}).pop()
    np.testing.assert_array_equal(states(own, KEY), states(own, None))
    assert not np.allclose(states(other, KEY), states(other, None))


def test_a_config_refuses_what_no_run_has():
    """Fails when a size or a coefficient that no run can have reaches the run."""
    with pytest.raises(InputError, match="model.width must be divisible by model.num_heads 3, got"):
        dataclasses.replace(TOY, num_heads=3).check()
    with pytest.raises(InputError, match="length must be at most 16"):
        PretrainConfig(model=TOY, length=17).check()
    with pytest.raises(InputError, match="auxiliary_lm must be 0 for a decoder .character_transformer., whose output"):
        FinetuneConfig(model=TOY, auxiliary_lm=0.5).check()
    with pytest.raises(InputError, match="intermediate_coefficient must be 0 for a model of one layer, got 1"):
        auxiliary(build(dataclasses.replace(TOY, num_layers=1)), 1.0, 0.0)


# Auxiliary losses


@pytest.mark.parametrize("layers", [2, 5, 64])
@pytest.mark.parametrize("num_steps", [1, 7, 128, 1001, 4_000_000])
def test_a_layer_stops_at_its_fraction_of_the_run(layers, num_steps):
    """Fails when a boundary is off by one step, all layers stop at once, or the arithmetic overflows."""
    stops = [Fraction(layer * num_steps, 2 * layers) for layer in range(1, layers)]
    steps = sorted({max(0, int(stop) + offset) for stop in stops for offset in (-1, 0, 1, 2)} | {0, num_steps // 2})
    found = contributes(np.array(steps)[:, None], np.float32(num_steps), layers)
    assert found.tolist() == [[float(step < stop) for stop in stops] for step in steps]
    assert not contributes(np.int32(num_steps - num_steps // 2), np.float32(num_steps), layers).any()


def test_each_loss_alone_is_its_term_of_all(model):
    """Fails when a loss changes with the others, has the classifier of another, or is added without its coefficient."""
    batch, both = packed(3, length=12, vocab_size=31), auxiliary(model, 0.7, 0.5)
    params = params_of(model, both)

    def losses_of(losses: AuxiliaryLosses, key=KEY) -> tuple[float, dict]:
        objective = language_model(model, further=[losses.further_loss()])
        weights, sums = objective.weights(batch), objective.sums(params, batch, None, key)[0]
        means = {name: np.asarray(sums[name] / weights[name]) for name in sums}
        factors = {name: objective.coefficient(name, 0, 100) for name in objective.coefficients.keys() & means.keys()}
        return sum(float(np.sum(factors[name] * means[name])) for name in factors), means

    _, every = losses_of(both)
    assert every["layer_nll"].shape == every["layer_second_nll"].shape == (2,)
    for coefficients, terms in (
        ((0.7, 0.0), {"layer_nll": 0.7}),
        ((0.0, 0.5), {"second_nll": 0.5}),
        ((0.7, 0.5), {"layer_nll": 0.7, "second_nll": 0.5, "layer_second_nll": 0.35}),
    ):
        losses = auxiliary(model, *coefficients)
        assert set(losses.coefficients) == set(terms) == set(nn.unbox(losses.init(KEY))["auxiliary"]) - {"norm"}
        loss, means = losses_of(losses)
        assert set(means) == {"nll", "accuracy", *terms}
        expected = every["nll"] + sum(factor * every[name].sum() for name, factor in terms.items())
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert set(losses_of(both, key=None)[1]) == {"nll", "accuracy"}, "an evaluation computes losses of training alone"


def test_losses_at_the_last_position_are_those_of_its_targets(model):
    """Fails when another position of a row counts, in the loss of the next token or in an auxiliary one."""
    batch, both = packed(3, length=12, vocab_size=31), auxiliary(model, 0.7, 0.5)
    params = params_of(model, both)
    asked = LanguageModel(positions="last", intermediate_coefficient=0.7, second_target_coefficient=0.5)
    objective = language_model(model, further=further_losses(model, asked))
    assert "nll" not in objective.coefficients and objective.coefficients["last_nll"] == 1.0
    weights, sums = objective.weights(batch), objective.sums(params, batch, None, KEY)[0]
    assert set(sums) == {"nll", "accuracy", "last_nll", *both.coefficients}
    outputs = model(params, Inputs(batch.ids, batch.positions, batch.segments), key=KEY)
    log_probs = jax.nn.log_softmax(model.logits(params, outputs.states, outputs.output))
    last = [int(np.flatnonzero(row)[-1]) for row in batch.weights]
    assert min(last) < 11, "the case has no padding"
    wanted = [-log_probs[row, at, batch.targets[row, at]] for row, at in enumerate(last)]
    np.testing.assert_allclose(sums["last_nll"] / weights["last_nll"], np.mean(wanted), rtol=1e-5)
    before = [(row, at - 1) for row, at in enumerate(last) if batch.segments[row, at - 1] == batch.segments[row, at]]
    scores = jax.nn.log_softmax(outputs.states @ params["head"]["auxiliary"]["second_nll"]["kernel"].T)
    wanted = [-scores[row, at, batch.targets[row, at + 1]] for row, at in before]
    assert len(before) == weights["second_nll"] > 0
    np.testing.assert_allclose(sums["second_nll"] / weights["second_nll"], np.mean(wanted), rtol=1e-5)
    assert set(objective.sums(params, batch, None, None)[0]) == {"nll", "accuracy"}, "an evaluation is of all positions"


def test_rows_without_segments_are_one_segment(model):
    """Fails when a batch of full rows, as that of jaxlm.bench, has no second targets."""
    batch, both = packed(3, length=12, vocab_size=31), auxiliary(model, 0.7, 0.5)
    whole = batch.replace(segments=np.ones_like(batch.segments), weights=np.ones_like(batch.weights))
    params, objective = params_of(model, both), language_model(model, further=[both.further_loss()])
    one = whole.replace(segments=None)
    found = objective.weights(one), objective.sums(params, one, None, KEY)[0]
    wanted = objective.weights(whole), objective.sums(params, whole, None, KEY)[0]
    assert found[0]["second_nll"] == 33
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_scores_of_one_layer_exist_at_a_time(remat):
    """Fails when the loop over the layers keeps their scores: any array as large as all of them."""
    config = dataclasses.replace(STILL, num_layers=8, vocab_size=251)
    model = build(config, Execution(remat=remat, unroll=1))
    losses, batch = auxiliary(model, 1.0, 0.5), packed(4, length=16, vocab_size=251)
    params, objective = params_of(model, losses), language_model(model, further=[losses.further_loss()])

    def loss(params):
        sums, _ = objective.sums(params, batch, None, KEY)
        return sum(jnp.sum(sums[name]) for name in objective.coefficients)

    def sizes(jaxpr) -> list[int]:
        own = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(x)]
        return own + [size for x in inner for size in sizes(getattr(x, "jaxpr", x))]

    def is_jaxpr(x) -> bool:
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    one = 4 * 16 * 251
    found = sizes(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert one in found and max(found) < 2 * one
