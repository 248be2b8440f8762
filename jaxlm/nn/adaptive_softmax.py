"""Adaptive input and softmax: ids in clusters, of which the rare ones share few parameters and few scores.

Grave, Joulin, Cissé, Grangier and Jégou, "Efficient softmax approximation for GPUs", 2017; Baevski and Auli, "Adaptive
input representations for neural language modeling", 2019; in the form of Transformer-XL (kimiyoung/transformer-xl,
pytorch/utils/proj_adaptive_softmax.py). Ids must be sorted by frequency, the frequent ones first. The head scores the
ids of the first cluster and each tail cluster as a whole; a tail scores its own ids:

    p(id) = p_head(id)                              in the first cluster
    p(id) = p_head(cluster) p_tail(id | cluster)    in a tail

Where clusters have projections, the states that score a cluster's ids go through its projection. The scores of the
tails are rows of the head like those of its ids, behind the same projection (`Adaptive.clusters`).

All clusters are computed for all tokens, so that shapes are static. That saves parameters, and multiplications where
tails are narrower (`divisor`); it does not save those of tails that a token does not need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.config import Adaptive, Execution
from jaxlm.nn.cross_entropy import num_loss_chunks, projected_cross_entropy
from jaxlm.nn.linear import embed, gathered, linear

PROJECTION_STD = 0.01  # of the projections (train.py, --proj_init_std)
_TABLE, _PROJECTION = ("vocabulary", "width"), ("width", "whole_width")


class Tables(NamedTuple):
    """The parameters of input and output, per cluster i, the first one the head. Tuples are empty without projections.

    tokens: (V_i, D_i). inputs, outputs: (D_i, D), to and from the width of the model. bias_V: of all ids, None for
    none. clusters_KD, clusters_bias_K: scores of the K tails in the head; None for one cluster.
    """

    tokens: tuple[jax.Array, ...]
    inputs: tuple[jax.Array, ...]
    outputs: tuple[jax.Array, ...]
    bias_V: jax.Array | None
    clusters_KD: jax.Array | None = None
    clusters_bias_K: jax.Array | None = None


def matrices(vocab_size: int, width: int, adaptive: Adaptive) -> int:
    """Return the multiplications of the output layer per token."""
    widths, sizes = adaptive.widths(vocab_size, width), adaptive.sizes(vocab_size)
    total = sum(size * of for size, of in zip(sizes, widths, strict=True)) + (len(sizes) - 1) * width
    return total + (sum(widths) * width if _projects(adaptive, sizes) else 0)


def _projects(adaptive: Adaptive, sizes: tuple[int, ...]) -> bool:
    return adaptive.divisor > 1 and len(sizes) > 1


def make_tables(module: nn.Module, vocab_size: int, width: int, adaptive: Adaptive, init: Any, *, bias: bool) -> Tables:
    """Return new parameters of `module`. init: the initializer of the tables and of the clusters' scores.

    Clusters of one width are sections of one table `tokens` (V, D). Otherwise there is a table per cluster, `tokens`,
    `tokens_1`, …, the projections `projection_0`, … and `output_projection_0`, …; those of the tails are shared if
    tied, and that of the head never is.
    """
    zeros = nn.initializers.zeros_init()
    sizes, widths = adaptive.sizes(vocab_size), adaptive.widths(vocab_size, width)
    inputs: tuple[jax.Array, ...] = ()
    outputs: tuple[jax.Array, ...] = ()
    if not _projects(adaptive, sizes):
        table_VD = module.param("tokens", with_axes(init, _TABLE), (vocab_size, width))
        starts = adaptive.starts(vocab_size)
        tokens = tuple(table_VD[start : start + size] for start, size in zip(starts, sizes, strict=True))
        tokens = (table_VD,) if len(sizes) == 1 else tokens
    else:
        tokens = tuple(
            module.param(f"tokens_{number}" if number else "tokens", with_axes(init, _TABLE), shape)
            for number, shape in enumerate(zip(sizes, widths, strict=True))
        )

        def projection(name: str, number: int) -> jax.Array:
            narrow = with_axes(nn.initializers.normal(PROJECTION_STD), _PROJECTION)
            return module.param(f"{name}_{number}", narrow, (widths[number], width))

        inputs = tuple(projection("projection", number) for number in range(len(sizes)))
        tied = adaptive.projections == "tails_tied"
        outputs = tuple(
            inputs[number] if tied and number else projection("output_projection", number)
            for number in range(len(sizes))
        )
    bias_V = module.param("output_bias", with_axes(zeros, ("vocabulary",)), (vocab_size,)) if bias else None
    if len(sizes) == 1:
        return Tables(tokens, inputs, outputs, bias_V)
    clusters_KD = module.param("clusters", with_axes(init, ("clusters", "width")), (len(sizes) - 1, width))
    clusters_bias_K = module.param("clusters_bias", with_axes(zeros, ("clusters",)), (len(sizes) - 1,))
    return Tables(tokens, inputs, outputs, bias_V, clusters_KD, clusters_bias_K)


def embed_tokens(tables: Tables, ids: jax.Array, execution: Execution) -> jax.Array:
    """Return the embeddings of ids, (…, D) in the compute dtype."""
    if not tables.inputs:
        table_VD = tables.tokens[0] if len(tables.tokens) == 1 else jnp.concatenate(tables.tokens)
        return embed(table_VD, ids, _TABLE, execution)
    total, start = jnp.zeros((), execution.compute_dtype()), 0
    for table, projection in zip(tables.tokens, tables.inputs, strict=True):
        size, own = table.shape[0], ids - start
        rows = embed(table, jnp.clip(own, 0, size - 1), _TABLE, execution)
        rows = linear(rows, gathered(projection, rows.dtype, _PROJECTION), None)
        total = total + jnp.where(((own >= 0) & (own < size))[..., None], rows, 0)
        start += size
    return total


@dataclass(frozen=True)
class AdaptiveOutput:
    """The output layer of `Tables`, which the pass returns as `Outputs.output`; one cluster is a full, tied softmax."""

    adaptive: Adaptive

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return no parameters."""
        return {}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True: the tables are the model's."""
        return True

    def logits(self, params: Any, states: jax.Array, output: Tables) -> jax.Array:
        """Return float32 scores (…, V): of several clusters, log-probabilities."""
        if output.clusters_KD is None:
            scores = jnp.dot(states, output.tokens[0].T.astype(states.dtype), preferred_element_type=jnp.float32)
            return scores if output.bias_V is None else scores + output.bias_V
        head, tails = self._scores(states, output)
        size = output.tokens[0].shape[0]
        head = jax.nn.log_softmax(head)
        parts = [head[..., size + i, None] + jax.nn.log_softmax(tail) for i, tail in enumerate(tails)]
        return jnp.concatenate([head[..., :size], *parts], axis=-1)

    def loss(self, params: Any, states: Any, output: Tables, targets: Any, weights: Any, chunks: int = 0):
        """Return the weighted sums of negative log-likelihoods (nats) and of correct predictions.

        With several clusters, the scores of a chunk of the length are computed again in the backward pass.
        """
        b, length, d = states.shape
        count = num_loss_chunks(chunks, b, length, output.tokens[0])
        if output.clusters_KD is None:
            return projected_cross_entropy(states, output.tokens[0], targets, weights, count, output.bias_V)
        if length % count:
            raise ValueError(f"length must be divisible by {count} loss chunks, got {length}")

        def chunked(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(b, count, length // count, *x.shape[2:]), 1, 0)

        def sums(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            h_BCD, targets_BC, weights_BC = part
            return _nll(*self._scores(h_BCD.reshape(-1, d), output), targets_BC.reshape(-1), weights_BC.reshape(-1))

        parts = (chunked(states), chunked(targets), chunked(weights))
        if count == 1:
            return sums((states, targets, weights))
        nll, hits = jax.lax.map(jax.checkpoint(sums), parts)
        return jnp.sum(nll), jnp.sum(hits)

    def _scores(self, states: jax.Array, tables: Tables) -> tuple[jax.Array, list[jax.Array]]:
        """Return float32 scores of the head, (…, V_0 + K), and of each tail, (…, V_i), all before their softmax."""
        assert tables.clusters_KD is not None and tables.clusters_bias_K is not None
        projected = [
            linear(states, gathered(matrix, states.dtype, _PROJECTION).T, None) for matrix in tables.outputs
        ] or [states] * len(tables.tokens)
        found, start = [], 0
        for h, table in zip(projected, tables.tokens, strict=True):
            scores = jnp.dot(h, gathered(table, h.dtype, _TABLE).T, preferred_element_type=jnp.float32)
            if tables.bias_V is not None:
                scores = scores + tables.bias_V[start : start + table.shape[0]]
            found.append(scores)
            start += table.shape[0]
        h = projected[0] if self.adaptive.clusters == "projected" else states
        clusters = gathered(tables.clusters_KD, h.dtype, ("clusters", "width"))
        of_clusters = jnp.dot(h, clusters.T, preferred_element_type=jnp.float32) + tables.clusters_bias_K
        return jnp.concatenate([found[0], of_clusters], axis=-1), found[1:]


def _nll(
    head_TH: jax.Array, tails: list[jax.Array], targets_T: jax.Array, weights_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of negative log-likelihoods and of hits."""
    start = size_0 = head_TH.shape[-1] - len(tails)
    norm_T = jax.nn.logsumexp(head_TH, axis=-1)
    right_T = jnp.take_along_axis(head_TH, jnp.minimum(targets_T, start - 1)[:, None], axis=-1)[:, 0] - norm_T
    best_T = jnp.max(head_TH[:, :start], axis=-1) - norm_T
    for number, tail_TV in enumerate(tails):
        size = tail_TV.shape[-1]
        own_T = targets_T - start
        base_T = head_TH[:, size_0 + number] - norm_T - jax.nn.logsumexp(tail_TV, axis=-1)
        score_T = base_T + jnp.take_along_axis(tail_TV, jnp.clip(own_T, 0, size - 1)[:, None], axis=-1)[:, 0]
        right_T = jnp.where((own_T >= 0) & (own_T < size), score_T, right_T)
        best_T = jnp.maximum(best_T, base_T + jnp.max(tail_TV, axis=-1))
        start += size
    hits_T = jax.lax.stop_gradient(right_T >= best_T)
    return -jnp.sum(weights_T * right_T), jnp.sum(weights_T * hits_T)
