"""Linear-chain conditional random fields: sums and maxima over the sequences of tags of a sentence.

Lafferty, McCallum and Pereira (2001), as in Lample et al. (2016, section 2.2): the score of a sequence is the sum of an
emission for each position's tag, a transition for each pair of neighbouring tags, and a score of the first and of the
last tag. Positions that are not real have no tag: the neighbours of a tag are those of the real positions around it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

IMPOSSIBLE = -1e4
"""Score of a tag that is excluded: finite, with an exp of 0 beside any other."""


class Chain(NamedTuple):
    """The scores that do not depend on the sentence.

    transitions: (T, T), of a tag (row) before another (column). start, end: (T,), of the first and of the last tag.
    """

    transitions: jax.Array
    start: jax.Array
    end: jax.Array


def log_normalizer(emissions_BLT: jax.Array, real_BL: jax.Array, chain: Chain) -> jax.Array:
    """Return the logarithm of the sum of exp(score) over all sequences of tags, (B,); 0 without a real position."""
    _, through_BT = _prefixes(emissions_BLT, real_BL, chain, jax.nn.logsumexp)
    return jnp.where(jnp.any(real_BL, axis=1), jax.nn.logsumexp(through_BT + chain.end, axis=-1), 0.0)


def log_likelihood(emissions_BLT: jax.Array, tags_BL: jax.Array, real_BL: jax.Array, chain: Chain) -> jax.Array:
    """Return the log-probability of a sequence of tags, (B,); 0 without a real position. Gradients are exact.

    Its score is the logarithm of the sum over the only sequence that has its tags.
    """
    given_BLT = tags_BL[..., None] == jnp.arange(emissions_BLT.shape[-1])
    of_tags = log_normalizer(jnp.where(given_BLT, emissions_BLT, 100 * IMPOSSIBLE), real_BL, chain)
    return of_tags - log_normalizer(emissions_BLT, real_BL, chain)


def best_scores(emissions_BLT: jax.Array, real_BL: jax.Array, chain: Chain) -> jax.Array:
    """Return for each position and tag the score of the best sequence that has it there, (B, L, T).

    The best tag of each position is that of the best sequence (Viterbi, 1967), if only one is best. Positions that are
    not real have 0.
    """
    prefix_BLT, _ = _prefixes(emissions_BLT, real_BL, chain, jnp.max)

    def step(after_BT: jax.Array, position: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        emissions_BT, real_B = position
        before_BT = jnp.max(chain.transitions + (emissions_BT + after_BT)[:, None, :], axis=-1)
        return jnp.where(real_B[:, None], before_BT, after_BT), after_BT

    last_BT = jnp.broadcast_to(chain.end, prefix_BLT[:, 0].shape)
    _, suffix_LBT = jax.lax.scan(step, last_BT, _by_position(emissions_BLT, real_BL), reverse=True)
    return jnp.where(real_BL[..., None], prefix_BLT + jnp.swapaxes(suffix_LBT, 0, 1), 0.0)


def _prefixes(
    emissions_BLT: jax.Array, real_BL: jax.Array, chain: Chain, reduce: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the reduced scores of the sequences that end in each position and tag, (B, L, T), and in the last one."""

    def step(carry: tuple[jax.Array, jax.Array], position: tuple[jax.Array, jax.Array]):
        before_BT, last_BT = carry
        emissions_BT, real_B = position
        here_BT = before_BT + emissions_BT
        next_BT = reduce(here_BT[:, :, None] + chain.transitions, axis=1)
        real_B1 = real_B[:, None]
        return (jnp.where(real_B1, next_BT, before_BT), jnp.where(real_B1, here_BT, last_BT)), here_BT

    start_BT = jnp.broadcast_to(chain.start, emissions_BLT[:, 0].shape)
    (_, last_BT), here_LBT = jax.lax.scan(step, (start_BT, start_BT), _by_position(emissions_BLT, real_BL))
    return jnp.swapaxes(here_LBT, 0, 1), last_BT


def _by_position(emissions_BLT: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.swapaxes(emissions_BLT, 0, 1), jnp.swapaxes(real_BL, 0, 1)
