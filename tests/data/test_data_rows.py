"""Training rows are a function of seed and index: contents at borders, order, epochs, mixtures."""

import hashlib
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from numbers_store import END, documents_of, numbers_store
from toy_store import rows_per_epoch

from jaxlm.data import order as order_module
from jaxlm.data.config import MEMBERS, check_order
from jaxlm.data.rows import training_rows
from jaxlm.errors import InputError

# Lengths of documents; with the end each has one token more.
LENGTHS = [5, 1, 30, 0, 12, 7, 64, 3, 3, 21, 8, 16, 40, 2, 2, 9]
LENGTH = 16
NAMES = ("ids", "targets", "positions", "segments", "weights")

# (part, row) of the first indices, see test_order_is_the_one_that_is_written_down.
GOLDEN = {
    "listed": [(0, 8), (1, 15), (1, 17), (0, 5), (1, 37), (1, 27), (0, 1), (1, 36)],
    "permuted": [(0, 3), (1, 6), (1, 13), (0, 17), (1, 17), (1, 27), (0, 0), (1, 23)],
}

# Of the first eight packed rows: (document, token, tokens) of their pieces, and a hash of the arrays.
PACKED_ROWS = (
    [
        [(6, 16, 16)],
        [(5, 0, 8), (8, 0, 4), (1, 0, 2), (11, 16, 1)],
        [(4, 0, 13), (13, 0, 3)],
        [(6, 0, 16)],
        [(12, 0, 16)],
        [(2, 0, 16)],
        [(12, 32, 9), (7, 0, 4), (14, 0, 3)],
        [(12, 16, 16)],
    ],
    "631fc93af09231b7",
)


def config(stores, layout="windows", weights=()):
    return MEMBERS[layout](store=tuple(str(store.path) for store in stores), weights=weights)


def rows_of(*stores, layout="windows", weights=(), length=LENGTH, seed=0):
    return training_rows(stores, config(stores, layout, weights), length=length, seed=seed)


def row_at(rows, index):
    """Row `index` as a batch whose arrays have no batch axis."""
    batch = rows.read([index])
    return type(batch)(*(getattr(batch, name)[0] for name in NAMES))


def order_of(rows, first, count):
    """Which row of which part each index is: what the seed decides."""
    return [(part.number, row) for part, row, _ in (rows._place(index) for index in range(first, first + count))]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return numbers_store(tmp_path_factory.mktemp("store") / "store", LENGTHS)


@pytest.fixture(params=["listed", "permuted"])
def either_order(request, monkeypatch):
    """Both ways to shuffle: a list of a small section's rows, and Grain's permutation."""
    if request.param == "permuted":
        monkeypatch.setattr(order_module, "_LISTED_ROWS", 0)


def test_windows_are_the_text_as_it_stands(store):
    rows = rows_of(store)
    (count,) = rows_per_epoch([store], config([store]), LENGTH)
    assert count == -(-(store.num_tokens - 1) // LENGTH)
    text = np.asarray(store.tokens, np.int64)
    targets = np.zeros(store.num_tokens, int)
    for index in range(count):
        row, (origin,) = row_at(rows, index), rows.origin(index)
        start = int(store.document_starts[origin.document]) + origin.token
        slots = origin.tokens - 1
        assert start % LENGTH == 0
        np.testing.assert_array_equal(row.ids[:slots], text[start : start + slots])
        np.testing.assert_array_equal(row.targets[:slots], text[start + 1 : start + slots + 1])
        np.testing.assert_array_equal(row.positions[:slots], np.arange(slots))
        np.testing.assert_array_equal(row.segments, [1] * slots + [0] * (LENGTH - slots))
        np.testing.assert_array_equal(row.weights, row.segments)
        assert not row.ids[slots:].any() and not row.targets[slots:].any() and not row.positions[slots:].any()
        targets[start + 1 : start + slots + 1] += 1
    assert targets[0] == 0 and (targets[1:] == 1).all(), "each token but the first is a target once an epoch"


def assert_packed(store, rows, count, begun):
    """Against the store: a target that is another document's, or a position that runs on, would fail.

    begun: whether the id that ends documents is a document's first input.
    """
    text, document = np.asarray(store.tokens, np.int64), documents_of(store)
    place = {int(token): at for at, token in enumerate(text) if token != END}
    seen = Counter()
    for index in range(count):
        row, origins = row_at(rows, index), rows.origin(index)
        at = 0
        for segment, origin in enumerate(origins, start=1):
            slots = origin.tokens - (not begun)
            stretch = slice(at, at + slots)
            start = int(store.document_starts[origin.document]) + origin.token
            first = start + (not begun)  # the first target
            assert (row.segments[stretch] == segment).all()
            np.testing.assert_array_equal(row.positions[stretch], np.arange(slots))
            np.testing.assert_array_equal(row.targets[stretch], text[first : first + slots])
            inputs = [END if begun and not origin.token else text[first - 1], *text[first : first + slots - 1]]
            np.testing.assert_array_equal(row.ids[stretch], inputs)
            assert (document[start : start + origin.tokens] == origin.document).all()
            seen.update(range(first, first + slots))
            at += slots
        assert not row.segments[at:].any() and not row.weights[at:].any() and (row.weights[:at] == 1).all()
        # The same, said from the row alone: an id's successor in the text is its target.
        for token, target in zip(row.ids[:at], row.targets[:at], strict=True):
            assert begun and token == END or text[place[int(token)] + 1] == target
    firsts = set() if begun else {int(start) for start in store.document_starts[:-1]}
    assert seen == Counter({at: 1 for at in range(store.num_tokens) if at not in firsts})


def test_a_packed_document_begins_with_the_id_that_ends_documents(store):
    """Fails on 2968321, where that id is no input and the first token of a document no target.

    A document of n tokens, its end counted, gives n pairs, one that is empty the pair of its end.
    """
    (count,) = rows_per_epoch([store], config([store], "packed"), LENGTH)
    rows = rows_of(store, layout="packed")
    assert_packed(store, rows, count, begun=True)
    assert sum(int(row_at(rows, index).weights.sum()) for index in range(count)) == store.num_tokens


def test_packed_rows_without_an_end_hold_documents_apart(tmp_path):
    endless = numbers_store(tmp_path / "store", LENGTHS, end=False)
    (count,) = rows_per_epoch([endless], config([endless], "packed"), LENGTH)
    assert_packed(endless, rows_of(endless, layout="packed"), count, begun=False)


def hash_of(rows, count):
    """The first rows as they are read: what a change of the scheme, of the packing or of the order changes."""
    batch = rows.read(range(count))
    return hashlib.sha256(json.dumps([getattr(batch, name).tolist() for name in NAMES]).encode()).hexdigest()[:16]


def test_packed_rows_are_those_that_are_written_down(store):
    """A run that resumes would see rows twice; a change here needs a new version."""
    rows = rows_of(store, layout="packed", seed=3)
    found = [[(origin.document, origin.token, origin.tokens) for origin in rows.origin(index)] for index in range(8)]
    assert (found, hash_of(rows, 8)) == PACKED_ROWS


def test_a_run_with_rows_of_another_version_is_refused():
    """Fails when a run is read whose rows would be others now, such as those that were begun before 192edfa."""
    saved = lambda layout, order: {"data": {"layout": layout}, "fingerprints": {"data_order": order}}  # noqa: E731
    for layout, order in (("windows", 1), ("packed", 2), ("pairs", [1, 1, 2])):
        check_order(saved(layout, order), "run")
    check_order({"published": {}}, "run")
    for layout, order in (("windows", 2), ("packed", 1), ("packed", 3), ("pairs", [1, 1, 1]), ("pairs", 1)):
        with pytest.raises(InputError, match="run: data_order must be "):
            check_order(saved(layout, order), "run")


@pytest.mark.parametrize("layout", ["windows", "packed"])
def test_random_access_is_a_function_of_seed_and_index(store, layout, either_order):
    rows = rows_of(store, layout=layout, seed=7)
    wanted = [0, 3, 100, 10**6, 10**15, 3]
    found = [row_at(rows, index) for index in wanted]
    again = rows_of(store, layout=layout, seed=7)
    for index, row in reversed(list(zip(wanted, found, strict=True))):
        for name in NAMES:
            np.testing.assert_array_equal(getattr(row_at(again, index), name), getattr(row, name))


@pytest.mark.parametrize("layout", ["windows", "packed"])
def test_each_row_once_an_epoch_and_epochs_differ(store, layout, either_order):
    rows = rows_of(store, layout=layout)
    (count,) = rows_per_epoch([store], config([store], layout), LENGTH)
    epochs = [order_of(rows, epoch * count, count) for epoch in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == [(0, row) for row in range(count)]
    assert all(one != other for one, other in itertools.combinations(epochs, 2))


def test_seed_and_epoch_are_not_added(tmp_path, either_order):
    """Grain's own `shuffle(seed=s)` orders epoch e by s + e: two seeds would see the same orders, shifted."""
    store = numbers_store(tmp_path / "store", [400] * 4)
    (count,) = rows_per_epoch([store], config([store]), 8)
    orders = {
        (seed, epoch): tuple(order_of(rows_of(store, length=8, seed=seed), epoch * count, count))
        for seed in (0, 1, 2, -1, 2**63)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == len(orders)


def test_order_is_the_one_that_is_written_down(tmp_path, monkeypatch):
    """A run that resumes under another order would see rows twice: a change here needs a new version of the order."""
    store = numbers_store(tmp_path / "store", {"a": [160], "b": [320]})
    rows = rows_of(store, length=8, seed=3)
    assert order_of(rows, 0, 8) == GOLDEN["listed"]
    monkeypatch.setattr(order_module, "_LISTED_ROWS", 0)
    assert order_of(rows, 0, 8) == GOLDEN["permuted"]


def test_shuffled_rows_are_far_apart():
    """Neighbours in the text are not neighbours in the order (a bad permutation would keep runs)."""
    for count in (1_000, 16_384, 16_385, 300_000):
        order = np.array([order_module.shuffled(at, count, (1, 0, 0, 0)) for at in range(min(count, 4_000))])
        assert len(set(order.tolist())) == len(order) and order.max() < count
        assert np.mean(np.abs(np.diff(order))) > count / 4, "a third of the range is what chance gives"


def test_large_sections_are_shuffled_in_parts(tmp_path, monkeypatch):
    """Grain's permutation takes 32 bits; here the limit is 7 rows, and 21 rows become three parts mixed evenly."""
    store = numbers_store(tmp_path / "store", [21 * 8])
    monkeypatch.setitem(order_module.ORDERS, "rows", order_module.Order(order_module.shuffled, 7))
    rows = rows_of(store, length=8)
    first = order_of(rows, 0, 21)
    assert Counter(part for part, _ in first) == {0: 7, 1: 7, 2: 7}
    assert sorted(row for _, row in first) == list(range(21))


def test_mixture_without_weights_passes_over_all_sections_together(tmp_path):
    one = numbers_store(tmp_path / "one", {"a": [100], "b": [700]})
    two = numbers_store(tmp_path / "two", [333])
    per_epoch = rows_per_epoch([one, two], config([one, two]), LENGTH)
    rows = rows_of(one, two)
    for epoch in range(3):
        order = order_of(rows, epoch * sum(per_epoch), sum(per_epoch))
        assert Counter(part for part, _ in order) == dict(enumerate(per_epoch))
        assert len(set(order)) == len(order)


@pytest.mark.parametrize(
    ("own", "weights", "shares"),
    [
        (None, (1.0, 3.0), [100 / 800 / 4, 700 / 800 / 4, 3 / 4]),  # the stores' weights; sections by rows
        ((3.0, 1.0), (1.0, 1.0), [3 / 8, 1 / 8, 1 / 2]),  # the stores' weights; sections by their own
        ((3.0, 1.0), (), [800 / 1100 * 3 / 4, 800 / 1100 / 4, 300 / 1100]),  # stores by rows; sections by their own
    ],
)
def test_mixture_by_weight_is_exact_and_even(tmp_path, own, weights, shares):
    """Any stretch of the stream holds a section's share of it, but for a row or two."""
    one = numbers_store(tmp_path / "one", {"a": [1600], "b": [11200]}, weights=own, end=False)
    two = numbers_store(tmp_path / "two", [4800], end=False)
    rows = rows_of(one, two, weights=weights)
    dealt = np.array([part.number for part, _, _ in (rows._place(index) for index in range(4_000))])
    for part, share in enumerate(shares):
        assert np.mean(dealt == part) == pytest.approx(share, abs=2 / 4_000)
        counts = np.convolve(dealt == part, np.ones(200), "valid")
        assert np.abs(counts - 200 * share).max() <= 3


def test_small_sections_repeat_while_large_ones_go_on(tmp_path):
    """`mix` without `repeat` would end with the first exhausted store."""
    small = numbers_store(tmp_path / "small", [20])
    large = numbers_store(tmp_path / "large", [5_000])
    rows = rows_of(small, large, weights=(1.0, 1.0))
    order = order_of(rows, 0, 400)
    assert Counter(part for part, _ in order) == {0: 200, 1: 200}
    assert {row for part, row in order if part == 0} == {0, 1}
    assert len({row for part, row in order if part == 1}) == 200


def test_input_errors(store, tmp_path):
    with pytest.raises(InputError, match=r"data\.weights must have one value per store, got 2 for 1"):
        rows_of(store, weights=(1.0, 2.0))
    lonely = numbers_store(tmp_path / "lonely", {"fine": [5], "single": [0]})
    with pytest.raises(InputError, match="source single holds 1 tokens in 1 documents"):
        rows_of(lonely)
    pairless = numbers_store(tmp_path / "pairless", [1, 1, 1], end=False)
    with pytest.raises(InputError, match="source numbers holds 3 tokens in 3 documents"):
        rows_of(pairless, layout="packed")
