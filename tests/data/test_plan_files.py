"""Plans in files: the rows are those of plans in memory, made once, and refused when they were altered.

Fails when a plan is taken for that of another store, section or option, or when a killed process leaves its files.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pair_store import pair_store
from paths import REPOSITORY

from jaxlm.data import plan_files
from jaxlm.data.arrays import DamagedStore
from jaxlm.data.layouts.packed import Packed
from jaxlm.data.layouts.pairs import SentencePairs
from jaxlm.data.remote_store import Cache
from jaxlm.data.store import open_store

LAYOUTS = [(Packed(), 16), (SentencePairs(), 24)]


@pytest.fixture
def store(tmp_path):
    """Two sections of 40 documents, of up to five sentences each."""
    rng = np.random.default_rng(0)
    documents = {name: [rng.integers(1, 9, rng.integers(1, 6)).tolist() for _ in range(40)] for name in "ab"}
    return pair_store(tmp_path / "store", documents).path


@pytest.fixture
def in_files(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_files, "KEPT_FROM", 1)
    monkeypatch.setattr(plan_files, "user_cache", lambda: tmp_path / "cache")


def rows_of(path: Path | str, layout, length: int, cache: Cache | None = None) -> list[np.ndarray]:
    """All arrays of all rows of an epoch."""
    found = []
    for source in layout.sources([open_store(path, cache)], length=length, seed=0):
        batch = layout.empty(source.rows, length, [source])
        for row in range(source.rows):
            source.fill(row, batch, row, 0)
        found += [getattr(batch, name) for name in batch.__dataclass_fields__ if getattr(batch, name) is not None]
    return found


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("layout", "length"), LAYOUTS)
def test_rows_are_those_of_a_plan_in_memory_and_it_is_made_once(store, layout, length, monkeypatch, request):
    expected = rows_of(store, layout, length)
    assert not (store / "plans").exists()
    request.getfixturevalue("in_files")
    assert_same(rows_of(store, layout, length), expected)
    folders = sorted((store / "plans").iterdir())
    assert len(folders) == 2, "one per section"
    monkeypatch.setattr(plan_files, "_write", None)  # making one would fail
    assert_same(rows_of(store, layout, length), expected)
    assert sorted((store / "plans").iterdir()) == folders


def test_other_options_have_a_plan_of_their_own(store, in_files):
    for layout, length in [*LAYOUTS, (Packed(), 17), (SentencePairs(chunks="whole"), 24)]:
        rows_of(store, layout, length)
    assert len(list((store / "plans").iterdir())) == 8


def test_an_altered_plan_is_refused_by_name_and_made_again_after_its_removal(store, in_files):
    expected = rows_of(store, Packed(), 16)
    for folder in (store / "plans").iterdir():
        array = bytearray((folder / "starts.bin").read_bytes())
        array[8] ^= 1
        (folder / "starts.bin").write_bytes(array)
    with pytest.raises(
        DamagedStore, match=r"plans/packed-\w+/starts.bin is damaged .*; delete .*packed-\w+, and it is"
    ):
        rows_of(store, Packed(), 16)
    for folder in (store / "plans").iterdir():
        (folder / "plan.json").unlink()  # as a removal that was cut short
    assert_same(rows_of(store, Packed(), 16), expected)


def test_a_folder_that_cannot_be_written_leaves_the_plan_to_the_cache(store, in_files, tmp_path):
    (store / "plans").write_text("in the way, for root too")
    expected = rows_of(store, Packed(), 16)
    assert len(list((tmp_path / "cache" / "plans").iterdir())) == 2
    assert_same(rows_of(store, Packed(), 16), expected)


def test_the_plan_of_a_store_at_a_url_is_made_once_for_all_machines(store, tmp_path, cloud, monkeypatch, request):
    """The reference is the local store. Fails if another machine makes the plan again, or a bucket must be written."""
    expected = rows_of(store, Packed(), 16)
    request.getfixturevalue("in_files")
    for bucket in ("bucket", "fixed"):
        shutil.copytree(store, cloud / bucket / "store")

    def rows(bucket: str, machine: str) -> list[np.ndarray]:
        return rows_of(f"gs://{bucket}/store", Packed(), 16, Cache(str(tmp_path / machine)))

    assert_same(rows("fixed", "one"), expected)
    assert not (cloud / "fixed/store/plans").exists()
    assert_same(rows("bucket", "two"), expected)
    sent = sorted(path.name for path in (cloud / "bucket/store/plans").glob("*/*"))
    arrays = [f"{name}.{kind}" for name in ("full_starts", "starts") for kind in ("bin", "crc.npy")]
    assert sent == sorted(["plan.json", "sender", *arrays] * 2)
    with monkeypatch.context() as patch:
        patch.setattr(plan_files, "_write", None)  # making one would fail
        assert_same(rows("bucket", "three"), expected)
    for file in (cloud / "bucket/store/plans").glob("*/plan.json"):
        file.unlink()  # as a sender that was killed leaves it
    assert_same(rows("bucket", "four"), expected)
    assert not list((cloud / "bucket/store/plans").glob("*/plan.json")), "it may still be at work"
    monkeypatch.setattr(plan_files, "_SENT_WITHIN", 0.0)
    assert_same(rows("bucket", "five"), expected)
    for file in (cloud / "bucket/store/plans").glob("*/plan.json"):
        file.with_name("starts.bin").unlink()  # as a removal that was cut short
    assert_same(rows("bucket", "six"), expected)


def test_what_a_killed_process_left_is_removed(store, in_files):
    program = f"""
import os, signal
from pathlib import Path
from jaxlm.data import plan_files
from jaxlm.data.layouts.packed import Packed
from jaxlm.data.remote_store import Cache
from jaxlm.data.store import open_store
plan_files.KEPT_FROM = 1
plan_files.write_json = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
Packed().sources([open_store({str(store)!r})], length=16, seed=0)"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == -signal.SIGKILL
    (left,) = (store / "plans").iterdir()
    assert left.name.startswith(".packed-")
    rows_of(store, Packed(), 16)
    assert not [folder for folder in (store / "plans").iterdir() if folder.name.startswith(".")]
