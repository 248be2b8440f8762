"""Masks: exactly as many as the original's, uniform, 80/10/10, and a pair's own wherever it stands.

Statistics are held at five deviations (or a chi-square's point of the same rarity): a false alarm in about two million.
RandomNumbers are seeded, so a test that passes once passes always.
"""

import collections
import functools
import random

import jax
import numpy as np
import pytest
from scipy import stats
from toy_pairs import CONTINUES, FIRST_WORD, LENGTH, SPECIALS, make_pair, one_by_one, pair_rows

from jaxlm.data.batch import PairBatch
from jaxlm.distributed.mesh import MeshConfig, make_mesh, to_devices, use_mesh
from jaxlm.errors import InputError
from jaxlm.objectives.masked_lm import Masked, MaskingConfig, mask_tokens, predictions_of

ALARM = 6e-7  # two-sided five deviations
WHOLE = MaskingConfig(whole_word=True)


@functools.cache
def masking_program(masking: MaskingConfig, slots: int, vocab_size: int, continues: bytes):
    """mask_tokens, compiled once for all tests that ask for the same."""
    table = np.frombuffer(continues, bool)
    return jax.jit(lambda batch: mask_tokens(batch, masking, SPECIALS, vocab_size, table, slots))


def masks(
    batch: PairBatch,
    masking: MaskingConfig | None = None,
    *,
    slots: int = 12,
    vocab_size: int = 64,
    continues=CONTINUES,
) -> Masked:
    """mask_tokens, as NumPy."""
    run = masking_program(MaskingConfig() if masking is None else masking, slots, vocab_size, continues.tobytes())
    return Masked(*(np.asarray(x) for x in run(batch)))


def chosen(batch: PairBatch, found: Masked) -> np.ndarray:
    """Bool (B, L): the places that are to be predicted."""
    out = np.zeros(batch.ids.shape, bool)
    for row, places, weights in zip(out, found.where_BM, found.weights_BM, strict=True):
        row[places[weights > 0]] = True
    return out


def same_pair(copies: int, length: int = LENGTH, seed: int = 1) -> PairBatch:
    """One pair of `length` tokens, copied, each copy with seeds of its own."""
    rng = np.random.default_rng(seed)
    ids, types = make_pair(rng, length)
    rows = lambda x: np.broadcast_to(x, (copies, *x.shape))  # noqa: E731
    return PairBatch(
        ids=rows(ids),
        types=rows(types),
        positions=rows(np.arange(length, dtype=np.int32)),
        segments=rows(np.ones(length, np.int32)),
        firsts=np.zeros((copies, 1), np.int32),
        next_labels=np.zeros((copies, 1), np.int32),
        pair_weights=np.ones((copies, 1), np.float32),
        mask_seeds=rng.integers(2**32, size=(copies, 2), dtype=np.uint32),
    )


@pytest.fixture(scope="module")
def many():
    """Ten thousand maskings of one pair."""
    batch = same_pair(10_000)
    return batch, masks(batch)


# What is chosen


@pytest.mark.parametrize("rate", [0.15, 0.3, 0.01])
def test_how_many(rate):
    """Fails when the count is not max(1, round(rate n)) with CLS and SEP in n, or a special token is chosen."""
    batch = pair_rows(200, seed=3)
    found = chosen(batch, masks(batch, MaskingConfig(rate=rate), slots=LENGTH))
    for row in range(200):
        for pair in range(3):
            inside = batch.segments[row] == pair + 1
            wanted = max(1, int(round(inside.sum() * rate))) if inside.any() else 0
            assert found[row, inside].sum() == wanted == (predictions_of(int(inside.sum()), rate) if wanted else 0)
    assert not np.isin(batch.ids[found], [SPECIALS.cls, SPECIALS.sep]).any() and not found[batch.segments == 0].any()


def test_the_count_is_pythons():
    """Fails when halves are rounded up (30 x 0.15 = 4.5 gives 4, as in the original), or float32 makes them more."""
    assert [predictions_of(n, 0.15) for n in (1, 3, 10, 30, 50, 128, 512)] == [1, 1, 2, 4, 8, 19, 77]
    for length in (10, 30):
        assert masks(same_pair(1, length)).weights_BM.sum() == predictions_of(length, 0.15)


@pytest.mark.parametrize("masking", [MaskingConfig(), WHOLE], ids=["pieces", "words"])
def test_what_comes_out_fits_together(masking):
    """Fails when targets are not what stood at the places, a place comes twice, or other tokens are changed."""
    batch = pair_rows(100, seed=4)
    found = masks(batch, masking)
    assert all(len(set(places)) == len(places) for places in found.where_BM.tolist())
    np.testing.assert_array_equal(found.targets_BM, np.take_along_axis(np.asarray(batch.ids), found.where_BM, 1))
    assert np.all(np.diff(found.weights_BM, axis=1) <= 0) and set(np.unique(found.weights_BM)) == {0.0, 1.0}
    untouched = ~chosen(batch, found)
    np.testing.assert_array_equal(found.ids_BL[untouched], batch.ids[untouched])


def test_places_are_uniform(many):
    """Fails when some places are chosen more often than others. Without replacement counts vary less than a
    chi-square's, by (N - k) / (N - 1)."""
    batch, found = many
    counts = chosen(batch, found).sum(0)
    candidates = ~np.isin(batch.ids[0], [SPECIALS.cls, SPECIALS.sep])
    assert counts[~candidates].sum() == 0
    n, k = candidates.sum(), predictions_of(LENGTH, 0.15)
    expected = len(batch.ids) * k / n
    statistic = ((counts[candidates] - expected) ** 2 / expected).sum() * (n - 1) / (n - k)
    assert ALARM / 2 < stats.chi2.sf(statistic, n - 1) < 1 - ALARM / 2


def test_pairs_of_places_are_uniform(many):
    """Fails when neighbours are chosen together too often, or never: every two places are equally likely."""
    batch, found = many
    picked = chosen(batch, found)[:, ~np.isin(batch.ids[0], [SPECIALS.cls, SPECIALS.sep])].astype(np.float64)
    n, k = picked.shape[1], predictions_of(LENGTH, 0.15)
    together = (picked.T @ picked)[np.triu_indices(n, 1)]
    p = k * (k - 1) / (n * (n - 1))
    deviations = np.abs(together - len(picked) * p) / np.sqrt(len(picked) * p * (1 - p))
    assert deviations.max() < stats.norm.isf(ALARM / 2 / len(together))


def test_seeds_and_rows_are_independent(many):
    """Fails when two seeds that differ by little give the same masks: each row of ten thousand is its own draw."""
    batch, found = many
    rows = collections.Counter(map(tuple, chosen(batch, found).tolist()))
    assert rows.most_common(1)[0][1] < 12  # C(29, 5) = 118,755 sets of places
    near = same_pair(400)
    near = near.replace(mask_seeds=np.array([[7 + i // 20, 9 + i % 20] for i in range(400)], np.uint32))
    picked = chosen(near, masks(near))
    repeats = [(picked[i] & picked[i - 1]).sum() for i in range(1, 400)]
    n, k = 29, predictions_of(LENGTH, 0.15)
    assert abs(np.mean(repeats) - k * k / n) < 5 * np.std(repeats) / np.sqrt(399)


# What becomes of it


def shares(batch: PairBatch, found: Masked) -> np.ndarray:
    """How many of the chosen tokens became [MASK], stayed, or became another word."""
    on = found.weights_BM > 0
    now = np.take_along_axis(found.ids_BL, found.where_BM, 1)[on]
    was = found.targets_BM[on]
    return np.array([(now == SPECIALS.mask).sum(), (now == was).sum(), ((now != SPECIALS.mask) & (now != was)).sum()])


@pytest.mark.parametrize(
    "table_8", [(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.8, 0.0, 0.2), (0.8, 0.2, 0.0), (0.0, 0.2, 0.8), (0.0, 0.0, 1.0)]
)
def test_the_three_replacements(table_8):
    """Fails when the shares (mask, same, random: the rows of the paper's table 8) are off by five deviations."""
    share_mask, _, share_random = table_8
    batch = same_pair(4000)
    found = shares(batch, masks(batch, MaskingConfig(share_mask=share_mask, share_random=share_random)))
    v = 64  # a random word is the right one, or [MASK], once in V
    p = np.array([share_mask + share_random / v, table_8[1] + share_random / v, share_random * (v - 2) / v])
    total = found.sum()
    assert np.all(np.abs(found - total * p) <= 5 * np.sqrt(total * p * (1 - p)) + 1e-9)


def test_random_words_come_from_the_whole_vocabulary():
    """Fails when a word is never drawn (special ones are drawn too, as in the original) or drawn too often."""
    batch = same_pair(10_000)
    found = masks(batch, MaskingConfig(share_mask=0.0, share_random=1.0))
    words = np.take_along_axis(found.ids_BL, found.where_BM, 1)[found.weights_BM > 0]
    counts = np.bincount(words, minlength=64)
    assert len(counts) == 64
    assert ALARM / 2 < stats.chisquare(counts).pvalue < 1 - ALARM / 2


def test_what_becomes_of_a_token_does_not_hang_on_its_being_chosen_first(many):
    """Fails when one random word serves two decisions: the first chosen of a pair would be replaced differently."""
    batch, found = many
    now = np.take_along_axis(found.ids_BL, found.where_BM, 1)
    for slot in range(predictions_of(LENGTH, 0.15)):
        share = (now[:, slot] == SPECIALS.mask).mean()
        p = 0.8 + 0.1 / 64
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / len(now))


# Whole words


def words_of(batch: PairBatch, row: int, pair: int) -> list[list[int]]:
    """create_pretraining_data.py:342-363: special tokens skipped, continuing pieces joined to what stands before."""
    words: list[list[int]] = []
    for at in np.flatnonzero(batch.segments[row] == pair + 1).tolist():
        token = batch.ids[row, at]
        if token in (SPECIALS.cls, SPECIALS.sep):
            continue
        if words and CONTINUES[token]:
            words[-1].append(at)
        else:
            words.append([at])
    return words


def test_whole_words_are_masked_whole():
    """Fails when a word is cut, when more is masked than wanted, or when a word that still fits is left."""
    batch = pair_rows(300, seed=5)
    found = chosen(batch, masks(batch, WHOLE, slots=LENGTH))
    sizes = collections.Counter()
    for row in range(300):
        for pair in range(3):
            words = words_of(batch, row, pair)
            taken = [word for word in words if found[row, word].any()]
            assert all(found[row, word].all() for word in taken)
            count, wanted = sum(map(len, taken)), predictions_of(int((batch.segments[row] == pair + 1).sum()), 0.15)
            assert count <= wanted
            left = [len(word) for word in words if word not in taken]
            assert not left or count + min(left) > wanted
            sizes.update(len(word) for word in taken)
    assert len(sizes) > 3


def test_whole_words_are_as_likely_as_the_originals():
    """Fails when the order of words, or the rule for those that overshoot, is another: against the original's loop."""
    batch = same_pair(20_000, seed=3)
    words = words_of(batch, 0, 0)
    assert {1, 2, 3} <= {len(word) for word in words}
    found = chosen(batch, masks(batch, WHOLE))
    drawn, wanted, rng = np.zeros(LENGTH), predictions_of(LENGTH, 0.15), random.Random(0)
    for _ in range(20_000):
        order, taken = rng.sample(words, len(words)), 0
        for word in order:
            if taken + len(word) <= wanted:
                taken += len(word)
                drawn[word] += 1
    ours = found.sum(0)
    assert np.all((ours > 0) == (drawn > 0))
    p = (ours + drawn)[drawn > 0] / 40_000
    deviations = np.abs(ours - drawn)[drawn > 0] / np.sqrt(20_000 * 2 * p * (1 - p))
    assert deviations.max() < stats.norm.isf(ALARM / 2 / len(p))


def test_whole_words_need_to_know_which_pieces_continue():
    with pytest.raises(ValueError, match="continues"):
        mask_tokens(pair_rows(1), WHOLE, SPECIALS, 64, None, 4)


def test_without_continuing_pieces_words_are_pieces():
    """Fails when the two ways to choose differ where each word is one piece."""
    batch, none = pair_rows(50), np.zeros(64, bool)
    for x, y in zip(masks(batch, WHOLE, continues=none), masks(batch), strict=True):
        np.testing.assert_array_equal(x, y)


# A pair's masks are its own


@pytest.mark.parametrize("masking", [MaskingConfig(), WHOLE], ids=["pieces", "words"])
def test_a_pair_is_masked_alike_alone_and_among_others(masking):
    """Fails when a pair's masks depend on its row, its place in it, its neighbours or the row's length."""
    packed = pair_rows(40, seed=6)
    alone = one_by_one(packed, LENGTH + 7)
    among, by_itself = masks(packed, masking), masks(alone, masking)
    picked, picked_alone = chosen(packed, among), chosen(alone, by_itself)
    number = 0
    for row in range(40):
        for pair in np.flatnonzero(packed.pair_weights[row]):
            inside = packed.segments[row] == pair + 1
            n = inside.sum()
            np.testing.assert_array_equal(picked[row, inside], picked_alone[number, :n])
            np.testing.assert_array_equal(among.ids_BL[row, inside], by_itself.ids_BL[number, :n])
            number += 1


@pytest.mark.parametrize("masking", [MaskingConfig(), WHOLE], ids=["pieces", "words"])
def test_any_mesh_and_any_part_of_the_batch(masking):
    """Fails when a row's masks depend on which rows, or how many, are masked with it, or on how they are spread."""
    batch = pair_rows(8, seed=7)
    whole = masks(batch, masking)
    for part in (slice(0, 1), slice(3, 7), slice(None, None, 2)):
        for x, y in zip(masks(jax.tree.map(lambda x, p=part: x[p], batch), masking), whole, strict=True):
            np.testing.assert_array_equal(x, y[part])
    for sizes in (MeshConfig(data=8), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=4, tensor=2)):
        mesh = make_mesh(sizes)
        with use_mesh(mesh):
            for x, y in zip(masks(to_devices(batch, mesh, 8), masking), whole, strict=True):
                np.testing.assert_array_equal(x, y)


def test_masking_sharded_rows_moves_nothing():
    """Fails when masking rows that are spread over devices gathers them: they would travel at every step."""
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    with use_mesh(mesh):
        batch = to_devices(pair_rows(8), mesh, 8)
        for masking in (MaskingConfig(), WHOLE):
            run = functools.partial(
                mask_tokens, masking=masking, specials=SPECIALS, vocab_size=64, continues=CONTINUES, slots=8
            )
            text = jax.jit(run).lower(batch).compile().as_text()
            assert not any(word in text for word in ("all-gather", "all-reduce", "collective-permute", "all-to-all"))


def test_other_seeds_other_masks():
    batch = pair_rows(20)
    for word in (0, 1):
        seeds = np.array(batch.mask_seeds)
        seeds[:, word] += np.uint32(1000)
        assert not np.array_equal(masks(batch).where_BM, masks(batch.replace(mask_seeds=seeds)).where_BM)


# Limits and bad input


def test_slots_cap_a_pair_as_the_original_does():
    """Fails when the cap is not min(slots, wanted), or prefers some places: they stay uniform."""
    batch = same_pair(10_000)
    found = masks(batch, slots=2)
    assert np.all(found.weights_BM == 1) and found.weights_BM.shape == (10_000, 2)
    counts = chosen(batch, found).sum(0)
    candidates = ~np.isin(batch.ids[0], [SPECIALS.cls, SPECIALS.sep])
    expected = 20_000 / candidates.sum()
    statistic = ((counts[candidates] - expected) ** 2 / expected).sum() * 28 / 27
    assert ALARM / 2 < stats.chi2.sf(statistic, candidates.sum() - 1) < 1 - ALARM / 2


def test_slots_of_a_packed_row_are_shared_out():
    """Fails when a later pair of a row loses all its places to the earlier ones."""
    batch = jax.tree.map(lambda x: x[2::3], pair_rows(60))
    found = chosen(batch, masks(batch, MaskingConfig(rate=0.5), slots=6))
    for row in range(20):
        assert {found[row, batch.segments[row] == pair].sum() for pair in (1, 2, 3)} == {2}


def test_more_slots_than_tokens_and_pairs_without_words():
    """Fails on a pair of nothing but specials, which has nothing to predict, and when slots exceed the row."""
    batch = pair_rows(1, pairs=1)
    ids = np.where(batch.segments > 0, SPECIALS.sep, 0).astype(np.int32)
    found = masks(batch.replace(ids=ids), slots=LENGTH + 10)
    assert found.weights_BM.shape == (1, LENGTH) and not found.weights_BM.any()
    np.testing.assert_array_equal(found.ids_BL, ids)
    assert FIRST_WORD > SPECIALS.mask


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"share_mask": 0.8, "share_random": 0.3}, "share_random must be at most 1 together, got 0.8 and 0.3"),
    ],
)
def test_shares_that_are_none_are_refused(fields, said):
    with pytest.raises(InputError, match=said) as error:
        MaskingConfig(**fields).check()
    assert "\n" not in str(error.value)
