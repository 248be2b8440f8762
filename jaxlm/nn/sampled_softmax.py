"""A softmax over a large vocabulary that training estimates from a sample of its ids.

Jean, Cho, Memisevic and Bengio, "On using very large target vocabulary for neural machine translation", 2015, in the
form of TensorFlow's sampled_softmax_loss (nn_impl.py) with its sampler of log-uniform ids (range_sampler.cc). Ids must
be sorted by frequency, the frequent ones first, or have a rank by which they are: rank i of V is sampled with

    p(i) = log((i + 2) / (i + 1)) / log(V + 1)

until there are K different ids. The softmax is taken over the target and the sampled ids but the target, with scores
from which the logarithm of the expected count of an id in a sample is subtracted, the target's too.

TensorFlow repeats draws until K ids are different, and expects id i with the probability 1 - (1 - p(i))^n in n draws.
Here the draws have times: id i arrives first after an exponential time of rate p(i), and the sample is the first K
arrivals. Its distribution is the same, and its computation has fixed shapes. The time at which id K + 1 arrives takes
the place of n, with the expected count 1 - exp(-p(i) time). With it a sum over the vocabulary is estimated without a
bias (Cohen and Kaplan, "Summarizing data using bottom-k sketches", 2007).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.distributed.mesh import constrain
from jaxlm.errors import InputError
from jaxlm.nn.output import BiasedOutput, Penalty


class Sample(NamedTuple):
    """Different ids of a vocabulary, int32 (K,), and the time until which they arrived, float32 ()."""

    ids: jax.Array
    time: jax.Array


def sampled_ids(key: jax.Array, vocab_size: int, size: int) -> Sample:
    """Return a sample of `size` ids, fewer than `vocab_size`."""
    times_V = jax.random.exponential(key, (vocab_size,)) / _rate(jnp.arange(vocab_size), vocab_size)
    negative_K, ids_K = jax.lax.top_k(-times_V, size + 1)
    return Sample(ids_K[:size], -negative_K[size])


def log_expected_count(ids: jax.Array, vocab_size: int, time: jax.Array) -> jax.Array:
    """Return the logarithm of the probability that an id arrives until a time."""
    return jnp.log(-jnp.expm1(-time * _rate(ids, vocab_size)))


def _rate(ids: jax.Array, vocab_size: int) -> jax.Array:
    return jnp.log1p(1.0 / (ids.astype(jnp.float32) + 1.0)) / jnp.log(vocab_size + 1.0)


def sampled_cross_entropy(
    h_BLD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    sample: Sample,
    rank: Callable[[jax.Array], jax.Array] = lambda ids: ids,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of weighted negative log-likelihoods (nats) and of weighted hits among the target and a sample.

    rank: ids -> their ranks by frequency, from 0.

    h_BLD is in the compute dtype, as are the products with the rows of table_VD; all else is float32. Hits, where the
    target has the highest corrected score, carry no gradient.
    """
    vocab_size, h_TD = table_VD.shape[0], h_BLD.reshape(-1, h_BLD.shape[-1])
    targets_T, weights_T = targets_BL.reshape(-1), weights_BL.reshape(-1)

    def rows(ids: jax.Array) -> jax.Array:
        # Cast after they are taken: the gradients of equal ids are added in float32.
        return constrain(jnp.take(table_VD, ids, axis=0).astype(h_TD.dtype), (None, "whole_width"))

    def offset(ids: jax.Array) -> jax.Array:
        return jnp.take(bias_V, ids) - log_expected_count(rank(ids), vocab_size, sample.time)

    right_T = jnp.sum(h_TD.astype(jnp.float32) * rows(targets_T).astype(jnp.float32), axis=-1) + offset(targets_T)
    others_TK = jnp.dot(h_TD, rows(sample.ids).T, preferred_element_type=jnp.float32) + offset(sample.ids)
    others_TK = jnp.where(sample.ids == targets_T[:, None], -jnp.inf, others_TK)
    nll_T = jax.nn.logsumexp(jnp.concatenate([right_T[:, None], others_TK], axis=-1), axis=-1) - right_T
    hits_T = jax.lax.stop_gradient(right_T >= jnp.max(others_TK, axis=-1))
    return jnp.sum(weights_T * nll_T), jnp.sum(weights_T * hits_T)


class SampledOutput(BiasedOutput):
    """Scores are h W^T + b, with W (V, D) and b (V,) of its own. The loss is over a `Sample`, or over all ids.

    `Outputs.output` is the sample of a pass in training, and None in evaluation. rank: see `sampled_cross_entropy`.
    """

    def __init__(self, *sizes: Any, rank: Callable[[jax.Array], jax.Array] = lambda ids: ids) -> None:
        super().__init__(*sizes)
        self.rank = rank

    def loss(
        self,
        params: Any,
        states: Any,
        output: Sample | None,
        targets: Any,
        weights: Any,
        chunks: int = 0,
        penalty: Penalty | None = None,
    ):
        """Return the sums of `sampled_cross_entropy`, or without a sample those of `projected_cross_entropy`."""
        if output is None:
            return super().loss(params, states, output, targets, weights, chunks, penalty)
        if penalty is not None:
            raise InputError(
                "label smoothing and a z-loss must be 0 for a sampled softmax, got "
                f"{penalty.label_smoothing:g} and {penalty.z_loss:g}; leave them out"
            )
        table_VD, bias_V = self.table(params, output), self.bias(params)
        return sampled_cross_entropy(states, table_VD, bias_V, targets, weights, output, self.rank)
