"""The sampled softmax against enumeration: which ids are sampled, what sums they estimate, and the mean gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.output import projected_cross_entropy
from jaxlm.nn.sampled_softmax import Sample, log_expected_count, sampled_cross_entropy, sampled_ids

VOCABULARY, SIZE, WIDTH, STATES, DRAWS = 40, 20, 4, 6, 3000
DEVIATIONS = 4.5  # of a mean of draws; of a few hundred numbers the largest is below it in 99.8 % of the tests


def test_sets_of_ids_have_the_probabilities_of_draws_that_are_repeated_until_they_differ():
    """Fails when ids are drawn from another distribution, or one is in a sample twice. The reference enumerates the
    orders in which different ids are drawn (TensorFlow's range_sampler.cc).
    """
    vocabulary, size, draws = 5, 3, 20_000
    p = np.diff(np.log(np.arange(1, vocabulary + 2))) / np.log(vocabulary + 1)
    assert p.sum() == pytest.approx(1)
    wanted = dict.fromkeys(itertools.combinations(range(vocabulary), size), 0.0)
    for a, b, c in itertools.permutations(range(vocabulary), size):
        wanted[tuple(sorted((a, b, c)))] += p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
    keys = jax.random.split(jax.random.key(0), draws)
    ids = np.sort(jax.vmap(lambda key: sampled_ids(key, vocabulary, size).ids)(keys))
    for chosen, probability in wanted.items():
        found = np.mean((ids == chosen).all(axis=1))
        assert abs(found - probability) < DEVIATIONS * np.sqrt(probability * (1 - probability) / draws), chosen


def test_a_sum_over_the_vocabulary_is_estimated_without_a_bias():
    """Fails when the expected count is that of the last id in the sample, or of K draws instead of those it took."""
    values = np.exp(np.random.default_rng(0).normal(size=VOCABULARY)).astype(np.float32)

    def estimate(key):
        sample = sampled_ids(key, VOCABULARY, SIZE)
        return jnp.sum(
            jnp.asarray(values)[sample.ids] / jnp.exp(log_expected_count(sample.ids, VOCABULARY, sample.time))
        )

    found = np.asarray(jax.vmap(estimate)(jax.random.split(jax.random.key(1), DRAWS)), np.float64)
    assert abs(found.mean() - values.sum()) < DEVIATIONS * found.std() / np.sqrt(DRAWS)


def made():
    """Return states, a table and a bias with which the first ids are likelier."""
    rng = np.random.default_rng(2)
    states = jnp.asarray(0.7 * rng.normal(size=(1, STATES, WIDTH)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
    return states, table, jnp.asarray(-np.log(np.arange(VOCABULARY) + 1.0), jnp.float32)


def mean_gradients(corrected: bool) -> list[np.ndarray]:
    """Return how many deviations the mean gradients of draws are away from the full ones.

    Each state has every id as its target, as often as the model predicts it.
    """
    arguments = made()
    targets = jnp.tile(jnp.arange(VOCABULARY), STATES)[None]
    weights = jax.nn.softmax(arguments[0][0] @ arguments[1].T + arguments[2]).reshape(1, -1)

    def full(h, table, bias):
        return projected_cross_entropy(jnp.repeat(h, VOCABULARY, axis=1), table, targets, weights, 1, bias)[0]

    def sampled(h, table, bias, key):
        sample = sampled_ids(key, VOCABULARY, SIZE)
        if not corrected:
            sample = Sample(sample.ids, jnp.float32(1e9))  # all counts are 1
        h = jnp.repeat(h, VOCABULARY, axis=1)
        return sampled_cross_entropy(h, table, bias, targets, weights, sample)[0]

    wanted = jax.grad(full, (0, 1, 2))(*arguments)
    keys = jax.random.split(jax.random.key(3), DRAWS)
    draws = jax.jit(lambda keys: jax.lax.map(lambda key: jax.grad(sampled, (0, 1, 2))(*arguments, key), keys))(keys)
    found = []
    for gradient, of_draws in zip(wanted, draws, strict=True):
        of_draws = np.asarray(of_draws, np.float64)
        error = of_draws.std(axis=0, ddof=1) / np.sqrt(DRAWS)
        found.append((of_draws.mean(axis=0) - gradient) / error)
    return found


def test_the_mean_gradient_is_that_of_all_ids():
    """Fails when the log expected count is not subtracted, from the target's score too, or a sampled target counts
    twice.

    For targets as the model predicts them the mean over draws is the full gradient. (For others it is not, with any
    number of ids below the vocabulary: the target is always among the candidates.)
    """
    for deviations in mean_gradients(corrected=True):
        assert np.abs(deviations).max() < DEVIATIONS
    assert min(np.abs(deviations).max() for deviations in mean_gradients(corrected=False)) > 4 * DEVIATIONS


def test_a_sample_of_all_ids_is_the_full_softmax():
    """Fails when the target is not removed from the sample, or its row of the table is another one."""
    arguments = made()
    targets, weights = jnp.asarray([[0, 3, 39, 3, 7, 1]]), jnp.asarray([[1.0, 2.0, 0.5, 0.0, 1.0, 1.0]])
    sample = Sample(jnp.arange(VOCABULARY), jnp.float32(1e9))
    found = jax.value_and_grad(lambda *a: sampled_cross_entropy(*a, targets, weights, sample)[0], (0, 1, 2))(*arguments)

    def full(h, table, bias):
        return projected_cross_entropy(h, table, targets, weights, 1, bias)[0]

    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.value_and_grad(full, (0, 1, 2))(*arguments)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    hits = sampled_cross_entropy(*arguments, targets, weights, sample)[1]
    assert hits == projected_cross_entropy(arguments[0], arguments[1], targets, weights, 1, arguments[2])[1]
