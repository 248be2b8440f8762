"""Fine-tuning objectives: the loss of a labelled task, and GPT-1's auxiliary language-model loss."""

import jax
import jax.numpy as jnp

from jaxlm.data.batch import ExampleBatch
from jaxlm.models.bert import Bert
from jaxlm.models.heads import EncoderHead, LSTMHead, PooledHead, take_states
from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy
from jaxlm.objectives.objective import Objective, Sums, apply, cross_entropy

ABSENT = -1e30  # the score of a choice that is not there: finite, and exp of it is 0


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
        hidden = apply(model, backbone, *inputs, train=body_key is not None, key=body_key, method=Bert.hidden_states)
        outputs = apply(head, head_params, hidden, batch.lengths, train=train, key=head_key)
    else:
        states, _ = apply(model, backbone, *inputs, train=train, key=body_key)
        if isinstance(head, PooledHead):
            last = jnp.maximum(batch.lengths - 1, 0)
            where = last if model.config.attention == "causal" else jnp.asarray(batch.extract)
            states = take_states(states.reshape(examples, choices, length, -1), where)
            states = apply(model, backbone, states, method=Bert.pool)
        outputs = apply(head, head_params, states, train=train, key=head_key)
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
