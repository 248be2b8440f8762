"""The packing plan: every pair of tokens in exactly one row, rows nearly full, memory bounded, time linear."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlm.data import packing
from jaxlm.data.packing import PackingPlan, pack_lengths


def starts_of(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def plan_of(starts, length, *, begun) -> PackingPlan:
    """The plan of a store of one section. begun: documents begin with the end-of-document id."""
    store = SimpleNamespace(document_starts=starts, end=0 if begun else None, sentences=None)
    return PackingPlan(store, SimpleNamespace(first_document=0, documents=len(starts) - 1), length)


def some_lengths(seed: int, documents: int) -> np.ndarray:
    """Lengths of documents as they are: many short ones, a long tail, some empty."""
    drawn = np.random.default_rng(seed).lognormal(3.5, 1.3, documents).astype(int)
    return np.minimum(drawn, 5_000)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 513])
@pytest.mark.parametrize(("seed", "begun"), [(0, False), (1, False), (1, True)])
def test_every_pair_is_in_exactly_one_row(length, seed, begun):
    lengths = some_lengths(seed, 300)
    plan = plan_of(starts := starts_of(lengths), length, begun=begun)
    seen = [np.zeros(max(n - (not begun), 0), int) for n in lengths]
    for row in range(plan.rows):
        pieces = plan.row(row)
        assert 1 <= sum(piece.slots for piece in pieces) <= length
        assert [piece.slots for piece in pieces] == sorted((piece.slots for piece in pieces), reverse=True)
        for start, slots in pieces:
            document = int(np.searchsorted(starts, start, side="right")) - 1
            token = start - int(starts[document])
            seen[document][token : token + slots] += 1
            assert token % length == 0, "a document is cut at multiples of the length"
    assert all((pairs == 1).all() for pairs in seen)
    assert plan.pairs == sum(map(len, seen))


@pytest.mark.parametrize(
    ("lengths", "length", "rows"),
    [
        ([9, 9, 9], 8, 3),  # each document fills a row
        ([5, 5], 8, 1),  # 4 + 4 pairs
        ([5, 6], 8, 2),  # 4 + 5 do not fit
        ([1, 1, 0, 1], 8, 0),  # nothing follows anything
        ([], 8, 0),
        ([18], 8, 3),  # 17 = 8 + 8 + 1
        ([8, 2, 3, 7, 4, 6], 8, 3),  # 7+1, 6+2, 5+3: longest first fits exactly
    ],
)
def test_small_plans(lengths, length, rows):
    assert plan_of(starts_of(lengths), length, begun=False).rows == rows
    assert plan_of(starts_of([n - 1 for n in lengths if n]), length, begun=True).rows == rows


def test_rows_are_nearly_full():
    """On lengths like real ones at most 0.2 % of the slots are padding (first come, first served leaves about 8 %)."""
    plan = plan_of(starts_of(some_lengths(0, 100_000)), 512, begun=False)
    assert plan.pairs / (plan.rows * 512) > 0.998
    assert len(plan.row(0)) >= 1


def test_patterns_use_the_histogram_up():
    rng = np.random.default_rng(3)
    for length in (2, 5, 33, 128):
        counts = rng.integers(0, 50, length)
        counts[0] = 0
        patterns, times = pack_lengths(counts, length)
        used = np.zeros(length, int)
        for pattern, repeats in zip(patterns, times, strict=True):
            assert repeats >= 1 and sum(slots * uses for slots, uses, _ in pattern) <= length
            for slots, uses, taken in pattern:
                assert taken == used[slots], "rests are handed out once, one after the other"
                used[slots] += uses * repeats
        np.testing.assert_array_equal(used, counts)
        assert len(patterns) <= 4 * length, "a few patterns a length, whatever the counts"


def test_number_of_patterns_does_not_grow_with_the_documents():
    counts = np.bincount(np.clip(some_lengths(1, 50_000) - 1, 0, 255) % 256, minlength=256)
    counts[0] = 0
    few, _ = pack_lengths(counts, 256)
    many, times = pack_lengths(counts * 1_000_000, 256)
    assert len(many) <= 4 * 256 and len(few) <= 4 * 256
    assert sum(times) > 1_000_000


def test_blocks_do_not_show(monkeypatch):
    starts = starts_of(some_lengths(4, 500))
    whole = plan_of(starts, 64, begun=False)
    monkeypatch.setattr(packing, "_BLOCK", 17)
    in_blocks = plan_of(starts, 64, begun=False)
    assert whole.rows == in_blocks.rows
    assert [whole.row(row) for row in range(whole.rows)] == [in_blocks.row(row) for row in range(whole.rows)]


def test_memory_is_bounded_by_the_number_of_documents():
    """8 bytes a document stay, and few more are needed for a moment; a list of Python objects would take hundreds."""
    documents = 1_500_000
    starts = starts_of(np.full(documents, 40))
    tracemalloc.start()
    plan = plan_of(starts, 512, begun=False)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.rows == -(-documents // (512 // 39))
    assert kept / documents < 9 and peak / documents < 25
