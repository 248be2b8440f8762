"""Streams: row b of a batch goes on from row b of the batch before, for any sizes, processes and epochs."""

import dataclasses
import itertools

import numpy as np
import pytest
from numbers_store import END, numbers_store

from jaxlm.data.config import Streams, Windows, check_order
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, batches, describe_rows, phased_rows, phases, row_origins
from jaxlm.data.streams import StreamRows
from jaxlm.errors import InputError

FIELDS = ("ids", "targets", "positions", "segments", "weights", "begins")


def text_of(stores):
    return np.concatenate([np.asarray(store.tokens, np.int32) for store in stores])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Three stores, one of two sections, with documents of 0 to 40 tokens."""
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    sections = {"a": rng.integers(0, 40, 9).tolist(), "b": rng.integers(1, 30, 5).tolist()}
    return [
        numbers_store(folder / "one", sections),
        numbers_store(folder / "two", [3, 1]),
        numbers_store(folder / "three", rng.integers(1, 60, 11).tolist()),
    ]


def cases(count=40):
    """Random choices of stores, batch sizes and lengths for which there is a row of each stream."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 21))


def same(one, other):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    return True


def test_each_row_goes_on_where_the_one_before_ended(stores):
    """Fails when a stream skips or repeats a token, its targets are not the following tokens, or an epoch differs."""
    for number, batch_size, length in cases():
        text = text_of(stores[:number])
        rows = StreamRows(stores[:number], length, batch_size)
        stream = (len(text) - 1) // batch_size
        steps = rows.windows.per_epoch
        assert steps == stream // length and rows.rows == steps * batch_size
        assert rows.unused == len(text) - 1 - steps * length * batch_size < batch_size * (length + 1)
        epochs = [[batch_at(rows, epoch * steps + step, batch_size) for step in range(steps)] for epoch in (0, 1, 5)]
        for b in range(batch_size):
            inputs, targets = (
                np.concatenate([getattr(batch, name)[b] for batch in epochs[0]]) for name in ("ids", "targets")
            )
            np.testing.assert_array_equal(inputs, text[b * stream :][: steps * length])
            np.testing.assert_array_equal(targets, text[b * stream + 1 :][: steps * length])
        for epoch in epochs:
            for step, batch in enumerate(epoch):
                assert same(batch, epochs[0][step])
                np.testing.assert_array_equal(batch.begins, [step == 0] * batch_size)
                assert batch.begins.dtype == bool and (batch.weights == 1).all() and (batch.segments == 1).all()
                np.testing.assert_array_equal(batch.positions, np.tile(np.arange(length), (batch_size, 1)))


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("dealt", ["in blocks", "strided"])
def test_global_batch_does_not_depend_on_the_processes(stores, processes, dealt):
    whole = np.arange(8)
    host_rows = np.split(whole, processes) if dealt == "in blocks" else [whole[p::processes] for p in range(processes)]
    rows = phased_rows(Streams(), Reading(stores, length=5, seed=0, batch_size=8), 100)
    parts = [batches(rows, batch_size=8, host_rows=mine, first_step=3) for mine in host_rows]
    order = np.argsort(np.concatenate(host_rows))
    for step in range(3, 30):
        read = [next(part) for part in parts]
        found = {name: np.concatenate([getattr(batch, name) for batch in read])[order] for name in FIELDS}
        assert same(type(read[0])(**found), batch_at(rows, step, 8))


def test_any_step_is_had_at_once(stores):
    rows = phased_rows(Streams(), Reading(stores, length=7, seed=0, batch_size=4), 10)
    steps = rows.rows[0].windows.per_epoch
    first = batches(rows, batch_size=4, host_rows=np.arange(4), first_step=0)
    read = list(itertools.islice(first, 2 * steps + 3))
    assert [bool(batch.begins.all()) for batch in read] == [step % steps == 0 for step in range(len(read))]
    resumed = batches(rows, batch_size=4, host_rows=np.arange(4), first_step=steps - 1)
    for step in range(steps - 1, 2 * steps + 3):
        assert same(next(resumed), read[step])
    assert same(batch_at(rows, 10**12 * steps + 2, 4), read[2])


def test_carries_are_emptied_by_index(stores):
    """Fails when the drawn rows depend on the processes, the first step or the epoch alone, or a token differs."""
    sizes = {"length": 5, "batch_size": 8}
    plain = phased_rows(Streams(), Reading(stores, seed=0, **sizes), 100)
    rows = phased_rows(Streams(reset_probability=0.25), Reading(stores, seed=0, **sizes), 100)
    steps = rows.rows[0].windows.per_epoch
    read = [batch_at(rows, step, 8) for step in range(40 * steps)]
    for step, batch in enumerate(read):
        expected = batch_at(plain, step, 8)
        assert batch.begins.dtype == bool and (batch.begins | ~expected.begins).all()
        assert same(dataclasses.replace(batch, begins=expected.begins), expected)
    drawn = np.array([batch.begins for step, batch in enumerate(read) if step % steps])
    assert drawn.mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / drawn.size) ** 0.5)
    epochs = drawn.reshape(40, -1)
    assert len(np.unique(epochs, axis=0)) == 40 and drawn.any(axis=0).all()
    parts = [batches(rows, batch_size=8, host_rows=mine, first_step=steps + 1) for mine in np.split(np.arange(8), 2)]
    for step in range(steps + 1, 3 * steps):
        np.testing.assert_array_equal(np.concatenate([next(part).begins for part in parts]), read[step].begins)
    other = phased_rows(Streams(reset_probability=0.25), Reading(stores, seed=1, **sizes), 100)
    assert any((batch_at(other, step, 8).begins != read[step].begins).any() for step in range(steps))
    always = phased_rows(Streams(reset_probability=1.0), Reading(stores, seed=0, **sizes), 100)
    assert batch_at(always, 1, 8).begins.all()


def test_steps_of_epochs(stores):
    sizes = {"length": 7, "batch_size": 4}
    steps = (len(text_of(stores)) - 1) // 4 // 7
    for epochs, expected in ((1, steps), (3, 3 * steps), (1.5, -(-3 * steps // 2)), (1e-6, 1)):
        assert Streams().steps_of_passes(Reading(stores, **sizes), epochs) == expected
    assert Streams().rows(Reading(stores, **sizes)).rows == 4 * steps
    assert [phase.length for phase in phases(Streams(), length=7, num_steps=10)] == [7]


def test_rows_say_where_they_come_from(stores):
    """Fails when an origin is not that of its tokens, also where a row goes from one section or store to the next."""
    by_path = {str(store.path): store for store in stores}
    rows = phased_rows(Streams(), Reading(stores, length=9, seed=0, batch_size=3), 10)
    several = 0
    for step in range(rows.rows[0].windows.per_epoch):
        batch, origins = batch_at(rows, step, 3), row_origins(rows, step, 3)
        for b, pieces in enumerate(origins):
            found = []
            for piece in pieces:
                store = by_path[piece.store]
                start = int(store.document_starts[piece.document]) + piece.token
                found += store.tokens[start : start + piece.tokens].tolist()
                names = [section.source for section in store.sections if section.first_document <= piece.document]
                assert piece.source == names[-1]
            assert found == [*batch.ids[b], batch.targets[b, -1]]
            several += len(pieces) > 1
        assert describe_rows(rows, step, 3).startswith(f"rows {3 * step} to {3 * step + 2}: ")
    assert several
    unused = rows.rows[0].unused
    assert rows.rows[0].description().startswith("3 streams of ") and f" {unused} tokens" in rows.rows[0].description()


def test_text_that_is_too_short_is_refused(stores, tmp_path):
    tokens = stores[1].num_tokens
    assert tokens == 6
    StreamRows(stores[1:2], 1, 5), StreamRows(stores[1:2], 5, 1), StreamRows(stores[1:2], 2, 2)
    with pytest.raises(InputError, match=r"batch_size must be at most 2 for streams of 6 tokens in rows of 2, got 3"):
        Streams().rows(Reading(stores[1:2], length=2, batch_size=3))
    with pytest.raises(InputError, match=r"length must be at most 5 for streams of 6 tokens in rows of 6, got 6"):
        phased_rows(Streams(), Reading(stores[1:2], length=6, seed=0, batch_size=1), 1)


def test_a_mixture_is_refused_and_that_of_the_preparation_is_not_used(stores, tmp_path):
    weighted = numbers_store(tmp_path / "weighted", {"a": [9], "b": [9]}, weights=(1.0, 2.0))
    assert StreamRows([weighted], 2, 3).description().endswith("; the weights given at preparation are not used")
    assert "weights" not in StreamRows(stores, 2, 3).description()
    with pytest.raises(InputError, match="data.weights must be left out with data.layout streams, got 1.0 2.0"):
        Streams(store=("a", "b"), weights=(1.0, 2.0)).check()
    Streams(store=("a", "b")).check()


def test_the_version_is_recorded():
    saved = {"data": {"layout": "streams"}, "fingerprints": {"data_order": Streams.data_order}}
    check_order(saved, "run")
    with pytest.raises(InputError, match="data_order must be 1 for data.layout streams, got 2"):
        check_order(saved | {"fingerprints": {"data_order": 2}}, "run")


@pytest.mark.parametrize("end", [True, False])
def test_validation_predicts_every_token_once_in_streams(tmp_path, end):
    """For any sizes: each token once, in the order of its stream, and a state is empty in the first batch alone."""
    rng = np.random.default_rng(2)
    for case, (number, batch_size, length) in enumerate(cases(30)):
        made = [
            numbers_store(tmp_path / f"{case}-{k}", rng.integers(1, 25, rng.integers(1, 4)).tolist(), end=end)
            for k in range(number)
        ]
        text = text_of(made)
        held_out = Streams().validation_rows(Reading(made, length=length, batch_size=batch_size))
        read = list(held_out)
        assert len(read) == len(held_out) and held_out.num_targets == len(text) - (not end)
        if not held_out.num_targets:  # a text of one token
            assert not read
            continue
        ids, targets, weights, segments = (
            np.concatenate([getattr(batch, name) for batch in read], axis=1)
            for name in ("ids", "targets", "weights", "segments")
        )
        # Row by row, the streams are the text: their padding, at their ends, weighs nothing.
        np.testing.assert_array_equal(targets[weights > 0], text if end else text[1:])
        np.testing.assert_array_equal(ids[weights > 0], [END, *text[:-1]] if end else text[:-1])
        np.testing.assert_array_equal(segments > 0, weights > 0)
        assert (np.diff(weights, axis=1) <= 0).all()
        assert weights.sum(axis=1).max() == -(-held_out.num_targets // batch_size)
        assert not ids[segments == 0].any() and not targets[segments == 0].any()
        for step, batch in enumerate(read):
            assert batch.ids.shape == (batch_size, length)
            np.testing.assert_array_equal(batch.begins, [step == 0] * batch_size)


def test_validation_in_streams_over_processes(stores):
    whole = Streams().validation_rows(Reading(stores, length=6, batch_size=5))
    host_rows = [np.array([0, 3]), np.array([4]), np.array([1, 2])]
    parts = [Streams().validation_rows(Reading(stores, length=6, batch_size=5, host_rows=mine)) for mine in host_rows]
    for step, expected in enumerate(whole):
        for mine, part in zip(host_rows, parts, strict=True):
            assert same(part[step], type(expected)(**{name: getattr(expected, name)[mine] for name in FIELDS}))
    assert len(Streams().validation_rows(Reading([], length=6, batch_size=5))) == 0


def test_other_layouts_have_no_beginnings(stores):
    """Fails when a batch of another layout has a leaf more, which would be another compiled program."""
    batch = Windows().validation_rows(Reading(stores, length=6, batch_size=5))[0]
    more = ("mask_seeds", "source", "source_segments", "index", "characters", "backward")
    assert [field.name for field in dataclasses.fields(batch)] == [*FIELDS, *more]
    assert all(getattr(batch, name) is None for name in ("begins", *more))
