"""The masked language model's masks, made on the device from seeds that the loader gives.

Devlin et al. (2019, section 3.1 and appendix A.1); google-research/bert, create_pretraining_data.py:342-415. There the
masks are made once, on the host; here in the step, for as many rows as it is given. Every number comes from a counter:
token t of pair p of a row draws from threefry keyed by (the row's first word, its second word + p), counted by t. So a
pair's masks do not depend on the other rows, on the row's other pairs, on its place in the row, on the mesh or on
micro-batches; and pair p alone in a row of its own, seeded by (first, second + p), is masked as it was among others.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.data.batch import Batch, PairBatch
from jaxlm.errors import InputError


@dataclass(frozen=True)
class MaskingConfig:
    """The tokens to predict, and their replacements."""

    rate: float = 0.15
    """Fraction of tokens to predict. Of n tokens, with CLS and SEP, which are never chosen: max(1, round(rate n))."""
    share_mask: float = 0.8
    """Fraction of the chosen tokens that are replaced by [MASK]."""
    share_random: float = 0.1
    """Fraction of the chosen tokens that are replaced by a random token of the whole vocabulary, with special tokens,
    as in the original. The rest stays unchanged. Table 8 of the paper varies the three fractions."""
    whole_word: bool = False
    """Choose whole words: a token that continues a word is chosen with the token before it (the original's option)."""

    def check(self) -> None:
        """Raise InputError for fractions outside [0, 1]."""
        prefix = "objective.masking"
        for name in ("rate", "share_mask", "share_random"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{prefix}.{name} must be from 0 to 1, got {getattr(self, name)}; give a fraction")
        if self.rate == 0.0:
            raise InputError(
                f"{prefix}.rate must be above 0, got 0.0; give --objective.kind language_model without masks"
            )
        if self.share_mask + self.share_random > 1.0 + 1e-9:
            raise InputError(
                f"{prefix}.share_mask and {prefix}.share_random must be at most 1 together, got {self.share_mask} and "
                f"{self.share_random}; lower one"
            )


class Specials(NamedTuple):
    """Ids of the special tokens that masking knows: two that are never chosen, and what hides a token."""

    cls: int
    sep: int
    mask: int


class Masked(NamedTuple):
    """Rows with tokens hidden, and what was there.

    ids_BL: int32, what the encoder sees. where_BM: int32, M different places of each row; those that are to be
    predicted come first. targets_BM: int32, what stood there. weights_BM: float32, 1 for a place that is to be
    predicted, 0 for one that only fills.
    """

    ids_BL: jax.Array
    where_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


def predictions_of(num_tokens: int, rate: float) -> int:
    """How many of a pair's tokens are predicted: max(1, round(rate n)), Python's round (:369-370)."""
    return max(1, round(num_tokens * rate))


def mask_tokens(
    batch: Batch | PairBatch,
    masking: MaskingConfig,
    specials: Specials,
    vocab_size: int,
    continues: np.ndarray | None,
    slots: int,
) -> Masked:
    """Hide tokens of `batch` and say which.

    continues: bool (V,), true for a piece that continues a word; used for whole words alone. slots: M, the most places
    of a row. Where a row's pairs ask for more, none gets more than M, and the ones that each pair chose last are left.
    """
    length = batch.ids.shape[1]
    slots = min(slots, length)
    segments_BL = jnp.asarray(batch.segments)
    ids_BL = jnp.asarray(batch.ids)
    bits_BL4 = _bits(batch.mask_seeds, segments_BL, batch.positions)
    candidates_BL = (segments_BL > 0) & (ids_BL != specials.cls) & (ids_BL != specials.sep)
    table = np.array([min(slots, predictions_of(n, masking.rate)) for n in range(length + 1)], np.int32)
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    wanted_BL = jnp.asarray(table)[jnp.sum(same_BLL, axis=-1)]  # of the token's pair
    if masking.whole_word:
        if continues is None:
            raise ValueError("whole words need `continues`, which pieces continue a word")
        continues_BL = jnp.asarray(continues)[ids_BL]
        rank_BL = _choose_words(bits_BL4[..., 0], segments_BL, candidates_BL, continues_BL, wanted_BL)
    else:
        rank_BL = _choose_tokens(bits_BL4[..., 0], segments_BL, candidates_BL, wanted_BL)

    where_BM = jnp.argsort(rank_BL, axis=-1, stable=True)[:, :slots]
    take = lambda x: jnp.take_along_axis(x, where_BM, axis=1)  # noqa: E731
    chosen_BM, targets_BM = take(rank_BL) < NOT_CHOSEN, take(ids_BL)
    kind_BM = take(bits_BL4[..., 1])
    word_BM = (take(bits_BL4[..., 2]) % jnp.uint32(vocab_size)).astype(jnp.int32)  # uneven by V / 2**32 at most
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
    """Four random words for each token, uint32 (B, L, 4): which is chosen, what becomes of it, which word, unused."""
    seeds_B2 = jnp.asarray(seeds_B2, jnp.uint32)
    pair_BL = (segments_BL - 1).astype(jnp.uint32)
    second_BL = seeds_B2[:, 1, None] + pair_BL
    first_BL = jnp.broadcast_to(seeds_B2[:, 0, None], second_BL.shape)
    keys = jax.random.wrap_key_data(jnp.stack([first_BL, second_BL], axis=-1), impl="threefry2x32")
    count_BL = 2 * jnp.asarray(positions_BL).astype(jnp.uint32)
    fold = jax.vmap(jax.vmap(jax.random.fold_in))
    words = [jax.random.key_data(fold(keys, count_BL + k)) for k in (0, 1)]
    return jnp.concatenate(words, axis=-1)


def _below(bits: jax.Array, share: float) -> jax.Array:
    """True with probability `share`, to within 2**-32."""
    if share >= 1.0 - 1e-9:
        return jnp.ones(bits.shape, bool)
    return bits < jnp.uint32(round(share * 2**32))


def _choose_tokens(score_BL, segments_BL, candidates_BL, wanted_BL) -> jax.Array:
    """The rank of each chosen token among its pair's, else NOT_CHOSEN: the tokens of the lowest scores are chosen."""
    group_BL = jnp.where(candidates_BL, segments_BL, NOT_CHOSEN)
    order_BL, rank_BL = _order(group_BL, score_BL)
    rank_BL = _undo(order_BL, rank_BL)
    return jnp.where(candidates_BL & (rank_BL < wanted_BL), rank_BL, NOT_CHOSEN)


def _choose_words(score_BL, segments_BL, candidates_BL, continues_BL, wanted_BL) -> jax.Array:
    """Whole words in random order, each taken if it does not overshoot what the pair still wants (:388-403).

    A word is a candidate and the continuing pieces after it, special tokens skipped: one that opens B and continues a
    word joins A's last word, as in the original. The score of a word is its first piece's.
    """
    length = score_BL.shape[1]
    index_L = jnp.arange(length)
    before_BL = jnp.cumsum(candidates_BL, axis=1) - candidates_BL  # candidates to the left, in all pairs
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    earlier_BL = jnp.any(same_BLL & candidates_BL[:, None, :] & (index_L[None, :] < index_L[:, None]), axis=-1)
    heads_BL = candidates_BL & (~continues_BL | ~earlier_BL)
    head_BL = jax.lax.cummax(jnp.where(heads_BL, index_L, -1), axis=1)
    # A word's size: candidates up to the next head (of any pair), or to the end.
    following_BL = jnp.where(heads_BL, before_BL, length)
    following_BL = jax.lax.cummin(following_BL[:, ::-1], axis=1)[:, ::-1]
    total_B1 = jnp.sum(candidates_BL, axis=1, keepdims=True)
    following_BL = jnp.minimum(jnp.pad(following_BL[:, 1:], ((0, 0), (0, 1)), constant_values=length), total_B1)
    size_BL = following_BL - before_BL

    order_BL, rank_BL = _order(jnp.where(heads_BL, segments_BL, NOT_CHOSEN), score_BL)
    take = lambda x: jnp.take_along_axis(x, order_BL, axis=1).T  # noqa: E731

    def visit(count_B, word):
        rank_B, is_head_B, size_B, wanted_B = word
        count_B = jnp.where(rank_B == 0, 0, count_B)  # a new pair begins
        taken_B = is_head_B & (count_B + size_B <= wanted_B)
        return count_B + jnp.where(taken_B, size_B, 0), taken_B

    start_B = jnp.zeros_like(segments_BL[:, 0])
    words = (rank_BL.T, take(heads_BL), take(size_BL), take(wanted_BL))
    _, taken_LB = jax.lax.scan(visit, start_B, words)
    rank_BL = _undo(order_BL, jnp.where(taken_LB.T, rank_BL, NOT_CHOSEN))  # of heads
    of_word_BL = jnp.take_along_axis(rank_BL, jnp.maximum(head_BL, 0), axis=1)
    return jnp.where(candidates_BL, of_word_BL, NOT_CHOSEN)


def _order(group_BL: jax.Array, score_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places of a row sorted by group, then score; and, in that order, the rank of each within its group."""
    index_BL = jnp.broadcast_to(jnp.arange(group_BL.shape[1]), group_BL.shape)
    group_BL, _, order_BL = jax.lax.sort((group_BL, score_BL, index_BL), num_keys=2, is_stable=True)
    opens_BL = jnp.pad(group_BL[:, 1:] != group_BL[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return order_BL, index_BL - jax.lax.cummax(jnp.where(opens_BL, index_BL, 0), axis=1)


def _undo(order_BL: jax.Array, sorted_BL: jax.Array) -> jax.Array:
    """`sorted_BL` back in the places that `order_BL` took it from."""
    return jnp.take_along_axis(sorted_BL, jnp.argsort(order_BL, axis=1), axis=1)
