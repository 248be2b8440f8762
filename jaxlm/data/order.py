"""Orders of the rows of an epoch: the row at a place is a function of the place, the number of rows and a key.

`rows` permutes single rows. `blocks` permutes blocks of BLOCK consecutive rows and deals them to lanes, the largest
power of two up to MOST_LANES that leaves each lane a block. Place p of an epoch is place p // lanes of lane
p % lanes. The rows of the blocks that are left, fewer than one per lane, and of the last block, which is not full, are
cut into one piece per lane, which follows the lane's blocks; fewer rows than lanes remain and come last. A lane is
permuted within windows of two blocks, the last of which may be longer. If the number of rows of a batch divides the
number of lanes, row b of all batches of an epoch is from the same lanes, so that a process reads blocks of its own.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from grain.experimental import index_shuffle

Key = tuple[int, ...]

# Two neighbouring blocks of 256 rows: the last target of a row of text is the token after it, so 256 rows of 1 KiB lie
# in five chunks of 64 KiB, and 512 rows in nine.
BLOCK = 512
MOST_LANES = 1024

_SHUFFLE_ROUNDS = 4
# Up to this many rows, the order of an epoch is a list: Grain's permutation walks a cycle of 65,536 even for a few
# rows, which takes 2 ms for an index of 12 rows.
_LISTED_ROWS = 1 << 14
_MOST_SHUFFLED = 1 << 31  # Grain's permutation is limited to 32 bits


def shuffled(at: int, rows: int, key: Key) -> int:
    """Return the `at`-th of `rows` indices in the order derived from `key`."""
    if rows <= _LISTED_ROWS:
        return int(_order(rows, key)[at])
    return index_shuffle(at, max_index=rows - 1, seed=_seed32(key), rounds=_SHUFFLE_ROUNDS)


def shuffled_in_blocks(at: int, rows: int, key: Key) -> int:
    """Return the `at`-th of `rows` indices in the order of blocks derived from `key`; see the module."""
    blocks = rows // BLOCK
    lanes = min(MOST_LANES, 1 << max(blocks, 1).bit_length() - 1)
    dealt, of_lane = blocks // lanes * BLOCK, rows // lanes  # rows of a lane: of its whole blocks, and all
    place, lane = divmod(at, lanes)
    size = 2 * BLOCK
    if place == of_lane:
        dealt_row = lanes * of_lane + _in_window(lane, rows % lanes, (*key, lanes, 0))
    else:
        window = min(place // size, max(1, of_lane // size) - 1)
        first = window * size
        end = first + size if first + 2 * size <= of_lane else of_lane
        place = first + _in_window(place - first, end - first, (*key, lane, window))
        if place < dealt:
            dealt_row = (place // BLOCK * lanes + lane) * BLOCK + place % BLOCK
        else:
            dealt_row = lanes * dealt + lane * (of_lane - dealt) + place - dealt
    block, row = divmod(dealt_row, BLOCK)
    return (shuffled(block, blocks, key) if block < blocks else block) * BLOCK + row


class Order(NamedTuple):
    """Order of the rows of an epoch. row_at: its function of place, number of rows and key. most_rows: their limit."""

    row_at: Callable[[int, int, Key], int]
    most_rows: int


# By the value of data.order.
ORDERS = {
    "rows": Order(shuffled, _MOST_SHUFFLED),
    "blocks": Order(shuffled_in_blocks, _MOST_SHUFFLED * BLOCK),
}


def _permutation(rows: int, key: Key) -> np.ndarray:
    return np.argsort(np.random.SeedSequence(key).generate_state(rows, np.uint64), kind="stable").astype(np.uint16)


_order = functools.lru_cache(maxsize=512)(_permutation)
# One window of each lane of 16 sections, 32 MB. Making one takes 0.1 ms.
_window_order = functools.lru_cache(maxsize=16 * MOST_LANES)(_permutation)


def _in_window(at: int, rows: int, key: Key) -> int:
    return int(_window_order(rows, key)[at])


@functools.lru_cache(maxsize=4096)
def _seed32(key: Key) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])
