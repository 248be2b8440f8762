"""Output layers: the scores of the vocabulary and their loss, tied, untied, or with ids in clusters.

The loss is computed in chunks, so that the logits of a large batch never exist at once.

In an adaptive input and softmax the rare ids share few parameters and few scores: Grave, Joulin, Cissé, Grangier and
Jégou, "Efficient softmax approximation for GPUs", 2017; Baevski and Auli, "Adaptive input representations for neural
language modeling", 2019; in the form of Transformer-XL (kimiyoung/transformer-xl,
pytorch/utils/proj_adaptive_softmax.py). Ids must be sorted by frequency, the frequent ones first. The head scores the
ids of the first cluster and each tail cluster as a whole; a tail scores its own ids:

    p(id) = p_head(id)                              in the first cluster
    p(id) = p_head(cluster) p_tail(id | cluster)    in a tail

Where clusters have projections, the states that score a cluster's ids go through its projection. The scores of the
tails are rows of the head like those of its ids, behind the same projection (`Adaptive.clusters`).

All clusters are computed for all tokens, so that shapes are static. That saves parameters, and multiplications where
tails are narrower (`divisor`); it does not save those of tails that a token does not need.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import InputError
from jaxlm.nn.config import Adaptive, Execution
from jaxlm.nn.layers import embed, fold, gathered, linear, summed

_TABLE, _PROJECTION = ("vocabulary", "width"), ("width", "whole_width")  # axes


class Penalty(NamedTuple):
    """Additions to the loss of a target y under the logits x, with log Z = logsumexp(x).

    z_loss: coefficient of (log Z)^2, which keeps the logits near 0 (mesh_tensorflow/transformer/transformer.py:712; T5:
    1e-4). label_smoothing: fraction e of the target that is distributed over the V ids, as in PyTorch's
    CrossEntropyLoss: the loss is log Z - (1 - e) x_y - e mean(x).
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 6))
def projected_cross_entropy(
    h_BLD, table_VD, targets_BL, weights_BL, chunks: int = 1, bias_V=None, penalty: Penalty | None = None
) -> tuple[jax.Array, ...]:
    """Return the sums of weighted negative log-likelihoods (nats) and of weighted hits, of softmax(h table^T + bias).

    With a penalty they are the sums of the penalized loss, of the hits, and of the negative log-likelihoods, which
    carry no gradient then.
    h_BLD is in the compute dtype, as are the products with table_VD; table_VD, bias_V (None: 0), logits, softmax and
    sums are float32. The length is split into `chunks` equal chunks, and only one chunk's logits exist at a time. The
    gradient is exact: it is computed chunk by chunk together with the loss, so nothing is computed twice. Hits (the
    target has the highest logit) carry no gradient.
    """
    sums, _ = _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, bias_V, penalty, gradient=False)
    return sums


def _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks: int, bias_V, penalty: Penalty | None, gradient: bool):
    words_VD = gathered(table_VD, h_BLD.dtype, _TABLE)  # once, not in every chunk

    def chunk(carry, inputs):
        nll, hits, *plain, dtable, dbias = carry
        h_BCD, targets_BC, weights_BC = inputs
        h_TD, targets_T, weights_T = h_BCD.reshape(-1, h_BCD.shape[-1]), targets_BC.reshape(-1), weights_BC.reshape(-1)
        logits_TV = _logits(h_TD, words_VD, bias_V)
        right_T = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
        if devices.platform() == "gpu":
            peak_T, total_T = _peaks_and_totals(logits_TV)
            shift_T = peak_T
        else:
            peak_T = jnp.max(logits_TV, axis=-1)
            if devices.platform() == "tpu":
                shift_T, total_T = _totals_by_target(logits_TV, peak_T, h_TD, words_VD, bias_V, targets_T)
            else:
                shift_T, total_T = peak_T, jnp.sum(jnp.exp(logits_TV - peak_T[:, None]), axis=-1)
        if penalty is None:
            nll += jnp.sum(weights_T * (jnp.log(total_T) + shift_T - right_T))
        else:
            log_z_T = jnp.log(total_T) + shift_T
            nll += jnp.sum(weights_T * _penalized(log_z_T, right_T, logits_TV, penalty))
            plain = [plain[0] + jnp.sum(weights_T * (log_z_T - right_T))]
        hits += jnp.sum(weights_T * (right_T >= peak_T))
        if not gradient:
            return (nll, hits, *plain, dtable, dbias), None
        one_hot_TV = jnp.arange(table_VD.shape[0])[None, :] == targets_T[:, None]
        exp_TV = jnp.exp(logits_TV - shift_T[:, None])
        if penalty is None:
            dlogits_TV = exp_TV * (weights_T / total_T)[:, None] - jnp.where(one_hot_TV, weights_T[:, None], 0.0)
        else:
            scaled_T = weights_T * (1.0 + 2.0 * penalty.z_loss * log_z_T) / total_T
            even, right = penalty.label_smoothing / table_VD.shape[0], 1.0 - penalty.label_smoothing
            dlogits_TV = exp_TV * scaled_T[:, None] - weights_T[:, None] * (even + jnp.where(one_hot_TV, right, 0.0))
        if bias_V is not None:
            dbias = dbias + jnp.sum(dlogits_TV, axis=0)
        dlogits_TV = dlogits_TV.astype(h_TD.dtype)
        if devices.platform() == "cpu":  # a TPU recomputes them in both products, at little cost
            dlogits_TV = jax.lax.optimization_barrier(dlogits_TV)
        dh_BCD = jnp.dot(dlogits_TV, words_VD, preferred_element_type=jnp.float32).reshape(h_BCD.shape)
        dtable = dtable + summed(
            jnp.dot(dlogits_TV.T, h_TD, preferred_element_type=jnp.float32), jnp.dtype(jnp.float32), _TABLE
        )
        return (nll, hits, *plain, dtable, dbias), dh_BCD

    zero = jnp.zeros((), jnp.float32)
    dtable = jnp.zeros(table_VD.shape, jnp.float32) if gradient else None
    dbias = jnp.zeros(bias_V.shape, jnp.float32) if gradient and bias_V is not None else None
    start: Any = (*[zero] * (2 if penalty is None else 3), dtable, dbias)
    if chunks == 1:
        (*sums, dtable, dbias), dh = chunk(start, (h_BLD, targets_BL, weights_BL))
        return tuple(sums), (dh, dtable, dbias)
    inputs = tuple(_in_chunks(x, chunks) for x in (h_BLD, targets_BL, weights_BL))
    (*sums, dtable, dbias), dh = jax.lax.scan(chunk, start, inputs)
    if gradient:
        dh = jnp.moveaxis(dh, 0, 1).reshape(h_BLD.shape)
    return tuple(sums), (dh, dtable, dbias)


def _penalized(log_z_T: jax.Array, right_T: jax.Array, logits_TV: jax.Array, penalty: Penalty) -> jax.Array:
    """Return the loss of each target. See `Penalty`. right_T: the targets' logits."""
    loss_T = log_z_T - right_T
    if penalty.label_smoothing:
        loss_T = loss_T + penalty.label_smoothing * (right_T - jnp.mean(logits_TV, axis=-1))
    return loss_T + penalty.z_loss * jnp.square(log_z_T)


def _in_chunks(x: jax.Array, chunks: int) -> jax.Array:
    """Return x (B, L, …) in equal chunks of its length, (chunks, B, L / chunks, …)."""
    if x.shape[1] % chunks:
        raise ValueError(f"length must be divisible by {chunks} loss chunks, got {x.shape[1]}")
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:]), 1, 0)


def _logits(h_TD, words_VD, bias_V):
    logits_TV = jnp.dot(h_TD, words_VD.T, preferred_element_type=jnp.float32)
    return logits_TV if bias_V is None else logits_TV + bias_V.astype(jnp.float32)


def _peaks_and_totals(logits_TV):
    """Return (max of the logits, sum of exp(logits - max)) in one pass over the logits, for a GPU.

    The sums of two parts are combined at their common maximum (Milakov and Gimelshein, 2018, "Online normalizer
    calculation for softmax").
    """

    def combined(one, other):
        (peak, total), (other_peak, other_total) = one, other
        scale, higher = jnp.exp(-jnp.abs(peak - other_peak)), peak >= other_peak
        both = jnp.where(higher, total + scale * other_total, scale * total + other_total)
        return jnp.maximum(peak, other_peak), both

    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)
    return jax.lax.reduce((logits_TV, jnp.ones_like(logits_TV)), start, combined, (1,))


# exp of it, times 40,000 words, is still a float32.
LARGEST_EXPONENT = 70.0


def _totals_by_target(logits_TV, peak_T, h_TD, words_VD, bias_V, targets_T):
    """Return (shift, sum of exp(logits - shift)), with the target's logit, computed beforehand, as shift.

    If the highest logit is known beforehand, a TPU computes the sums together with the logits; a separate pass takes it
    longer than the product. It is unknown, but the target's logit serves as well: the sum is at least 1, and overflows
    only if the target is LARGEST_EXPONENT nats away from the likeliest word. In that rare case all is computed again.
    """
    near_T = jnp.sum(h_TD.astype(jnp.float32) * jnp.take(words_VD, targets_T, axis=0).astype(jnp.float32), axis=-1)
    if bias_V is not None:
        near_T = near_T + jnp.take(bias_V.astype(jnp.float32), targets_T)
    total_T = jnp.sum(jnp.exp(logits_TV - near_T[:, None]), axis=-1)

    def by_peak():  # recomputes the product: logits passed to a branch would be copied
        return peak_T, jnp.sum(jnp.exp(_logits(h_TD, words_VD, bias_V) - peak_T[:, None]), axis=-1)

    with jax.named_scope(devices.RARE_BRANCH):
        near = jnp.all(peak_T - near_T < LARGEST_EXPONENT)
        return jax.lax.cond(near, lambda: (near_T, total_T), by_peak)


def _fwd(h_BLD, table_VD, targets_BL, weights_BL, chunks: int, bias_V, penalty: Penalty | None):
    sums, gradients = _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, bias_V, penalty, gradient=True)
    like = [None if x is None else jnp.zeros((0,), x.dtype) for x in (h_BLD, table_VD, bias_V)]
    return sums, (*gradients, like)


def _bwd(chunks: int, penalty: Penalty | None, residuals, cotangents):
    dh, dtable, dbias, (like_h, like_table, like_bias) = residuals
    scale = cotangents[0]
    if dbias is not None:
        dbias = (dbias * scale).astype(like_bias.dtype)
    # Rounded once, after the scale: of values that are bfloat16 already, all products with 1 / 511 are rounded down.
    return (dh * scale).astype(like_h.dtype), (dtable * scale).astype(like_table.dtype), None, None, dbias


projected_cross_entropy.defvjp(_fwd, _bwd)


CACHED_LOGITS = 2 << 20  # logits per chunk on the CPU: 8 MB in float32
CACHED_TABLE = 4 << 20  # entries of a table whose gradient stays in the cache while the chunks are added to it


def num_loss_chunks(loss_chunks: int, rows: int, length: int, table_VD: jax.Array) -> int:
    """Return `loss_chunks`, or for 0 a divisor of the length: 1, and on the CPU chunks of about CACHED_LOGITS logits.

    On two cores that saves 8 % of the step of a model of 4 x 192; GPT-1's, whose table is ten times as large, would be
    slower by a third, as every chunk adds to the whole gradient of the table.
    """
    if loss_chunks:
        return loss_chunks
    if devices.platform() != "cpu" or table_VD.size > CACHED_TABLE:
        return 1
    target = rows * length * table_VD.shape[0] / CACHED_LOGITS
    return next((chunks for chunks in range(1, length) if length % chunks == 0 and chunks >= target), length)


class UntiedOutput:
    """Scores are h W^T, with a classifier W (V, D) of its own, `params["head"]["classifier"]["kernel"]`.

    A subclass may have another `table` of scores, and other states before it.
    """

    def __init__(self, vocab_size: int, width: int, init_std: float) -> None:
        self.shape, self.initializer = (vocab_size, width), nn.initializers.normal(init_std)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return the classifier, as {"classifier": …}."""
        return {"classifier": {"kernel": with_axes(self.initializer, _TABLE)(key, self.shape)}}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True if the classifier is there; fine-tuned models have a different head."""
        return "classifier" in params.get("head", {})

    def table(self, params: Any, output: Any) -> jax.Array:
        """Return W (V, D)."""
        kernel_VD: jax.Array = params["head"]["classifier"]["kernel"]
        return kernel_VD

    def bias(self, params: Any) -> jax.Array | None:
        """Return b (V,) of scores h W^T + b, or None."""
        return None

    def scored(self, states: jax.Array) -> jax.Array:
        """Return h, from the last states of the model."""
        return states

    def logits(self, params: Any, states: jax.Array, output: Any) -> jax.Array:
        table_VD = self.table(params, output)
        return jnp.dot(self.scored(states), table_VD.T.astype(states.dtype), preferred_element_type=jnp.float32)

    def loss(
        self,
        params: Any,
        states: Any,
        output: Any,
        targets: Any,
        weights: Any,
        chunks: int = 0,
        penalty: Penalty | None = None,
    ):
        table_VD, bias_V = self.table(params, output), self.bias(params)
        chunks = num_loss_chunks(chunks, targets.shape[0], targets.shape[1], table_VD)
        return projected_cross_entropy(self.scored(states), table_VD, targets, weights, chunks, bias_V, penalty)


class BiasedOutput(UntiedOutput):
    """Scores are h W^T + b, with b (V,) of its own, `params["head"]["classifier"]["bias"]`, which begins with zeros."""

    bias_initializer = staticmethod(nn.initializers.zeros_init())

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return kernel and bias of the classifier, as {"classifier": …}."""
        bias = with_axes(self.bias_initializer, ("vocabulary",))(fold(key, 1), self.shape[:1])
        return {"classifier": super().init(key)["classifier"] | {"bias": bias}}

    def bias(self, params: Any) -> jax.Array:
        """Return b."""
        bias_V: jax.Array = params["head"]["classifier"]["bias"]
        return bias_V

    def logits(self, params: Any, states: jax.Array, output: Any) -> jax.Array:
        """Return float32 scores (…, V)."""
        return super().logits(params, states, output) + self.bias(params)


PROJECTION_STD = 0.01  # of the projections (train.py, --proj_init_std)


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


def vocabulary_matrices(config: Any) -> int:
    """Return the multiplications of the output layer per token. config: has vocab_size, width and adaptive."""
    widths, sizes = config.adaptive.widths(config.vocab_size, config.width), config.adaptive.sizes(config.vocab_size)
    total = sum(size * of for size, of in zip(sizes, widths, strict=True)) + (len(sizes) - 1) * config.width
    return total + (sum(widths) * config.width if _projects(config.adaptive, sizes) else 0)


def _projects(adaptive: Adaptive, sizes: tuple[int, ...]) -> bool:
    return adaptive.divisor > 1 and len(sizes) > 1


def make_tables(module: nn.Module, config: Any, init: Any, *, bias: bool = False) -> Tables:
    """Return new parameters of `module`. init: the initializer of the tables and of the clusters' scores.

    config: has vocab_size, width and adaptive.
    Clusters of one width are sections of one table `tokens` (V, D). Otherwise there is a table per cluster, `tokens`,
    `tokens_1`, …, the projections `projection_0`, … and `output_projection_0`, …; those of the tails are shared if
    tied, and that of the head never is.
    """
    vocab_size, width, adaptive = config.vocab_size, config.width, config.adaptive
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


class Embeddings(nn.Module):
    """The token table (V, D), or tables of its clusters, and the bias (V,) of the scores if there is one."""

    config: Any
    execution: Execution
    table_init: Any
    bias: bool = False

    @nn.compact
    def __call__(self, ids_BL: jax.Array) -> tuple[jax.Array, Tables]:
        """Return embeddings (B, L, D) in the compute dtype, and the inputs of `AdaptiveOutput`."""
        tables = make_tables(self, self.config, self.table_init, bias=self.bias)
        return embed_tokens(tables, ids_BL, self.execution), tables


@dataclass(frozen=True)
class AdaptiveOutput:
    """The output layer of `Tables`, which the pass returns as `Outputs.output`; one cluster is a full, tied softmax."""

    adaptive: Adaptive

    def init(self, key: jax.Array) -> dict[str, Any]:
        return {}

    def available(self, params: Mapping[str, Any]) -> bool:
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

    def loss(
        self,
        params: Any,
        states: Any,
        output: Tables,
        targets: Any,
        weights: Any,
        chunks: int = 0,
        penalty: Penalty | None = None,
    ):
        """Return the sums of `projected_cross_entropy`. With several clusters there is no penalty.

        With several clusters, the scores of a chunk of the length are computed again in the backward pass.
        """
        b, length, d = states.shape
        count = num_loss_chunks(chunks, b, length, output.tokens[0])
        if output.clusters_KD is None:
            return projected_cross_entropy(states, output.tokens[0], targets, weights, count, output.bias_V, penalty)
        if penalty is not None:
            raise InputError(
                f"label smoothing and a z-loss must be 0 for a softmax of {len(output.tokens)} clusters of ids, got "
                f"{penalty.label_smoothing:g} and {penalty.z_loss:g}; leave them out"
            )

        def sums(part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            h_BCD, targets_BC, weights_BC = part
            return _nll(*self._scores(h_BCD.reshape(-1, d), output), targets_BC.reshape(-1), weights_BC.reshape(-1))

        parts = (states, targets, weights)
        if count == 1:
            return sums(parts)
        nll, hits = jax.lax.map(jax.checkpoint(sums), tuple(_in_chunks(x, count) for x in parts))
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
