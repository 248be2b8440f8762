"""Stores at URLs: what is read is what a store on a disk has, whatever fails. A stand-in for gs:// answers."""

import dataclasses
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from faults import HARMS, harm_file
from stand_in_cloud import inject, requests
from toy_text import paragraphs

from jaxlm.data import remote_store
from jaxlm.data.arrays import DamagedStore
from jaxlm.data.config import Packed, SentenceStreams, Streams, Windows
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, phased_rows
from jaxlm.data.preparation import prepare_store
from jaxlm.data.remote_store import BLOCK, Cache
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.progress import LOGGED

URL = "gs://bucket/stores/books"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A store of words with sentences, of more than two blocks of tokens."""
    folder = tmp_path_factory.mktemp("local")
    texts = paragraphs(400, seed=3)
    (folder / "text.txt").write_text("\n\n".join(texts * 30))
    store = folder / "books"
    kinds = {"tokenizer": "words:50", "sentences": "split"}
    prepare_store(f"lines:{folder}/text.txt", output=str(store), workers=1, messages=LOGGED, **kinds)
    return store


@pytest.fixture
def bucket(cloud, local):
    """The same store in a bucket: its folder there."""
    folder = cloud / "bucket" / "stores" / "books"
    shutil.copytree(local, folder)
    return folder


@pytest.fixture
def cache(tmp_path):
    return Cache(str(tmp_path / "cache"))


def blocks(cache: Cache) -> list[Path]:
    return sorted(cache.path.rglob("parts/*"))


def test_every_way_of_reading_gives_what_a_local_store_has(local, bucket, cache):
    """Compared with the memory-mapped store. Fails if a block is off by one, or an index is taken from a wrong one."""
    here, there = open_store(local), open_store(URL, cache)
    assert there.place == URL and there.fingerprint == here.fingerprint
    size, each = here.num_tokens, BLOCK // 2
    assert size > 2 * each, "the test needs three blocks"
    mask = np.zeros(size, bool)
    mask[[0, each - 1, each, size - 1]] = True
    keys = [0, -1, each, slice(0, 5), slice(each - 3, each + 3), slice(size - 2, size + 9), slice(7, 7), slice(9, 4)]
    keys += [slice(None, None, 1000), np.array([[size - 1, 0], [each, each - 1]]), [3, -2], mask, slice(None)]
    for key in keys:
        assert np.array_equal(there.tokens[key], here.tokens[key]), key
        assert there.tokens[key].dtype == here.tokens[key].dtype
    for wrong in (size, -size - 1, np.array([size])):
        with pytest.raises(IndexError):
            there.tokens[wrong]
    assert np.array_equal(there.document_starts, here.document_starts)
    assert np.array_equal(there.word_ids(each - 50, each + 50), here.word_ids(each - 50, each + 50))
    assert there.text(0, 100) == here.text(0, 100)
    assert there.unigram_entropy() == here.unigram_entropy()
    there.verify()


@pytest.mark.parametrize("data", [Windows(), Packed(), Streams(), SentenceStreams()], ids=lambda data: data.layout)
@pytest.mark.parametrize("fault", [{}, {"fail": 9, "cut": 5}], ids=["healthy", "faulty"])
def test_batches_are_those_of_a_local_store(local, bucket, cloud, cache, data, fault):
    """Fails if a layout reads otherwise from a URL, or if a missing or a short answer reaches a batch."""
    inject(cloud, **fault)
    rows = [
        phased_rows(data, Reading([store], length=32, batch_size=8, seed=1), 10)
        for store in (open_store(local), open_store(URL, cache))
    ]
    for step in (0, 1, 7):
        here, there = (batch_at(each, step, 8) for each in rows)
        np.testing.assert_equal(dataclasses.asdict(there), dataclasses.asdict(here))


def test_a_second_run_reads_from_the_cache(bucket, cloud, cache):
    """Fails if blocks are fetched again, or if those of another store at the same URL are taken."""
    first = np.asarray(open_store(URL, cache).tokens)
    before = len(requests(cloud))
    assert np.array_equal(open_store(URL, cache).tokens, first)
    assert not [name for _, name, _ in requests(cloud)[before:] if name.endswith("tokens.bin")]
    again = bucket / "description.json"
    again.write_bytes(again.read_bytes())  # another version of the object
    np.asarray(open_store(URL, cache).tokens)
    assert [name for _, name, _ in requests(cloud)[before:] if name.endswith("tokens.bin")]


@pytest.mark.parametrize("harm", HARMS)
def test_an_altered_cache_file_is_fetched_again(local, bucket, cache, harm):
    """Fails if training reads what a disk error or another program left in the cache, or waits for a pipe."""
    whole = np.asarray(open_store(URL, cache).tokens)
    for file in blocks(cache):
        harm_file(file, harm)
    assert np.array_equal(open_store(URL, cache).tokens, whole)
    assert np.array_equal(whole, open_store(local).tokens)


@pytest.mark.parametrize("harm", HARMS)
def test_an_altered_copy_of_a_small_file_is_fetched_again(local, bucket, cache, harm):
    """Fails if a damaged description, checksum or vocabulary in the cache is read, refused, or waited for."""
    folder = open_store(URL, cache).path
    copies = [file for file in folder.rglob("*") if file.is_file() and file.parent.name != "parts"]
    assert {"description.json", "checksums.bin", "tokenizer_description.json"} <= {file.name for file in copies}
    for file in copies:
        content = file.read_bytes()
        harm_file(file, harm)
        assert open_store(URL, cache).tokenizer().fingerprint == open_store(local).tokenizer_fingerprint
        assert file.read_bytes() == content, file


def test_the_cache_stays_within_its_size(bucket, cache, monkeypatch):
    """Fails if the directory grows beyond --data.cache-size, or if what was removed cannot be read again."""
    monkeypatch.setattr(remote_store, "HELD", BLOCK)
    small = Cache(cache.directory, 2 * BLOCK)
    store = open_store(URL, small)
    wanted = np.asarray(open_store(bucket).tokens)
    for begin in [*range(0, len(wanted), 10_000)] * 2:
        assert np.array_equal(store.tokens[begin : begin + 10], wanted[begin : begin + 10])
        assert sum(file.stat().st_size for file in blocks(small)) <= 2 * BLOCK


def test_a_full_disk_keeps_nothing_and_reads_on(bucket, cache, monkeypatch):
    """Fails if a cache that cannot be written ends a run."""

    def full(*_):
        raise OSError(28, "No space left on device")

    store = open_store(URL, cache)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert np.array_equal(store.tokens, open_store(bucket).tokens)
    assert not blocks(cache)


def test_objects_that_are_missing_or_altered_are_named(bucket, cache):
    """Fails if a run trains on them, or if the message does not name the object."""
    tokens = bucket / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[BLOCK + 5] ^= 1
    tokens.write_bytes(content)
    store = open_store(URL, cache)
    assert len(store.tokens[:10]) == 10
    with pytest.raises(DamagedStore, match=rf"{URL}/tokens\.bin is damaged in bytes {BLOCK:,} to .* \(wrong check"):
        store.tokens[BLOCK // 2 + 1]
    tokens.unlink()
    with pytest.raises(DamagedStore, match=rf"{URL}/tokens\.bin is missing"):
        store.tokens[-1]
    with pytest.raises(InputError, match=rf"{URL}/tokens\.bin is missing, but description\.json says"):
        open_store(URL, cache)
    with pytest.raises(InputError, match=r"gs://bucket/none: no such token store: it has no description\.json"):
        open_store("gs://bucket/none", cache)
    (bucket / "checksums.bin").unlink()
    tokens.write_bytes(content)
    with pytest.raises(InputError, match=r"has no checksums\.bin, as an earlier version made it; copy it to a disk"):
        np.asarray(open_store(URL, Cache(cache.directory + "-new")).tokens)


def test_rows_wait_for_their_answers_together(bucket, cloud, cache, local):
    """Fails if the rows of a batch are read one after the other: with 0.2 s for each request, 16 rows take 3 s."""
    store = open_store(URL, cache)
    rows = phased_rows(Windows(), Reading([store], length=32, batch_size=16, seed=1), 10)
    inject(cloud, latency=0.2)
    before, began = len(requests(cloud)), time.monotonic()
    batch_at(rows, 0, 16)
    made = [name for _, name, _ in requests(cloud)[before:] if name.endswith("tokens.bin")]
    assert len(made) > 1 and time.monotonic() - began < 2
