"""BERT's pretraining objectives: masked tokens with the next sentence, and the left-to-right ablation.

The masks are computed on the device from seeds that the loader gives.
Devlin et al. (2019, section 3.1 and appendix A.1); google-research/bert, create_pretraining_data.py:342-415. There the
masks are computed once, on the host; here in each step. All random numbers are counter-based: token t of pair p of a
row takes them from threefry keyed by (the row's first word, its second word + p), with counter t. A pair's masks
therefore do not depend on the other rows, on the row's other pairs, on its position in the row, on the mesh or on
micro-batches. Pair p alone in a row, seeded by (first, second + p), has the same masks as among others.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.models.heads.head import take_places
from jaxlm.models.model import Inputs, Model
from jaxlm.objectives.config import MaskingConfig
from jaxlm.objectives.objective import Objective, Sums, cross_entropy


class Specials(NamedTuple):
    """Ids of the special tokens: CLS and SEP, which are never chosen, and the mask."""

    cls: int
    sep: int
    mask: int


class Masked(NamedTuple):
    """Masked rows and their targets.

    ids_BL: int32, the input of the encoder. where_BM: int32, M different positions of each row; those to be predicted
    come first. targets_BM: int32, the original ids there. weights_BM: float32, 1 for a position to be predicted, 0 for
    padding.
    """

    ids_BL: jax.Array
    where_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


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
        scores_BP2: Any = next_sentence.apply({"params": params["head"]["next_sentence"]}, pooled_BPD)
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


def predictions_of(num_tokens: int, rate: float) -> int:
    """Return the number of predicted tokens of a pair: max(1, round(rate n)), Python's round (:369-370)."""
    return max(1, round(num_tokens * rate))


def mask_tokens(
    batch: Batch | PairBatch,
    masking: MaskingConfig,
    specials: Specials,
    vocab_size: int,
    continues: np.ndarray | None,
    slots: int,
) -> Masked:
    """Mask tokens of `batch` and return the targets.

    continues: bool (V,), true for a token that continues a word; used for whole words only. slots: M, the maximum
    number of positions per row. If a row's pairs need more, the last choices of each pair are dropped.
    """
    length = batch.ids.shape[1]
    slots = min(slots, length)
    segments_BL = jnp.asarray(batch.segments)
    ids_BL = jnp.asarray(batch.ids)
    bits_BL4 = _bits(batch.mask_seeds, segments_BL, batch.positions)
    candidates_BL = (segments_BL > 0) & (ids_BL != specials.cls) & (ids_BL != specials.sep)
    table = np.array([min(slots, predictions_of(n, masking.rate)) for n in range(length + 1)], np.int32)
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    wanted_BL = jnp.asarray(table)[jnp.sum(same_BLL, axis=-1)]  # number of predictions of the token's pair
    if masking.whole_word:
        if continues is None:
            raise ValueError("continues must be given for whole words, got None")
        continues_BL = jnp.asarray(continues)[ids_BL]
        rank_BL = _choose_words(bits_BL4[..., 0], segments_BL, candidates_BL, continues_BL, wanted_BL)
    else:
        rank_BL = _choose_tokens(bits_BL4[..., 0], segments_BL, candidates_BL, wanted_BL)

    where_BM = jnp.argsort(rank_BL, axis=-1, stable=True)[:, :slots]

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, where_BM, axis=1)

    chosen_BM, targets_BM = take(rank_BL) < NOT_CHOSEN, take(ids_BL)
    kind_BM = take(bits_BL4[..., 1])
    word_BM = (take(bits_BL4[..., 2]) % jnp.uint32(vocab_size)).astype(jnp.int32)  # bias of at most V / 2**32
    hidden_BM = jnp.where(
        _below(kind_BM, masking.share_mask),
        specials.mask,
        jnp.where(_below(kind_BM, masking.share_mask + masking.share_random), word_BM, targets_BM),
    )
    put = jax.vmap(lambda row, where, new: row.at[where].set(new, unique_indices=True))
    seen_BL = put(ids_BL, where_BM, jnp.where(chosen_BM, hidden_BM, targets_BM))
    return Masked(seen_BL, where_BM, targets_BM, chosen_BM.astype(jnp.float32))


NOT_CHOSEN = np.int32(2**30)


def _bits(seeds_B2: Any, segments_BL: jax.Array, positions_BL: Any) -> jax.Array:
    """Return four random words per token, uint32 (B, L, 4): for its choice, its replacement, the random id, unused."""
    seeds_B2 = jnp.asarray(seeds_B2, jnp.uint32)
    pair_BL = (segments_BL - 1).astype(jnp.uint32)
    second_BL = seeds_B2[:, 1, None] + pair_BL
    first_BL = jnp.broadcast_to(seeds_B2[:, 0, None], second_BL.shape)
    keys = jax.random.wrap_key_data(jnp.stack([first_BL, second_BL], axis=-1), impl="threefry2x32")
    count_BL = 2 * jnp.asarray(positions_BL).astype(jnp.uint32)
    fold = jax.vmap(jax.vmap(jax.random.fold_in))
    words = [jax.random.key_data(fold(keys, count_BL + k)) for k in (0, 1)]
    return jnp.concatenate(words, axis=-1)


def _below(bits: jax.Array, fraction: float) -> jax.Array:
    """Return True with probability `fraction`, to within 2**-32."""
    if fraction >= 1.0 - 1e-9:
        return jnp.ones(bits.shape, bool)
    return bits < jnp.uint32(round(fraction * 2**32))


def _choose_tokens(score_BL, segments_BL, candidates_BL, wanted_BL) -> jax.Array:
    """Choose the tokens of the lowest scores; return each one's rank within its pair, else NOT_CHOSEN."""
    group_BL = jnp.where(candidates_BL, segments_BL, NOT_CHOSEN)
    order_BL, rank_BL = _order(group_BL, score_BL)
    rank_BL = _undo(order_BL, rank_BL)
    return jnp.where(candidates_BL & (rank_BL < wanted_BL), rank_BL, NOT_CHOSEN)


def _choose_words(score_BL, segments_BL, candidates_BL, continues_BL, wanted_BL) -> jax.Array:
    """Choose whole words in random order, each if the pair's number of predictions has room for it (:388-403).

    A word is a candidate and the continuing tokens after it, without special tokens: if B begins with a token that
    continues a word, it belongs to A's last word, as in the original. The score of a word is that of its first token.
    """
    length = score_BL.shape[1]
    index_L = jnp.arange(length)
    before_BL = jnp.cumsum(candidates_BL, axis=1) - candidates_BL  # candidates to the left, over all pairs
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    earlier_BL = jnp.any(same_BLL & candidates_BL[:, None, :] & (index_L[None, :] < index_L[:, None]), axis=-1)
    heads_BL = candidates_BL & (~continues_BL | ~earlier_BL)
    head_BL = jax.lax.cummax(jnp.where(heads_BL, index_L, -1), axis=1)
    # A word's size is the number of candidates up to the next head (of any pair), or to the end.
    following_BL = jnp.where(heads_BL, before_BL, length)
    following_BL = jax.lax.cummin(following_BL[:, ::-1], axis=1)[:, ::-1]
    total_B1 = jnp.sum(candidates_BL, axis=1, keepdims=True)
    following_BL = jnp.minimum(jnp.pad(following_BL[:, 1:], ((0, 0), (0, 1)), constant_values=length), total_B1)
    size_BL = following_BL - before_BL

    order_BL, rank_BL = _order(jnp.where(heads_BL, segments_BL, NOT_CHOSEN), score_BL)

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order_BL, axis=1).T

    def visit(count_B, word):
        rank_B, is_head_B, size_B, wanted_B = word
        count_B = jnp.where(rank_B == 0, 0, count_B)  # a new pair begins
        taken_B = is_head_B & (count_B + size_B <= wanted_B)
        return count_B + jnp.where(taken_B, size_B, 0), taken_B

    start_B = jnp.zeros_like(segments_BL[:, 0])
    words = (rank_BL.T, take(heads_BL), take(size_BL), take(wanted_BL))
    _, taken_LB = jax.lax.scan(visit, start_B, words)
    rank_BL = _undo(order_BL, jnp.where(taken_LB.T, rank_BL, NOT_CHOSEN))  # of the heads
    of_word_BL = jnp.take_along_axis(rank_BL, jnp.maximum(head_BL, 0), axis=1)
    return jnp.where(candidates_BL, of_word_BL, NOT_CHOSEN)


def _order(group_BL: jax.Array, score_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort the positions of a row by group, then score; return them and, in that order, their ranks in the group."""
    index_BL = jnp.broadcast_to(jnp.arange(group_BL.shape[1]), group_BL.shape)
    group_BL, _, order_BL = jax.lax.sort((group_BL, score_BL, index_BL), num_keys=2, is_stable=True)
    opens_BL = jnp.pad(group_BL[:, 1:] != group_BL[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return order_BL, index_BL - jax.lax.cummax(jnp.where(opens_BL, index_BL, 0), axis=1)


def _undo(order_BL: jax.Array, sorted_BL: jax.Array) -> jax.Array:
    """Return `sorted_BL` in the original order of the positions that `order_BL` sorted."""
    return jnp.take_along_axis(sorted_BL, jnp.argsort(order_BL, axis=1), axis=1)
