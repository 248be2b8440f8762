"""The CRF head: its sums and maxima against all sequences of tags, one by one, and the head of a BERT."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.crf import Chain, best_scores, log_likelihood, log_normalizer
from jaxlm.tasks.metrics.tags import entities, neighbours, spell

T = 4
# Words of each row; the others are tokens without a tag: in front, between words, behind, and a row without words.
REAL = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def scores():
    random = np.random.default_rng(0)
    emissions = random.normal(size=(*REAL.shape, T))
    return emissions, Chain(random.normal(size=(T, T)), random.normal(size=T), random.normal(size=T))


def score_of(tags, emissions_LT, chain):
    """Return the score of a sequence of tags by the definition (Lample et al., 2016, section 2.2)."""
    found = chain.start[tags[0]] + chain.end[tags[-1]]
    found = found + sum(emissions_LT[place, tag] for place, tag in enumerate(tags))
    return found + sum(chain.transitions[pair] for pair in itertools.pairwise(tags))


def all_scores(emissions_LT, chain):
    return {tags: score_of(tags, emissions_LT, chain) for tags in itertools.product(range(T), repeat=len(emissions_LT))}


def test_sums_are_those_of_all_sequences(scores):
    """Fails when a padded position, a token inside a word, the first or the last tag is counted or left out."""
    emissions, chain = scores
    tags = np.random.default_rng(1).integers(T, size=REAL.shape)
    normalizers = log_normalizer(jnp.array(emissions), REAL, Chain(*map(jnp.array, chain)))
    likelihoods = log_likelihood(jnp.array(emissions), jnp.where(REAL, tags, -1), REAL, Chain(*map(jnp.array, chain)))
    for row, real in enumerate(REAL[:-1]):
        found = all_scores(emissions[row][real], chain)
        expected = np.logaddexp.reduce(list(found.values()))
        np.testing.assert_allclose(normalizers[row], expected, atol=1e-5)
        np.testing.assert_allclose(likelihoods[row], found[tuple(tags[row][real])] - expected, atol=1e-5)
    assert normalizers[-1] == 0 and likelihoods[-1] == 0


def test_gradients_are_expected_counts(scores):
    """The gradient of a log-likelihood is the observed minus the expected count of each tag and each pair of tags.

    Fails when the sum over the given sequence is not exact, for example where a constant hides a gradient.
    """
    emissions, chain = scores
    tags = np.random.default_rng(1).integers(T, size=REAL.shape)

    def total(emissions, chain):
        return jnp.sum(log_likelihood(emissions, jnp.where(REAL, tags, -1), REAL, chain))

    of_emissions, of_chain = jax.grad(total, (0, 1))(jnp.array(emissions), Chain(*map(jnp.array, chain)))
    expected_emissions, expected_pairs = np.zeros_like(emissions), np.zeros((T, T))
    for row, real in enumerate(REAL[:-1]):
        found = all_scores(emissions[row][real], chain)
        log_sum = np.logaddexp.reduce(list(found.values()))
        observed = tuple(tags[row][real])
        for sequence, score in found.items():
            weight = (sequence == observed) - np.exp(score - log_sum)
            expected_emissions[row, np.flatnonzero(real), sequence] += weight
            for pair in itertools.pairwise(sequence):
                expected_pairs[pair] += weight
    np.testing.assert_allclose(of_emissions, expected_emissions, atol=1e-5)
    np.testing.assert_allclose(of_chain.transitions, expected_pairs, atol=1e-5)


def test_the_best_scores_are_those_of_the_best_sequences(scores):
    """Fails when the greatest score of a position is not on the best sequence, or belongs to another position."""
    emissions, chain = scores
    best = best_scores(jnp.array(emissions), REAL, Chain(*map(jnp.array, chain)))
    assert not np.any(best[~REAL])
    for row, real in enumerate(REAL[:-1]):
        found = all_scores(emissions[row][real], chain)
        winner = max(found, key=found.__getitem__)
        assert tuple(np.argmax(best[row][real], axis=-1)) == winner
        for place, tag in itertools.product(range(real.sum()), range(T)):
            expected = max(score for tags, score in found.items() if tags[place] == tag)
            np.testing.assert_allclose(best[row][real][place, tag], expected, atol=1e-5)


def test_neighbours_are_those_of_bio():
    """A sequence is allowed if and only if spelling its entities as BIO gives it back (conlleval's reading of tags).

    Fails when an I- tag may begin a sentence or follow O or another type.
    """
    labels = ("O", "B-A", "I-A", "B-B", "I-B")
    allowed, first = neighbours(labels)
    for tags in itertools.product(range(len(labels)), repeat=3):
        named = [labels[tag] for tag in tags]
        possible = first[tags[0]] and all(allowed[a][b] for a, b in itertools.pairwise(tags))
        assert possible == (spell(entities(named), 3) == named)
