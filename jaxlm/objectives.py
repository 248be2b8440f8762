"""Losses and metrics as pairs of a sum and a weight.

A mean over a batch that is cut into micro-batches, devices or processes is exact only if the weight is known from the
whole batch beforehand: an objective gives its weights from the batch alone, and its sums from any part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.batch import Batch, ExampleBatch, PairBatch
from jaxlm.heads import EncoderHead, LSTMHead, MaskedLMHead, NextSentenceHead, PooledHead, take_places, take_states
from jaxlm.masking import MaskingConfig, Specials, mask_tokens
from jaxlm.models.bert import Bert
from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy

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
    """The sum over examples of the cross-entropy over classes or choices (nats), or of a score's squared error.

    span: over windows, of the mean of the first and last token's cross-entropy. tagging: over tokens that have a tag.
    """
    if kind == "regression":
        return jnp.sum(batch.weights * jnp.square(outputs[:, 0] - batch.labels))
    if kind == "span":
        both = cross_entropy(jnp.swapaxes(outputs, 1, 2), batch.labels)
        return jnp.sum(batch.weights * jnp.mean(both, axis=-1))
    if kind == "tagging":
        return jnp.sum(tag_weights(batch) * cross_entropy(outputs, jnp.maximum(batch.labels, 0)))
    return jnp.sum(batch.weights * cross_entropy(outputs, batch.labels))


def sequence_task(model, head, *, auxiliary_lm: float, loss_chunks: int = 0) -> Objective:
    """GPT-1's fine-tuning, L3 = L2 + lambda L1 (section 3.2): the task's loss and a language-model loss beside it.

    L2: cross-entropy over classes or choices, or the squared error of a score. L1: the mean over sequences (every
    choice, wrong ones too; both orders of a pair) of the mean negative log-likelihood of their tokens after the first,
    delimiter and extract included, as in the original (train.py:174-178, 204). With lambda 0 it is neither computed nor
    among the metrics.
    """

    def weights(batch: ExampleBatch) -> Sums:
        examples = jnp.sum(batch.weights)
        sequences = jnp.sum(batch.weights[:, None] * (batch.lengths > 1))
        found = {"task_loss": examples} | ({"language_model_loss": sequences} if auxiliary_lm else {})
        return found if head.kind == "regression" else found | {"accuracy": examples}

    def sums(params, batch: ExampleBatch, key) -> Sums:
        outputs, h, table_VD = sequence_outputs(model, head, params, batch, key)
        found: Sums = {"task_loss": task_loss(head.kind, outputs, batch)}
        if head.kind != "regression":
            found["accuracy"] = jnp.sum(batch.weights * (jnp.argmax(outputs, axis=-1) == batch.labels))
        if auxiliary_lm == 0.0:
            return found
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


# BERT


def masked_language_model(
    model: Bert,
    masked_lm: MaskedLMHead,
    next_sentence: NextSentenceHead | None,
    *,
    masking: MaskingConfig,
    specials: Specials,
    continues: np.ndarray | None,
    slots: int,
    next_sentence_coefficient: float = 1.0,
    loss_chunks: int = 0,
) -> Objective:
    """BERT's pretraining (section 3.1): masked words and, unless `next_sentence` is None, whether B follows A.

    Each term is a mean over its own weight, the masked tokens and the pairs of the whole batch. Parameters:
    {"backbone", "head": {"masked_lm", "next_sentence"}}. Masks come from the batch's own seeds, so evaluation sees the
    same ones whenever it is done. slots: the most masked tokens of a row.
    """
    vocab_size = model.config.vocab_size

    def masked(batch: PairBatch):
        return mask_tokens(batch, masking, specials, vocab_size, continues, slots)

    def weights(batch: PairBatch) -> Sums:
        predicted, pairs = jnp.sum(masked(batch).weights_BM), jnp.sum(batch.pair_weights)
        found = {"masked_lm_loss": predicted, "masked_lm_accuracy": predicted}
        return (
            found if next_sentence is None else found | {"next_sentence_loss": pairs, "next_sentence_accuracy": pairs}
        )

    def sums(params, batch: PairBatch, key) -> Sums:
        rows = masked(batch)
        inputs = (rows.ids_BL, batch.positions, batch.types, batch.segments)
        h_BLD, table_VD = _apply(model, params["backbone"], *inputs, train=key is not None, key=key)
        states_BMD = take_places(h_BLD, rows.where_BM)
        nll, hits = masked_lm_loss(
            masked_lm, params["head"]["masked_lm"], states_BMD, table_VD, rows.targets_BM, rows.weights_BM, loss_chunks
        )
        found: Sums = {"masked_lm_loss": nll, "masked_lm_accuracy": hits}
        if next_sentence is None:
            return found
        pooled_BPD = _apply(model, params["backbone"], take_places(h_BLD, batch.firsts), method=Bert.pool)
        scores_BP2 = _apply(next_sentence, params["head"]["next_sentence"], pooled_BPD)
        right_BP = jnp.argmax(scores_BP2, axis=-1) == batch.next_labels
        return found | {
            "next_sentence_loss": jnp.sum(batch.pair_weights * cross_entropy(scores_BP2, batch.next_labels)),
            "next_sentence_accuracy": jnp.sum(batch.pair_weights * right_BP),
        }

    coefficients = {"masked_lm_loss": 1.0}
    if next_sentence is not None:
        coefficients["next_sentence_loss"] = next_sentence_coefficient
    return Objective(coefficients, weights, sums)


def masked_lm_loss(head: MaskedLMHead, params, states_BMD, table_VD, targets_BM, weights_BM, loss_chunks: int = 0):
    """The sums of weighted negative log-likelihoods (nats) and hits of the tokens that stood at M places of each row.

    Where `loss_chunks` does not divide M, places of weight 0 are added.
    """
    h_BMD, bias_V = _apply(head, params, states_BMD)
    rows, places, _ = h_BMD.shape
    pieces = min(loss_pieces(loss_chunks, rows, places, table_VD), places)
    if extra := -places % pieces:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)))  # noqa: E731
        h_BMD, targets_BM, weights_BM = pad(h_BMD), pad(targets_BM), pad(weights_BM)
    return projected_cross_entropy(h_BMD, table_VD, targets_BM, weights_BM, pieces, bias_V)


def left_to_right_language_model(model: Bert, masked_lm: MaskedLMHead, *, loss_chunks: int = 0) -> Objective:
    """The paper's ablation "LTR & No NSP" (section 5.1): the same encoder under a causal mask predicts the next token.

    Every token of a pair after its first is predicted from those before it, CLS and both SEP being of the text. The
    paper names the objective and leaves the rest of BERT as it is: so the masked LM's head stands before the table here
    too, where GPT-1 has none, and a checkpoint has the same parameters.
    """

    def counted(batch: PairBatch):
        next_segments = jnp.pad(batch.segments[:, 1:], ((0, 0), (0, 1)))
        return ((batch.segments > 0) & (batch.segments == next_segments)).astype(jnp.float32)

    def weights(batch: PairBatch) -> Sums:
        total = jnp.sum(counted(batch))
        return {"nll": total, "accuracy": total}

    def sums(params, batch: PairBatch, key) -> Sums:
        inputs = (batch.ids, batch.positions, batch.types, batch.segments)
        h_BLD, table_VD = _apply(model, params["backbone"], *inputs, train=key is not None, key=key)
        targets_BL = jnp.pad(batch.ids[:, 1:], ((0, 0), (0, 1)))
        head = params["head"]["masked_lm"]
        nll, hits = masked_lm_loss(masked_lm, head, h_BLD, table_VD, targets_BL, counted(batch), loss_chunks)
        return {"nll": nll, "accuracy": hits}

    return Objective({"nll": 1.0}, weights, sums)


def encoder_outputs(model: Bert, head: EncoderHead | LSTMHead, params, batch: ExampleBatch, key=None) -> jax.Array:
    """What an encoder's head gives, float32: (E, outputs), (E, C), spans (E, L, 2) or tags (E, L, T).

    Types are 0 before `batch.second` and 1 from there; padding is not seen. Pooled is the first token's state, or the
    last one's under a causal mask, where the first has seen nothing. A span's scores at padding, and the scores of
    absent choices, are ABSENT.
    """
    examples, choices, length = batch.ids.shape
    index_L = jnp.arange(length)
    ids, lengths, second = batch.ids.reshape(-1, length), batch.lengths.reshape(-1, 1), batch.second.reshape(-1, 1)
    real = index_L < lengths
    types, segments = (real & (index_L >= second)).astype(jnp.int32), real.astype(jnp.int32)
    inputs = (ids, jnp.broadcast_to(index_L, ids.shape), types, segments)
    body_key, head_key = (None, None) if key is None else jax.random.split(key)
    backbone, head_params, train = params["backbone"], params["head"], key is not None
    if isinstance(head, LSTMHead):
        body_key = None if head.frozen else body_key
        hidden = _apply(model, backbone, *inputs, train=body_key is not None, key=body_key, method=Bert.hidden_states)
        outputs = _apply(head, head_params, hidden, batch.lengths, train=train, key=head_key)
    else:
        states, _ = _apply(model, backbone, *inputs, train=train, key=body_key)
        if isinstance(head, PooledHead):
            last = jnp.maximum(batch.lengths - 1, 0)
            where = last if model.config.attention == "causal" else jnp.asarray(batch.extract)
            states = take_states(states.reshape(examples, choices, length, -1), where)
            states = _apply(model, backbone, states, method=Bert.pool)
        outputs = _apply(head, head_params, states, train=train, key=head_key)
    if head.kind == "choice":
        return jnp.where(batch.lengths > 0, outputs, ABSENT)
    return jnp.where(real[..., None], outputs, ABSENT) if head.kind == "span" else outputs


def encoder_task(model: Bert, head: EncoderHead | LSTMHead) -> Objective:
    """BERT's fine-tuning (section 3.2): the task's loss over its own weight.

    classification, choice: cross-entropy over examples. regression: squared error. span: the mean of the
    cross-entropies of the first and the last token, over all tokens of the window (run_squad.py:646-660, which counts
    padding too). tagging: cross-entropy over the tokens that have a tag. Accuracy: of examples, whole spans, tags.
    """

    def weights(batch: ExampleBatch) -> Sums:
        total = jnp.sum(tag_weights(batch)) if head.kind == "tagging" else jnp.sum(batch.weights)
        return {"task_loss": total} if head.kind == "regression" else {"task_loss": total, "accuracy": total}

    def sums(params, batch: ExampleBatch, key) -> Sums:
        outputs = encoder_outputs(model, head, params, batch, key)
        found: Sums = {"task_loss": task_loss(head.kind, outputs, batch)}
        return found if head.kind == "regression" else found | {"accuracy": task_hits(head.kind, outputs, batch)}

    return Objective({"task_loss": 1.0}, weights, sums)


def tag_weights(batch: ExampleBatch) -> jax.Array:
    """1 for each token that has a tag, in rows that count: (E, L)."""
    return batch.weights[:, None] * (batch.labels >= 0)


def task_hits(kind: str, outputs: jax.Array, batch: ExampleBatch) -> jax.Array:
    """How many examples, whole spans or tags are right."""
    if kind == "tagging":
        return jnp.sum(tag_weights(batch) * (jnp.argmax(outputs, axis=-1) == batch.labels))
    if kind == "span":
        return jnp.sum(batch.weights * jnp.all(jnp.argmax(outputs, axis=1) == batch.labels, axis=-1))
    return jnp.sum(batch.weights * (jnp.argmax(outputs, axis=-1) == batch.labels))


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood (nats) of each label under softmax(scores) over the last axis."""
    right = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - right


def _apply(module: nn.Module, params: Any, *inputs: jax.Array, key: jax.Array | None = None, **settings: Any) -> Any:
    return module.apply({"params": params}, *inputs, rngs=None if key is None else {"dropout": key}, **settings)
