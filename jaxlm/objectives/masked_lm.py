"""BERT's pretraining objectives: masked tokens with the next sentence, and the left-to-right ablation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.models.heads import take_places
from jaxlm.models.model import Inputs, Model
from jaxlm.objectives.masking import Masked, MaskingConfig, Specials, mask_tokens
from jaxlm.objectives.objective import Objective, Sums, apply, cross_entropy


class MaskedRows(NamedTuple):
    """A batch of text or of pairs, and its masks."""

    batch: Batch | PairBatch
    masked: Masked


def masked_language_model(
    model: Model,
    next_sentence: nn.Module | None,
    *,
    masking: MaskingConfig,
    specials: Specials,
    continues: np.ndarray | None,
    slots: Callable[[Batch | PairBatch], int],
    next_sentence_coefficient: float = 1.0,
    loss_chunks: int = 0,
) -> Objective:
    """Return BERT's objective (section 3.1): masked tokens and, unless `next_sentence` is None, the next sentence.

    Rows of text have no second segment: their loss is that of the masked tokens alone (Liu et al., 2019, "RoBERTa",
    section 4.2: windows are its FULL-SENTENCES, packed rows its DOC-SENTENCES).

    Each term is a mean over its own weight, the masked tokens and the pairs of the whole batch. Parameters:
    {"backbone", "head": {"masked_lm", "next_sentence"}}. Masks are derived from the batch's own seeds, so evaluations
    of the same rows have the same masks. slots: the maximum number of masked tokens per row of a batch.
    """
    vocab_size = model.config.vocab_size

    def prepare(batch: Batch | PairBatch) -> MaskedRows:
        if isinstance(batch, Batch):
            batch = with_cls(batch, specials.cls)
        return MaskedRows(batch, mask_tokens(batch, masking, specials, vocab_size, continues, slots(batch)))

    def weights(rows: MaskedRows) -> Sums:
        predicted = jnp.sum(rows.masked.weights_BM)
        found = {"masked_lm_loss": predicted, "masked_lm_accuracy": predicted}
        if next_sentence is not None and isinstance(rows.batch, PairBatch):
            pairs = jnp.sum(rows.batch.pair_weights)
            found |= {"next_sentence_loss": pairs, "next_sentence_accuracy": pairs}
        return found

    def sums(params: Any, rows: MaskedRows, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        batch, masked = rows
        types = batch.types if isinstance(batch, PairBatch) else None
        outputs = model(params, Inputs(masked.ids_BL, batch.positions, batch.segments, types), key=key)
        states_BMD = take_places(outputs.states, masked.where_BM)
        nll, correct = model.loss(params, states_BMD, outputs.output, masked.targets_BM, masked.weights_BM, loss_chunks)
        found: Sums = {"masked_lm_loss": nll, "masked_lm_accuracy": correct}
        if next_sentence is None or isinstance(batch, Batch):
            return found, carry
        pooled_BPD = model.pool(params, take_places(outputs.states, batch.firsts))
        scores_BP2 = apply(next_sentence, params["head"]["next_sentence"], pooled_BPD)
        right_BP = jnp.argmax(scores_BP2, axis=-1) == batch.next_labels
        found["next_sentence_loss"] = jnp.sum(batch.pair_weights * cross_entropy(scores_BP2, batch.next_labels))
        found["next_sentence_accuracy"] = jnp.sum(batch.pair_weights * right_BP)
        return found, carry

    coefficients = {"masked_lm_loss": 1.0}
    if next_sentence is not None:
        coefficients["next_sentence_loss"] = next_sentence_coefficient
    return Objective(dict(coefficients), weights, sums, prepare)


def with_cls(batch: Batch, cls: int) -> Batch:
    """Return rows of text with the first token of each segment replaced by CLS, as RoBERTa's begin with <s>."""
    first_BL = (batch.segments > 0) & (batch.positions == 0)
    return replace(batch, ids=jnp.where(first_BL, cls, batch.ids))


def left_to_right_language_model(model: Model, *, loss_chunks: int = 0) -> Objective:
    """Return the objective of the paper's ablation "LTR & No NSP" (section 5.1): next-token prediction by an encoder.

    Every token of a pair after the first is predicted from those before it, CLS and both SEP included. The paper names
    the objective and keeps the rest of BERT: the masked LM's head therefore transforms the states here too, and a
    checkpoint has the same parameters. GPT-1 has no such head.
    """

    def counted(batch: PairBatch) -> jax.Array:
        next_segments = jnp.pad(batch.segments[:, 1:], ((0, 0), (0, 1)))
        return ((batch.segments > 0) & (batch.segments == next_segments)).astype(jnp.float32)

    def weights(batch: PairBatch) -> Sums:
        total = jnp.sum(counted(batch))
        return {"nll": total, "accuracy": total}

    def sums(params: Any, batch: PairBatch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        outputs = model(params, Inputs(batch.ids, batch.positions, batch.segments, batch.types), key=key)
        targets_BL = jnp.pad(batch.ids[:, 1:], ((0, 0), (0, 1)))
        nll, correct = model.loss(params, outputs.states, outputs.output, targets_BL, counted(batch), loss_chunks)
        return {"nll": nll, "accuracy": correct}, carry

    return Objective({"nll": 1.0}, weights, sums)
