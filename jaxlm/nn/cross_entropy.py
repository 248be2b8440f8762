"""The vocabulary projection and its loss, computed in chunks so that a large batch's logits never exist at once."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.linear import gathered, summed


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def projected_cross_entropy(h_BLD, table_VD, targets_BL, weights_BL, chunks: int = 1, bias_V=None):
    """Return the sums of weighted negative log-likelihoods (nats) and of weighted hits, of softmax(h table^T + bias).

    h_BLD is in the compute dtype, as are the products with table_VD; table_VD, bias_V (None: 0), logits, softmax and
    sums are float32. The length is split into `chunks` equal chunks, and only one chunk's logits exist at a time. The
    gradient is exact: it is computed chunk by chunk together with the loss, so nothing is computed twice. Hits (the
    target has the highest logit) carry no gradient.
    """
    (nll, hits), _ = _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, bias_V, gradient=False)
    return nll, hits


def _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks: int, bias_V, gradient: bool):
    b, length, d = h_BLD.shape
    if length % chunks:
        raise ValueError(f"length must be divisible by {chunks} loss chunks, got {length}")

    words_VD = gathered(table_VD, h_BLD.dtype, _TABLE)  # once, not in every chunk

    def chunk(carry, inputs):
        nll, hits, dtable, dbias = carry
        h_BCD, targets_BC, weights_BC = inputs
        h_TD, targets_T, weights_T = h_BCD.reshape(-1, d), targets_BC.reshape(-1), weights_BC.reshape(-1)
        logits_TV = _logits(h_TD, words_VD, bias_V)
        peak_T = jnp.max(logits_TV, axis=-1)
        right_T = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
        if devices.platform() == "tpu":
            shift_T, total_T = _totals_by_target(logits_TV, peak_T, h_TD, words_VD, bias_V, targets_T)
        else:
            shift_T, total_T = peak_T, jnp.sum(jnp.exp(logits_TV - peak_T[:, None]), axis=-1)
        nll += jnp.sum(weights_T * (jnp.log(total_T) + shift_T - right_T))
        hits += jnp.sum(weights_T * (right_T >= peak_T))
        if not gradient:
            return (nll, hits, dtable, dbias), None
        one_hot_TV = jnp.arange(table_VD.shape[0])[None, :] == targets_T[:, None]
        exp_TV = jnp.exp(logits_TV - shift_T[:, None])
        dlogits_TV = exp_TV * (weights_T / total_T)[:, None] - jnp.where(one_hot_TV, weights_T[:, None], 0.0)
        if bias_V is not None:
            dbias = dbias + jnp.sum(dlogits_TV, axis=0)
        dlogits_TV = dlogits_TV.astype(h_TD.dtype)
        if devices.platform() == "cpu":  # a TPU recomputes them in both products, at little cost
            dlogits_TV = jax.lax.optimization_barrier(dlogits_TV)
        dh_BCD = jnp.dot(dlogits_TV, words_VD, preferred_element_type=jnp.float32).reshape(h_BCD.shape)
        dtable = dtable + summed(
            jnp.dot(dlogits_TV.T, h_TD, preferred_element_type=jnp.float32), jnp.dtype(jnp.float32), _TABLE
        )
        return (nll, hits, dtable, dbias), dh_BCD

    zero = jnp.zeros((), jnp.float32)
    dtable = jnp.zeros(table_VD.shape, jnp.float32) if gradient else None
    dbias = jnp.zeros(bias_V.shape, jnp.float32) if gradient and bias_V is not None else None
    start = (zero, zero, dtable, dbias)
    if chunks == 1:
        (nll, hits, dtable, dbias), dh = chunk(start, (h_BLD, targets_BL, weights_BL))
        return (nll, hits), (dh, dtable, dbias)

    def split(x):
        return jnp.moveaxis(x.reshape(b, chunks, length // chunks, *x.shape[2:]), 1, 0)

    (nll, hits, dtable, dbias), dh = jax.lax.scan(chunk, start, (split(h_BLD), split(targets_BL), split(weights_BL)))
    if gradient:
        dh = jnp.moveaxis(dh, 0, 1).reshape(b, length, d)
    return (nll, hits), (dh, dtable, dbias)


_TABLE = ("vocabulary", "width")


def _logits(h_TD, words_VD, bias_V):
    logits_TV = jnp.dot(h_TD, words_VD.T, preferred_element_type=jnp.float32)
    return logits_TV if bias_V is None else logits_TV + bias_V.astype(jnp.float32)


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


def _fwd(h_BLD, table_VD, targets_BL, weights_BL, chunks: int, bias_V):
    sums, gradients = _forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, bias_V, gradient=True)
    like = [None if x is None else jnp.zeros((0,), x.dtype) for x in (h_BLD, table_VD, bias_V)]
    return sums, (*gradients, like)


def _bwd(chunks: int, residuals, cotangents):
    dh, dtable, dbias, (like_h, like_table, like_bias) = residuals
    scale, _ = cotangents
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
    """Scores are h W^T, with a classifier W (V, D) of its own, `params["head"]["classifier"]["kernel"]`."""

    def __init__(self, vocab_size: int, width: int, init_std: float) -> None:
        self.shape, self.initializer = (vocab_size, width), nn.initializers.normal(init_std)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return the classifier, as {"classifier": …}."""
        return {"classifier": {"kernel": with_axes(self.initializer, _TABLE)(key, self.shape)}}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True if the classifier is there; fine-tuned models have a different head."""
        return "classifier" in params.get("head", {})

    def logits(self, params: Any, states: jax.Array, output: None) -> jax.Array:
        """Return float32 scores (…, V)."""
        kernel_VD = params["head"]["classifier"]["kernel"]
        return jnp.dot(states, kernel_VD.T.astype(states.dtype), preferred_element_type=jnp.float32)

    def loss(self, params: Any, states: Any, output: Any, targets: Any, weights: Any, chunks: int = 0):
        """Return the weighted sums of negative log-likelihoods (nats) and of correct predictions."""
        kernel_VD = params["head"]["classifier"]["kernel"]
        chunks = num_loss_chunks(chunks, targets.shape[0], targets.shape[1], kernel_VD)
        return projected_cross_entropy(states, kernel_VD, targets, weights, chunks)
