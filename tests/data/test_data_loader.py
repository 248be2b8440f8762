"""Batches: the same for any number of processes and after any resume; validation counts every token once."""

import itertools
import time

import numpy as np
import pytest
from numbers_store import END, numbers_store
from toy_store import write_store

from jaxlm.data.config import MEMBERS, Packed, Windows
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, batches, describe_rows, row_origins
from jaxlm.data.rows import training_rows

FIELDS = ("ids", "targets", "positions", "segments", "weights")
BATCH = 8


def same(one, other):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    return True


def stacked(parts, host_rows):
    """The global batch from what the processes hold of it."""
    order = np.argsort(np.concatenate(host_rows))
    return type(parts[0])(*(np.concatenate([getattr(part, name) for part in parts])[order] for name in FIELDS))


@pytest.fixture(scope="module", params=["windows", "packed"])
def rows(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    stores = [
        numbers_store(folder / "one", {"a": rng.integers(1, 60, 40), "b": rng.integers(1, 60, 15)}),
        numbers_store(folder / "two", rng.integers(1, 200, 20)),
    ]
    data = MEMBERS[request.param](store=("one", "two"), weights=(1.0, 2.0))
    return training_rows(stores, data, length=24, seed=5)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_iteration_equals_random_access(rows, prefetch):
    """Threads that hand over batches out of order, or buffers that are used again, would fail."""
    stream = batches(rows, batch_size=BATCH, host_rows=np.arange(BATCH), first_step=0, prefetch=prefetch)
    read = list(itertools.islice(stream, 40))
    for step in reversed(range(40)):
        assert same(read[step], batch_at(rows, step, BATCH))
    for name, dtype in zip(FIELDS, [np.int32] * 4 + [np.float32], strict=True):
        assert getattr(read[0], name).shape == (BATCH, 24) and getattr(read[0], name).dtype == dtype
    assert same(batch_at(rows, 3, BATCH), rows.read(range(3 * BATCH, 4 * BATCH)))


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("dealt", ["in blocks", "strided"])
def test_global_batch_does_not_depend_on_the_processes(rows, processes, dealt):
    whole = np.arange(BATCH)
    host_rows = np.split(whole, processes) if dealt == "in blocks" else [whole[p::processes] for p in range(processes)]
    streams = [batches(rows, batch_size=BATCH, host_rows=mine, first_step=2) for mine in host_rows]
    for step in range(2, 8):
        assert same(stacked([next(stream) for stream in streams], host_rows), batch_at(rows, step, BATCH))


def test_resume_needs_the_step_alone(rows):
    first = batches(rows, batch_size=BATCH, host_rows=np.arange(BATCH), first_step=0)
    read = list(itertools.islice(first, 12))
    resumed = batches(rows, batch_size=BATCH, host_rows=np.arange(BATCH), first_step=7)
    for step in range(7, 12):
        assert same(next(resumed), read[step])


def test_resume_far_in_costs_nothing(rows):
    """A loader that seeks through what was read would not come back from step ten to the twelfth."""
    begin = time.perf_counter()
    batch = next(batches(rows, batch_size=BATCH, host_rows=np.arange(BATCH), first_step=10**12))
    assert time.perf_counter() - begin < 5
    assert same(batch, batch_at(rows, 10**12, BATCH))


def test_batches_are_read_ahead(rows, monkeypatch):
    asked = []
    read = type(rows).read
    monkeypatch.setattr(type(rows), "read", lambda self, indices: asked.append(indices[0]) or read(self, indices))
    stream = batches(rows, batch_size=BATCH, host_rows=np.arange(BATCH), first_step=0, prefetch=3)
    next(stream)
    deadline = time.monotonic() + 5
    while len(asked) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(asked) == [0, BATCH, 2 * BATCH, 3 * BATCH], "the one that was asked for and three more"


def test_rows_say_where_they_come_from(rows, request):
    begun = request.node.callspec.params["rows"] == "packed"  # by the id that ends documents
    origins = row_origins(rows, 4, BATCH)
    batch = batch_at(rows, 4, BATCH)
    for b, pieces in enumerate(origins):
        assert len(pieces) == batch.segments[b].max()
        assert sum(piece.tokens - (not begun) for piece in pieces) == batch.weights[b].sum()
    said = describe_rows(rows, 4, BATCH, most=2)
    first = origins[0][0]
    assert said.startswith("rows 32 to 39: ") and said.endswith(", and 6 more") and "\n" not in said
    assert f"{first.store} ({first.source}) document {first.document} token {first.token}" in said


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("tokens", [2, 9, 10, 11, 59, 60, 61])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_validation_predicts_every_token_once(tmp_path, end, tokens, batch_size):
    """For sizes around the borders of rows and batches; dropping the rest of a batch or a row would fail."""
    length = 10
    documents = [tokens - 1 - 2 * end, 1] if tokens > 3 else [tokens - end]
    store = numbers_store(tmp_path / "store", documents, end=end)
    assert store.num_tokens == tokens
    held_out = Windows().validation_rows(Reading([store], length=length, batch_size=batch_size))
    read = list(held_out)
    assert len(read) == len(held_out)
    ids, targets, weights, segments = (
        np.concatenate([getattr(batch, name) for batch in read]) for name in ("ids", "targets", "weights", "segments")
    )
    text = np.asarray(store.tokens, np.int32)
    np.testing.assert_array_equal(targets[weights > 0], text if end else text[1:])
    np.testing.assert_array_equal(ids[weights > 0], [END, *text[:-1]] if end else text[:-1])
    assert held_out.num_targets == weights.sum() == tokens - (not end)
    np.testing.assert_array_equal(segments > 0, weights > 0)
    assert len(ids) % batch_size == 0 and len(ids) - -(-held_out.num_targets // length) < batch_size
    assert not ids[segments == 0].any() and not targets[segments == 0].any()
    filled = read[0].segments[0] > 0
    np.testing.assert_array_equal(read[0].positions[0][filled], np.arange(filled.sum()))


def test_validation_over_stores_and_processes(tmp_path):
    stores = [numbers_store(tmp_path / str(k), lengths) for k, lengths in enumerate([[25, 3], [10], [47, 1, 1]])]
    whole = Windows().validation_rows(Reading(stores, length=10, batch_size=4))
    tokens = np.concatenate([np.asarray(store.tokens, np.int32) for store in stores])
    np.testing.assert_array_equal(np.concatenate([batch.targets[batch.weights > 0] for batch in whole]), tokens)
    # A store begins in a row of its own, after the id that ends documents.
    firsts = {int(store.tokens[0]) for store in stores}
    begins = [batch.ids[b, 0] for batch in whole for b in range(4) if batch.targets[b, 0] in firsts]
    assert begins == [END] * 3
    host_rows = [np.arange(0, 2), np.arange(2, 4)]
    halves = [Windows().validation_rows(Reading(stores, length=10, batch_size=4, host_rows=mine)) for mine in host_rows]
    assert len(halves[0]) == len(halves[1]) == len(whole), "each process takes part in every batch"
    for number, batch in enumerate(whole):
        assert same(stacked([half[number] for half in halves], host_rows), batch)
    assert same(whole[-1], whole[len(whole) - 1]) and len(whole[1:3]) == 2
    with pytest.raises(IndexError):
        whole[len(whole)]
    assert len(Windows().validation_rows(Reading([], length=10, batch_size=4))) == 0


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_validation_in_packed_rows_is_an_epoch_of_training(tmp_path, end, batch_size):
    """The same pieces of documents, apart, for any batch and number of processes. Fails on 2968321: windows always."""
    lengths = {"a": [25, 3, 0, 47, 1, 1, 9], "b": [12, 1]}
    stores = [numbers_store(tmp_path / "0", lengths, end=end), numbers_store(tmp_path / "1", [1, 1], end=end)]
    held_out = Packed().validation_rows(Reading(stores, length=10, batch_size=batch_size))
    read = list(held_out)
    kept = [store for store in stores if end or store.num_tokens > 2]  # documents of one token predict nothing
    rows = training_rows(kept, Packed(store=("0", "1")[: len(kept)]), length=10, seed=5)
    epoch = rows.read(range(sum(source.rows for source in rows.sources)))
    pieces = lambda batch: sorted(  # noqa: E731
        tuple(
            getattr(batch, name)[b, batch.segments[b] == segment].tolist() for name in ("ids", "targets", "positions")
        )
        for b in range(len(batch.ids))
        for segment in range(1, batch.segments[b].max() + 1)
    )
    whole = type(epoch)(*(np.concatenate([getattr(batch, name) for batch in read]) for name in FIELDS))
    assert pieces(whole) == pieces(epoch)
    first_tokens = 0 if end else sum(store.documents - np.sum(np.diff(store.document_starts) == 0) for store in stores)
    assert held_out.num_targets == whole.weights.sum() == sum(store.num_tokens for store in stores) - first_tokens
    np.testing.assert_array_equal(whole.segments > 0, whole.weights > 0)
    assert len(whole.ids) == -(-len(epoch.ids) // batch_size) * batch_size
    host_rows = [np.arange(batch_size)[p::3] for p in range(3)]
    parts = [
        Packed().validation_rows(Reading(stores, length=10, batch_size=batch_size, host_rows=mine))
        for mine in host_rows
    ]
    for number, batch in enumerate(read):
        assert same(stacked([part[number] for part in parts], host_rows), batch)


@pytest.mark.data
def test_books_come_back_from_batches(data_directory, tmp_path):
    """Real text through a published tokenizer, a store and the batches of both kinds, back to the text."""
    from jaxlm.text import tokenizer_from_spec

    tokenizer = tokenizer_from_spec(f"gpt2:{data_directory / 'vocab' / 'gpt2'}")
    file = min((data_directory / "books" / "valid").glob("*.txt"), key=lambda path: path.stat().st_size)
    text = file.read_text(encoding="utf-8")
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    store = write_store(tmp_path / "store", paragraphs, tokenizer)
    held_out = Windows().validation_rows(Reading([store], length=64, batch_size=16))
    targets = np.concatenate([batch.targets[batch.weights > 0] for batch in held_out])
    assert held_out.num_targets == store.num_tokens == len(targets)
    assert tokenizer.decode(targets.tolist()) == "".join(paragraphs)
    packed = training_rows([store], Packed(store=("store",)), length=1024, seed=0)
    whole = [(row, piece) for row in range(5) for piece in enumerate(packed.origin(row), start=1)]
    batch = packed.read(range(5))
    for row, (segment, origin) in whole:
        ids = batch.targets[row][batch.segments[row] == segment].tolist()
        if origin.token == 0 and ids[-1] == tokenizer.specials["end"]:
            assert tokenizer.decode(ids) == paragraphs[origin.document]
    assert any(origin.token == 0 for _, (_, origin) in whole)
