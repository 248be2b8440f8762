"""Losses and metrics as pairs of a sum and a weight.

A mean over a batch that is cut into micro-batches, devices or processes is exact only if the weight is known from the
whole batch beforehand: an objective gives its weights from the batch alone, and its sums from any part of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.batch import Batch, ExampleBatch
from jaxlm.heads import take_states

Sums = dict[str, jax.Array]
ABSENT = -1e30  # the score of a choice that is not there: finite, and exp of it is 0


@dataclass(frozen=True)
class Objective:
    """What a step minimises: the sum over terms of coefficient x (sum / weight), and pairs that are only reported.

    weights(batch): the weight of each term and metric over the whole batch. sums(params, batch, key): the sums over any
    part of it; `key` is the dropout key, None for evaluation. A weight of 0 means the batch has nothing of that kind.
    """

    coefficients: dict[str, float]
    weights: Callable[[Any], Sums]
    sums: Callable[[Any, Any, jax.Array | None], Sums]


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight, 0 where the weight is 0."""
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def projected_cross_entropy(h_BLD, table_VD, targets_BL, weights_BL, chunks: int = 1):
    """Sum of weighted negative log-likelihoods (nats) and of weighted hits, of softmax(h table^T) against the targets.

    h_BLD and table_VD in the compute dtype; logits, softmax and sums are float32. The length is cut into `chunks` equal
    pieces, and only one piece's logits exist at a time. The gradient is exact: it is made piece by piece together with
    the loss, so nothing is computed twice. Hits (the target has the highest logit) carry no gradient.
    """
    (nll, hits), _ = _cross_entropy_forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, gradient=False)
    return nll, hits


def _cross_entropy_forward(h_BLD, table_VD, targets_BL, weights_BL, chunks: int, gradient: bool):
    b, length, d = h_BLD.shape
    if length % chunks:
        raise ValueError(f"length {length} is not divisible by {chunks} loss chunks")

    def piece(carry, inputs):
        nll, hits, dtable = carry
        h_BCD, targets_BC, weights_BC = inputs
        h_TD, targets_T, weights_T = h_BCD.reshape(-1, d), targets_BC.reshape(-1), weights_BC.reshape(-1)
        logits_TV = jnp.dot(h_TD, table_VD.T, preferred_element_type=jnp.float32)
        peak_T = jnp.max(logits_TV, axis=-1)
        exp_TV = jnp.exp(logits_TV - peak_T[:, None])
        total_T = jnp.sum(exp_TV, axis=-1)
        right_T = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
        nll += jnp.sum(weights_T * (jnp.log(total_T) + peak_T - right_T))
        hits += jnp.sum(weights_T * (right_T >= peak_T))
        if not gradient:
            return (nll, hits, dtable), None
        one_hot_TV = jnp.arange(table_VD.shape[0])[None, :] == targets_T[:, None]
        dlogits_TV = exp_TV * (weights_T / total_T)[:, None] - jnp.where(one_hot_TV, weights_T[:, None], 0.0)
        dlogits_TV = jax.lax.optimization_barrier(dlogits_TV.astype(h_TD.dtype))
        dh_BCD = jnp.dot(dlogits_TV, table_VD).reshape(h_BCD.shape)
        dtable = dtable + jnp.dot(dlogits_TV.T, h_TD, preferred_element_type=jnp.float32)
        return (nll, hits, dtable), dh_BCD

    zero = jnp.zeros((), jnp.float32)
    dtable = jnp.zeros(table_VD.shape, jnp.float32) if gradient else None
    if chunks == 1:
        (nll, hits, dtable), dh = piece((zero, zero, dtable), (h_BLD, targets_BL, weights_BL))
        return (nll, hits), (dh, dtable)
    cut = lambda x: jnp.moveaxis(x.reshape(b, chunks, length // chunks, *x.shape[2:]), 1, 0)  # noqa: E731
    pieces = (cut(h_BLD), cut(targets_BL), cut(weights_BL))
    (nll, hits, dtable), dh = jax.lax.scan(piece, (zero, zero, dtable), pieces)
    if gradient:
        dh = jnp.moveaxis(dh, 0, 1).reshape(b, length, d)
    return (nll, hits), (dh, dtable)


def _cross_entropy_fwd(h_BLD, table_VD, targets_BL, weights_BL, chunks: int):
    sums, (dh, dtable) = _cross_entropy_forward(h_BLD, table_VD, targets_BL, weights_BL, chunks, gradient=True)
    return sums, (dh, dtable, jnp.zeros((0,), table_VD.dtype))


def _cross_entropy_bwd(chunks: int, residuals, cotangents):
    dh, dtable, like = residuals
    scale, _ = cotangents
    return dh * scale.astype(dh.dtype), (dtable * scale).astype(like.dtype), None, None


projected_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


CACHED_LOGITS = 2 << 20  # of a piece, on the CPU: 8 MB in float32
CACHED_TABLE = 4 << 20  # entries of a table whose gradient stays near while the pieces are added to it


def loss_pieces(loss_chunks: int, rows: int, length: int, table_VD: jax.Array) -> int:
    """`loss_chunks`, or for 0 a divisor of the length: 1, and on the CPU pieces of about CACHED_LOGITS logits.

    On two cores that takes 8 % off the step of a model of 4 x 192; GPT-1's, whose table is ten times as large, would
    be slower by a third, as every piece adds to the whole gradient of the table.
    """
    if loss_chunks:
        return loss_chunks
    if jax.default_backend() != "cpu" or table_VD.size > CACHED_TABLE:
        return 1
    wanted = rows * length * table_VD.shape[0] / CACHED_LOGITS
    return next((pieces for pieces in range(1, length) if length % pieces == 0 and pieces >= wanted), length)


def language_model(model, *, loss_chunks: int = 0) -> Objective:
    """Next-token prediction: the loss in nats a token, and the share of targets that had the highest logit."""

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        return {"nll": total, "accuracy": total}

    def sums(params, batch: Batch, key) -> Sums:
        rngs = None if key is None else {"dropout": key}
        h_BLD, table_VD = model.apply(
            {"params": params["backbone"]},
            batch.ids,
            batch.positions,
            batch.segments,
            train=key is not None,
            rngs=rngs,
        )
        rows, length = batch.ids.shape
        pieces = loss_pieces(loss_chunks, rows, length, table_VD)
        nll, hits = projected_cross_entropy(h_BLD, table_VD, batch.targets, batch.weights, pieces)
        return {"nll": nll, "accuracy": hits}

    return Objective({"nll": 1.0}, weights, sums)


def sequence_outputs(model, head, params, batch: ExampleBatch, key: jax.Array | None = None):
    """The head's outputs (E, outputs or C) in float32, the states h (E C, L, D) and the table (V, D).

    Padding stands at the end of a sequence, where a causal model's earlier states do not see it.
    """
    examples, choices, length = batch.ids.shape
    ids = batch.ids.reshape(-1, length)
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
    body_key, head_key = (None, None) if key is None else jax.random.split(key)
    rngs = lambda key: None if key is None else {"dropout": key}  # noqa: E731
    h, table_VD = model.apply(
        {"params": params["backbone"]}, ids, positions, train=key is not None, rngs=rngs(body_key)
    )
    states_ECD = take_states(h.reshape(examples, choices, length, -1), batch.extract)
    outputs = head.apply({"params": params["head"]}, states_ECD, train=key is not None, rngs=rngs(head_key))
    if head.kind == "choice":  # an example with fewer choices than its neighbours: the absent ones cannot be chosen
        outputs = jnp.where(batch.lengths > 0, outputs, ABSENT)
    return outputs, h, table_VD


def task_loss(kind: str, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
    """The sum over examples of the cross-entropy over classes or choices (nats), or of a score's squared error."""
    if kind == "regression":
        return jnp.sum(batch.weights * jnp.square(outputs[:, 0] - batch.labels))
    right = jnp.take_along_axis(outputs, batch.labels[:, None], axis=-1)[:, 0]
    return jnp.sum(batch.weights * (jax.nn.logsumexp(outputs, axis=-1) - right))


def sequence_task(model, head, *, auxiliary_lm: float, loss_chunks: int = 0) -> Objective:
    """GPT-1's fine-tuning, L3 = L2 + lambda L1 (section 3.2): the task's loss and a language-model loss beside it.

    L2: cross-entropy over classes or choices, or the squared error of a score. L1: the mean over sequences (every
    choice, wrong ones too; both orders of a pair) of the mean negative log-likelihood of their tokens after the first,
    delimiter and extract included, as in the original (train.py:174-178, 204).
    """

    def weights(batch: ExampleBatch) -> Sums:
        examples = jnp.sum(batch.weights)
        sequences = jnp.sum(batch.weights[:, None] * (batch.lengths > 1))
        found = {"task_loss": examples, "language_model_loss": sequences}
        return found if head.kind == "regression" else found | {"accuracy": examples}

    def sums(params, batch: ExampleBatch, key) -> Sums:
        outputs, h, table_VD = sequence_outputs(model, head, params, batch, key)
        found: Sums = {"task_loss": task_loss(head.kind, outputs, batch)}
        if head.kind != "regression":
            found["accuracy"] = jnp.sum(batch.weights * (jnp.argmax(outputs, axis=-1) == batch.labels))
        if auxiliary_lm == 0.0:
            return found | {"language_model_loss": jnp.zeros(())}
        length = batch.ids.shape[-1]
        targets = jnp.pad(batch.ids[..., 1:], ((0, 0), (0, 0), (0, 1))).reshape(-1, length)
        counted = batch.lengths[..., None] - 1  # tokens after the first
        share = jnp.where(jnp.arange(length) < counted, 1.0 / jnp.maximum(counted, 1), 0.0)
        weights_of_tokens = (share * batch.weights[:, None, None]).reshape(-1, length)
        pieces = loss_pieces(loss_chunks, targets.shape[0], length, table_VD)
        nll, _ = projected_cross_entropy(h, table_VD, targets, weights_of_tokens, pieces)
        return found | {"language_model_loss": nll}

    coefficients = {"task_loss": 1.0} | ({"language_model_loss": auxiliary_lm} if auxiliary_lm else {})
    return Objective(coefficients, weights, sums)
