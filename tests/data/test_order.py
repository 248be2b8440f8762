"""The order of blocks: its definition, its epochs, what a process reads, and how well it mixes."""

import itertools

import numpy as np
import pytest
from numbers_store import numbers_store

from jaxlm.data import order as order_module
from jaxlm.data.config import MEMBERS, Windows
from jaxlm.data.layouts.layout import IndependentRows
from jaxlm.data.loader import batch_at, batches
from jaxlm.data.order import shuffled, shuffled_in_blocks
from jaxlm.data.rows import TrainingRows, training_rows

KEY = (1, 7, 0, 2)
CHUNK = 1 << 16  # bytes, jaxlm/data/arrays.py


@pytest.fixture
def small(monkeypatch):
    """Blocks of 4 rows and at most 8 lanes."""
    monkeypatch.setattr(order_module, "BLOCK", 4)
    monkeypatch.setattr(order_module, "MOST_LANES", 8)


def in_blocks(rows, key=KEY):
    return [shuffled_in_blocks(at, rows, key) for at in range(rows)]


def permuted(items, key):
    return [items[shuffled(at, len(items), key)] for at in range(len(items))]


def enumerated(rows, key, block, most_lanes):
    """The definition, step by step, with lists of all rows."""
    blocks = [list(range(first, first + block)) for first in range(0, rows - block + 1, block)]
    lanes = 1
    while 2 * lanes <= min(len(blocks), most_lanes):
        lanes *= 2
    blocks = permuted(blocks, key)
    dealt = [[] for _ in range(lanes)]
    while len(blocks) >= lanes:
        for lane in dealt:
            lane += blocks.pop(0)
    left = list(itertools.chain(*blocks, range(rows // block * block, rows)))
    piece = len(left) // lanes
    for lane in dealt:
        lane += left[:piece]
        del left[:piece]
    for number, lane in enumerate(dealt):
        windows = [lane[first : first + 2 * block] for first in range(0, len(lane), 2 * block)]
        if len(windows) > 1 and len(windows[-1]) < 2 * block:
            windows[-2:] = [windows[-2] + windows[-1]]
        lane[:] = itertools.chain(*(permuted(window, (*key, number, k)) for k, window in enumerate(windows)))
    return [row for round_of_lanes in zip(*dealt, strict=True) for row in round_of_lanes] + permuted(
        left, (*key, lanes, 0)
    )


def test_the_order_of_blocks_is_its_definition(small):
    """Fails when a place of the arithmetic differs from the definition, for any size up to two windows of all lanes.

    The reference is a plain enumeration of the definition, which shares the permutation of a list alone.
    """
    for rows in [*range(140), 257, 263]:
        assert in_blocks(rows) == enumerated(rows, KEY, 4, 8), rows


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 511, 512, 513, 1_023, 1_025, 2_053, 7_919])
def test_each_row_occurs_once_in_the_order_of_blocks(rows):
    """Fails when a row is left out or repeated with the blocks and lanes in use.

    The references are the range of rows, and the plain enumeration of the definition.
    """
    order = in_blocks(rows)
    assert sorted(order) == list(range(rows))
    assert order == enumerated(rows, KEY, order_module.BLOCK, order_module.MOST_LANES)


def test_places_of_a_very_large_section_are_rows_of_it():
    """Fails when a section of 2^40 rows, beyond the limit of single rows, has places that overflow or coincide."""
    rows = 2**40 - 12_345
    assert order_module.ORDERS["blocks"].most_rows >= rows > order_module.ORDERS["rows"].most_rows
    places = [0, 1, 1_023, 1_024, 2**20, 2**39 + 1, rows - 2, rows - 1]
    found = [shuffled_in_blocks(at, rows, KEY) for at in places]
    assert len(set(found)) == len(found) and all(0 <= row < rows for row in found)


def rows_of(store, layout="windows", seed=0):
    return training_rows([store], MEMBERS[layout](store=("s",), order="blocks"), length=8, seed=seed)


def order_of(rows, first, count):
    return [rows._place(index)[1] for index in range(first, first + count)]


@pytest.mark.parametrize("layout", ["windows", "packed"])
def test_epochs_and_seeds_have_orders_of_their_own(tmp_path, small, layout):
    """Fails when an epoch repeats a row or the order of another epoch or seed, or `order` is not read by a layout."""
    store = numbers_store(tmp_path / "store", [400, 3, 5, 9] * 3)
    count = rows_of(store, layout).rows
    orders = [order_of(rows_of(store, layout, seed), epoch * count, count) for seed in (0, 1) for epoch in range(3)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)
    assert orders[1] == enumerated(count, (1, 0, 0, 1), 4, 8)


def test_the_order_of_blocks_resumes_at_any_step(tmp_path, small):
    """Fails when a batch depends on those before it, here over the border of two epochs."""
    rows = rows_of(numbers_store(tmp_path / "store", [700]))
    read = list(itertools.islice(batches(rows, batch_size=8, host_rows=np.arange(8), first_step=0), 24))
    resumed = batches(rows_of(rows.sources[0].store), batch_size=8, host_rows=np.arange(8), first_step=9)
    for step in range(9, 24):
        np.testing.assert_array_equal(next(resumed).ids, read[step].ids)
    assert rows.rows < 24 * 8
    np.testing.assert_array_equal(batch_at(rows, 3, 8).ids, read[3].ids)


class Numbered:
    """Rows without contents, whose origin is their number."""

    def __init__(self, rows):
        self.rows = self.targets = rows

    def origin(self, row, epoch):
        return row


LANES, BATCH, PROCESSES = 64, 32, 16
ROW = 1_024  # bytes of 512 tokens; the last target is the token after them


@pytest.fixture(scope="module", params=[LANES * 1_024, LANES * 2_560, LANES * 2_560 + 12_345])
def epoch(request):
    """The rows of an epoch of 64 lanes, in order: one window per lane, and two with and without rows that are left."""
    rows = TrainingRows(Windows(order="blocks"), [Numbered(request.param)], [1], 512, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "MOST_LANES", LANES)
        return np.array([rows.origin(index) for index in range(request.param)])


def read_by(process, count):
    """The places of an epoch that a process reads: its part of each batch."""
    return np.flatnonzero(np.arange(count) % BATCH // (BATCH // PROCESSES) == process)


def test_processes_read_blocks_of_their_own(epoch):
    """Fails when two processes read a block that is not left over, or chunks of 64 KiB are read more than 1.2 times.

    Counted by arithmetic, for a process that keeps the chunks of its lanes' present windows alone.
    """
    block, count = order_module.BLOCK, len(epoch)
    readers, chunks = np.zeros(-(-count // block), int), 0
    for process in range(PROCESSES):
        places = read_by(process, count)
        rows, windows = epoch[places], np.minimum(places // LANES // (2 * block), count // LANES // (2 * block) - 1)
        readers[np.unique(rows // block)] += 1
        firsts, lasts = rows * ROW // CHUNK, (rows * ROW + ROW + 1) // CHUNK
        chunks += len({*zip(windows, firsts, strict=True), *zip(windows, lasts, strict=True)})
    left = count // block % LANES + (count % block > 0)
    assert readers.min() == 1 and np.count_nonzero(readers > 1) <= left
    assert 1 < chunks * CHUNK / (count * ROW) <= 1.2


def test_blocks_mix_a_store(epoch):
    """Fails when two rows of a block meet in a batch, or the place in an epoch tells the place in the store.

    The bounds are those of chance: for a random order of blocks, the correlation of both places is within four standard
    deviations, 4 / sqrt(blocks), of 0, and neighbours are a third of the store apart on average.
    """
    blocks, count = epoch // order_module.BLOCK, len(epoch)
    first_windows = blocks[: LANES * 2 * order_module.BLOCK].reshape(-1, BATCH)  # without blocks that are left over
    assert all(len(set(batch)) == BATCH for batch in first_windows.tolist())
    assert abs(np.corrcoef(epoch, np.arange(count))[0, 1]) < 4 / np.sqrt(blocks.max() + 1)
    assert 0.25 < np.abs(np.diff(epoch)).mean() / count < 0.42


def test_layouts_that_permute_rows_have_the_order():
    """Fails when a layout of independent rows lacks the option, or one of streams takes it without an effect."""
    having = {name for name, member in MEMBERS.items() if "order" in member.__dataclass_fields__}
    assert having == {name for name, member in MEMBERS.items() if issubclass(member, IndependentRows)}
    assert having == {"windows", "packed", "pairs", "spans"}
