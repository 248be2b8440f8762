"""Rows through a step: their order, the sizes of batches, and what is reported meanwhile."""

import itertools

import jax
import numpy as np
import pytest

from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.inference.rows import RowStep, lines_of, longest_first, padded, run, run_batches


def rows_of(count):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 9, size=size).tolist() for size in rng.integers(1, 12, size=count)]


@jax.jit
def doubled(params, ids_BL):
    """The outputs keep the sharding of the rows: those of other devices have to be fetched too."""
    return (ids_BL * params,)


def form(made, shared=0):
    """Items are lists of rows. made: the sizes of the batches that are run."""

    def pad(lines, batch_size, length):
        made.append((len(lines), batch_size, length))
        return padded([sum(line, []) for line in lines], batch_size, length)

    def unpad(line, outputs, length):
        values = iter(outputs[0].tolist())
        return [list(itertools.islice(values, len(row))) for row in line]

    return RowStep(
        doubled,
        rows=lambda item: item,
        length=len,
        sizes=lambda lines: (max(sum(map(len, line)) for line in lines),),
        flops=float,
        pad=pad,
        unpad=unpad,
        shared=shared,
    )


def test_short_rows_share_lines_where_that_saves_tokens():
    """Fails when a row is lost or read twice, when a line is longer than it may be, and when few rows share."""
    lengths = [int(size) for size in np.random.default_rng(1).integers(4, 25, size=600)]
    lines = lines_of(lengths, 64, 32)
    totals = [sum(lengths[row] for row in line) for line in lines]
    assert sorted(row for line in lines for row in line) == list(range(600))
    assert max(totals) <= 64 and sum(totals) > 0.9 * 64 * len(lines)
    assert lines_of([90, 70, 5, 5, 5], 64, 2) == [[0], [1], [2, 4, 3]]  # longer rows have their own
    alone = [[row] for row in longest_first(lengths)]
    assert lines_of(lengths, 0, 32) == alone
    assert lines_of(lengths, 64, 600) == alone  # one batch: 64 tokens per line would not be fewer
    assert lines_of(lengths[:40], 64, 32) == [[row] for row in longest_first(lengths[:40])]


@pytest.mark.parametrize("shared", [0, 24], ids=["alone", "shared"])
@pytest.mark.parametrize("mesh", [MeshConfig(data=1), MeshConfig(data=2, fsdp=2, tensor=2)], ids=["one", "eight"])
def test_each_item_has_the_results_of_its_rows_in_order(mesh, shared):
    # Fails when rows are not put back in order, also across blocks, or when an item without rows takes another's.
    rows = iter(rows_of(60))
    items = [[next(rows) for _ in range(count % 4)] for count in range(30)]
    mesh = make_mesh(mesh, jax.devices()[: 1 if mesh.data == 1 else 8])
    found = list(run(form([], shared), np.int32(2), items, mesh=mesh, batch_size=8, block=17))
    assert [item for item, _ in found] == items
    assert [results for _, results in found] == [[[2 * i for i in row] for row in item] for item in items]


def test_rows_of_a_block_run_from_the_longest_to_the_shortest_and_are_reported():
    made, reported = [], []
    items = [[row] for row in rows_of(20)]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    blocks = run(form(made), np.int32(2), items, mesh=mesh, batch_size=4, block=12, report=reported.append)
    next(blocks)
    assert reported == [4, 8, 12]  # the second block has not begun
    assert len(list(blocks)) == 19
    assert reported == [4, 8, 12, 16, 20]
    assert [size for size, _, _ in made] == [4] * 5
    assert {length for _, _, length in made[:3]} == {max(len(row) for (row,) in items[:12])}  # one program


def test_a_batch_is_fetched_while_the_next_one_runs():
    events = []

    def step(params, batch):
        events.append(f"run {int(batch[0, 0])}")
        return batch

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    batches = ((key, np.full((1, 1), key)) for key in range(3))
    for key, outputs in run_batches(step, None, batches, mesh):
        assert isinstance(outputs, np.ndarray) and outputs.tolist() == [[key]]
        events.append(f"fetch {key}")
    assert events == ["run 0", "run 1", "fetch 0", "run 2", "fetch 1", "fetch 2"]
    assert not list(run_batches(step, None, [], mesh))


def test_equally_long_rows_keep_their_order():
    assert longest_first([3, 5, 3, 5, 1]) == [1, 3, 0, 2, 4]
