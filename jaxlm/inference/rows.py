"""Rows of different lengths through a compiled step: the one way from rows to their outputs.

Rows are sorted by length and split into batches, so that little padding is needed. Short rows may share a line of the
batch. Each batch is padded to one of a few sizes, as each size is a compiled program. The outputs are in the order of
the rows. Neither the other rows of a batch nor the batch size change an output beyond rounding.

Every process calls these functions with the same rows, and puts its own part of each batch onto its devices.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm.distributed.mesh import use_mesh, whole_to_devices

BATCHES_SORTED = 64  # batches of rows that are sorted by length together
# FLOPs in the time in which a program is compiled: 1.3 s on a CPU core for GPT-2 of 4 x 256, at 60 GFLOP/s. On
# accelerators, about a second at 100 TFLOP/s.
_CPU, _ACCELERATOR = 8e10, 1e14

Key = TypeVar("Key")
Sizes = tuple[int, ...]


def default_batch_size(batch_size: int, mesh: Mesh) -> int:
    """Return `batch_size`, rounded up to a multiple of the devices that share the rows of a batch."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // rows) * rows


@dataclass(frozen=True)
class RowStep:
    """A compiled step, and the form of the rows that it reads. An item, for example a text, has any number of rows.

    step: (params, batch) -> a tuple of arrays (B, …). rows: the rows of an item. length: the length of a row, by which
    rows are sorted. sizes: the least sizes that a batch of lines, the longest first, can be padded to; a line is a list
    of rows. flops: (*sizes) -> the FLOPs of a line that is padded to these. pad: (lines, B, *sizes) -> the batch,
    arrays (B, …). unpad: (line, its outputs, *sizes) -> the results of its rows. shared: the length up to which rows
    share a line; 0: each row has its own.
    """

    step: Callable[[Any, Any], tuple[Any, ...]]
    rows: Callable[[Any], Iterable[Any]]
    length: Callable[[Any], int]
    sizes: Callable[[Sequence[Any]], Sizes]
    flops: Callable[..., float]
    pad: Callable[..., Any]
    unpad: Callable[..., Iterable[Any]]
    shared: int = 0


def run(
    form: RowStep,
    params: Any,
    items: Iterable[Any],
    *,
    mesh: Mesh,
    batch_size: int,
    block: int,
    report: Callable[[int], None] | None = None,
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each item and the results of its rows, in order, for any number of items, `block` items at a time.

    report: called with the number of items that are done, after each batch.
    """
    program = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    source, sizes, before = iter(items), PaddedSizes(batch_size, form.flops, program), 0
    while some := list(itertools.islice(source, block)):
        rows_of_items = [list(form.rows(item)) for item in some]
        rows = list(itertools.chain.from_iterable(rows_of_items))
        found: dict[int, Any] = {}
        for (lines, size), outputs in run_batches(form.step, params, _batches(form, rows, sizes, batch_size), mesh):
            for number, line in enumerate(lines):
                of_line = [output[number] for output in outputs]
                found |= zip(line, form.unpad([rows[index] for index in line], of_line, *size), strict=True)
            if report is not None:
                report(before + len(some) * len(found) // len(rows))
        before += len(some)
        ready = (found[index] for index in range(len(rows)))
        for item, its_rows in zip(some, rows_of_items, strict=True):
            yield item, list(itertools.islice(ready, len(its_rows)))


def run_batches(
    step: Callable[[Any, Any], Any], params: Any, batches: Iterable[tuple[Key, Any]], mesh: Mesh
) -> Iterator[tuple[Key, Any]]:
    """Yield the outputs of each batch as NumPy arrays, with the key that came with the batch.

    batches: a key and arrays (B, …), equal on every process. A batch is fetched while the next one runs, so the devices
    hold two batches.
    """
    late: list[tuple[Key, Any]] = []
    for key, arrays in batches:
        with use_mesh(mesh):
            late.append((key, step(params, whole_to_devices(arrays, mesh))))
        if len(late) > 1:
            yield _fetched(*late.pop(0))
    if late:
        yield _fetched(*late.pop())


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of rows of these lengths, the longest row first, and equals in order."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def padded(rows: Sequence[Sequence[int]], batch_size: int, length: int) -> Any:
    """Return rows of integers as an array (batch_size, length), int32, padded with zeros."""
    values = np.zeros((batch_size, length), np.int32)
    for row, given in enumerate(rows):
        values[row, : len(given)] = given
    return values


def row_positions(batch_size: int, length: int) -> Any:
    """Return the positions of the tokens of each row, int32 (batch_size, length)."""
    return np.tile(np.arange(length, dtype=np.int32), (batch_size, 1))


class PaddedSizes:
    """The sizes of the batches of an evaluation, a block of batches at a time. Each size is a compiled program.

    Sizes are added while one more saves padding that is worth a program, by an estimate: as much as this block would
    save in each block so far. So a short evaluation has few programs, and a long one hardly pads. The choice depends on
    the batches only, so all processes choose the same sizes. rows: of a batch. flops(*sizes): those of a padded row.
    program: FLOPs that take as long as the compilation of a program.
    """

    def __init__(self, rows: int, flops: Callable[..., float], program: float) -> None:
        self._rows, self._flops, self._program, self._blocks = rows, flops, program, 0
        self._used: list[Sizes] = []

    def __call__(self, wanted: Sequence[Sizes]) -> list[Sizes]:
        """Return the sizes to pad each batch of a block to. wanted: the least sizes of each batch."""
        self._blocks += 1
        counts = Counter(wanted)
        largest = tuple(map(max, zip(*counts, strict=True)))
        if wanted and not any(_hold(used, largest) for used in self._used):
            self._used.append(largest)
        while counts:
            costs = {one: self._flops(*self._smallest(one)) for one in counts}
            own = {more: self._flops(*more) for more in counts}
            saved = {
                more: sum(n * max(costs[one] - own[more], 0) for one, n in counts.items() if _hold(more, one))
                for more in counts
            }
            best = max(saved, key=lambda more: saved[more])
            if self._rows * saved[best] * self._blocks <= self._program:
                break
            self._used.append(best)
        return [self._smallest(one) for one in wanted]

    def _smallest(self, wanted: Sizes) -> Sizes:
        return min((used for used in self._used if _hold(used, wanted)), key=lambda used: self._flops(*used))


def batch_length(length: int, longest: int) -> int:
    """Return the length that a batch is padded to: that of its longest row up to 16, then the smallest of 20, 24, 28,
    32, 40, 48, 56, 64, 80, … and `longest` that is at least as long.

    Rows are sorted by length, so short sentences, as those of BLiMP, are hardly padded. `PaddedSizes` chooses the
    lengths that are worth a program.
    """
    step = 1 if length <= 16 else 4
    while length > 8 * step and step > 1:
        step *= 2
    return min(-(-length // step) * step, longest)


def _batches(
    form: RowStep, rows: Sequence[Any], sizes: PaddedSizes, batch_size: int
) -> Iterator[tuple[tuple[list[list[int]], Sizes], Any]]:
    """Yield the lines of each batch, as indices of their rows, with their padded sizes, and the batch's arrays."""
    lines = lines_of([form.length(row) for row in rows], form.shared, batch_size)
    batches = [lines[start : start + batch_size] for start in range(0, len(lines), batch_size)]
    lined = [[[rows[index] for index in line] for line in batch] for batch in batches]
    chosen = sizes([form.sizes(batch) for batch in lined])
    for batch, given, size in zip(batches, lined, chosen, strict=True):
        yield (batch, size), form.pad(given, batch_size, *size)


def lines_of(lengths: Sequence[int], shared: int, batch_size: int) -> list[list[int]]:
    """Return the rows of each line of a batch, as indices of `lengths`, the longest line first.

    The longest row of a line is followed by the shortest rows that fit into `shared`. Each row has a line of its own
    if all rows fit into one batch, or if batches of one size would then have fewer tokens.
    """
    order = longest_first(lengths)
    alone = [[row] for row in order]
    if len(order) <= batch_size:
        return alone
    lines, last = list[list[int]](), len(order)
    for first, row in enumerate(order):
        if first >= last:
            break
        line, room = [row], shared - lengths[row]
        while last > first + 1 and lengths[order[last - 1]] <= room:
            last -= 1
            line.append(order[last])
            room -= lengths[order[last]]
        lines.append(line)
    tokens, tokens_alone = (
        -(-len(some) // batch_size) * max(sum(lengths[row] for row in line) for line in some) for some in (lines, alone)
    )
    return lines if tokens < tokens_alone else alone


def _fetched(key: Key, outputs: Any) -> tuple[Key, Any]:
    """Return the key, and the outputs as NumPy arrays of all rows, also of those on other processes."""
    replicated = jax.tree.map(
        lambda x: x if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True), outputs
    )
    return key, jax.tree.map(np.asarray, replicated)


def _hold(sizes: Sizes, wanted: Sizes) -> bool:
    return all(size >= least for size, least in zip(sizes, wanted, strict=True))
