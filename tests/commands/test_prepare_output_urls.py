"""`prepare` with --output at a URL: the store has the bytes of a local one, whatever happens to processes and requests.

The reference is the store that one local process makes of the same sources. A stand-in for gs:// answers.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stand_in_cloud import inject, requests
from toy_store import contents
from toy_text import write_sources

from jaxlm import storage
from jaxlm.data import object_lock, preparation
from jaxlm.data.config import Windows
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, phased_rows
from jaxlm.data.object_lock import ObjectLock
from jaxlm.data.preparation import PrepareConfig, encode_part, prepare, prepare_store
from jaxlm.data.shards import make_shard
from jaxlm.data.store import open_store
from jaxlm.errors import InputError, RunError
from jaxlm.host import LockHeld

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
from jaxlm.data import object_lock
from jaxlm.errors import run_command
from jaxlm.prepare import main
object_lock.RENEWED = 0.2
run_command(main)
"""
STORE = "gs://bucket/stores/one"
TOKENIZERS = ["words:20", "train-wordpiece:70", "bytes"]  # words have spellings, WordPiece has sentences


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Dead processes are noticed soon, caches are the test's own, and few objects are composed at a time."""
    monkeypatch.setattr(object_lock, "RENEWED", 0.2)
    monkeypatch.setattr(object_lock, "WATCHED", 3.0)
    monkeypatch.setattr(storage, "COMPOSED", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path, monkeypatch, cloud):
    """Two sources of 12 units, and their store in the directory `whole`."""
    monkeypatch.chdir(tmp_path)
    (cloud / "bucket").mkdir()
    config = PrepareConfig(write_sources(), "words:20", STORE, workers=1, unit_bytes=5000)
    prepare(replace(config, output="whole"))
    return config


def in_bucket(cloud: Path, name: str = "stores/one") -> dict[str, bytes]:
    return contents(cloud / "bucket" / name)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_store_at_a_url_has_the_bytes_of_a_local_one(corpus, cloud, tokenizer):
    """Fails if offsets, numbers of words or checksums differ, if something is left over, or if a batch differs."""
    config = replace(corpus, tokenizer=tokenizer, weights=(2.0, 1.0))
    local = prepare(replace(config, output="local"))
    file = Path("folder/file").absolute()
    for output in (STORE, file.as_uri()):
        store = prepare(replace(config, output=output))
        assert store.place == output
    assert in_bucket(cloud) == contents(Path("local")) == contents(file)
    assert any("/composed/tokens/" in name for _, name, _ in requests(cloud)), "nothing was composed in two levels"
    remote = open_store(STORE)
    remote.verify()
    rows = [phased_rows(Windows(), Reading([store], length=32, batch_size=8, seed=1), 10) for store in (local, remote)]
    here, there = (batch_at(each, 3, 8) for each in rows)
    np.testing.assert_equal(dataclasses.asdict(there), dataclasses.asdict(here))


def test_requests_are_those_of_the_estimate(corpus, cloud, monkeypatch):
    """The reference is what the stand-in was asked for. Fails if an object is listed, or asked for, once too often."""
    monkeypatch.setattr(storage, "COMPOSED", 32)
    monkeypatch.setattr(object_lock, "RENEWED", 60.0)
    (cloud / "bucket/books").mkdir()
    for number in range(30):
        (cloud / f"bucket/books/{number}.txt").write_text("A text of its own.\n" * 100)
    config = replace(corpus, source=("text:gs://bucket/books/*.txt",), tokenizer="bytes", unit_bytes=1000)
    asked = prepare_store(**vars(replace(config, estimate=True)))["requests"]
    before = len(requests(cloud))
    prepare(config)
    found = [(method, name) for method, name, _ in requests(cloud)[before:]]
    lists = found.count(("GET", "bucket/o"))
    assert lists <= 10
    assert sum(method == "POST" for method, _ in found) == pytest.approx(asked["put"] + asked["compose"], rel=0.1)
    of_units = [name for method, name in found if method == "GET" and ("/books/" in name or "/shards/" in name)]
    rest = asked["get"] - 4 * 2  # without the tokenizer's two files, for two processes
    assert 0 <= len(of_units) - rest <= 20, "the command reads the estimate's sample of 8 units besides"


@pytest.mark.parametrize("fault", [{"fail": 30, "cut": 23}, {"drop": 37}], ids=["fail-cut", "drop"])
def test_failed_requests_change_nothing(corpus, cloud, fault):
    """Fails if an answer that is missing, short or repeated loses or doubles a part of the store."""
    inject(cloud, **fault)
    prepare(corpus)
    inject(cloud)
    assert in_bucket(cloud) == contents(Path("whole"))


def test_parts_and_workers_write_below_one_url(corpus, cloud, capsys):
    """Fails if a part or a worker process writes elsewhere, or if the join encodes again what parts have done."""
    for part in ("1/2", "0/2"):
        encode_part(replace(corpus, part=part, workers=2 if part == "0/2" else 1))
    assert not Path("gs:").exists()
    shards = list((cloud / "bucket/stores/one/partial/shards").glob("*.json"))
    prepare(corpus)
    assert f"continuing: {len(shards)} of {len(shards)} units are done" in capsys.readouterr().out
    assert in_bucket(cloud) == contents(Path("whole"))
    assert prepare(corpus).place == STORE and "complete already" in capsys.readouterr().out


def start(config: PrepareConfig) -> subprocess.Popen:
    words = [word for source in config.source for word in ("--source", source)]
    words += ["--tokenizer", config.tokenizer, "--output", config.output, "--unit-bytes", config.unit_bytes]
    command = [sys.executable, "-c", COMMAND, *words, "--workers", 1]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.005)


@pytest.mark.parametrize(
    "sign",
    ["partial/shards/2.json", "partial/joined/3.document_starts", "tokens.bin", "checksums.bin"],
    ids=lambda sign: Path(sign).stem,
)
def test_kill_9_at_any_moment_and_the_same_command_again(corpus, cloud, sign, capsys):
    """Fails if a kill while shards are encoded, joined or composed loses the store, or leaves a lock for ever."""
    store = cloud / "bucket/stores/one"
    inject(cloud, latency=0.05)
    process = start(corpus)
    wait_for((store / sign).exists, process)
    if "shards" in sign:
        with pytest.raises(InputError, match=rf"one/partial is in use by process {process.pid} on \S+ since 2.* UTC; "):
            prepare(corpus)
    process.send_signal(signal.SIGKILL)
    process.wait()
    inject(cloud)
    assert not (store / "description.json").exists()
    done = len(list(store.glob("partial/shards/*.json")))
    prepare(corpus)
    assert in_bucket(cloud) == contents(Path("whole"))
    assert f"continuing: {done} of " in capsys.readouterr().out, "finished shards were lost"


def test_a_kill_between_the_description_and_the_end(corpus, cloud, monkeypatch):
    """Fails if the store is made again, or its temporary objects stay for ever."""

    def killed(place):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "remove_tree", killed)
        prepare(corpus)
    assert "partial/plan.json" in in_bucket(cloud)
    prepare(corpus)
    assert in_bucket(cloud) == contents(Path("whole"))


def test_a_late_duplicate_of_a_shard_changes_nothing(corpus, cloud, monkeypatch):
    """Fails if a second worker that ends during the join, or after it, alters the store or leaves objects in it."""
    concatenate, works = storage.concatenate, []
    monkeypatch.setattr(preparation._Work, "check_complete", lambda work, _: works.append(work))

    def late(place, parts, scratch):
        shards = works[0].job()[0].shards
        storage.remove(f"{shards}/3.json")
        make_shard(*works[0].job(), 3, works[0].units[3])
        concatenate(place, parts, scratch)

    monkeypatch.setattr(storage, "concatenate", late)
    prepare(corpus)
    assert in_bucket(cloud) == contents(Path("whole"))
    storage.write(f"{STORE}/partial/shards/3.tokens", b"late")
    prepare(corpus)
    assert in_bucket(cloud) == contents(Path("whole"))


def test_arrays_of_other_arguments_are_removed(corpus, cloud):
    """Fails if a join that was given up leaves an array that the next store does not have."""
    storage.write(f"{STORE}/sentence_starts.bin", b"old")
    storage.write(f"{STORE}/tokens.bin", b"old")
    prepare(corpus)
    assert in_bucket(cloud) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("gs://closed/store", r"gs://closed/store cannot be reached: .*Forbidden.*; check its name and your access"),
        ("gs://fixed/store", r"gs://fixed/store/partial/lock cannot be reached: .*Forbidden.*your access to it"),
        ("gs://missing/store", r"gs://missing/store/partial/lock cannot be written: .*; make its bucket, or correct"),
        ("gs://bucket/object", r"must be new or a token store, got gs://bucket/object, a file; name another"),
        ("gs://bucket/object/a/b", r"below an object, got gs://bucket/object/a/b, but gs://bucket/object is one; name"),
        ("gs://bucket/other", r"must be new or a token store, got gs://bucket/other, a directory with other content"),
        ("gs://bucket/stores/one", r"gs://bucket/stores/one was made with --tokenizer words:20, not bytes; name"),
        ("gs://", r"a URL must be gs://BUCKET/NAME, s3://BUCKET/NAME or file:///NAME, got gs://"),
        ("ftp://bucket/a", r"a URL must be gs://BUCKET/NAME, s3://BUCKET/NAME or file:///NAME, got ftp://bucket/a"),
        ("gs:/bucket/a", r"--output must be a directory that does not exist yet, or a URL, got gs:/bucket/a"),
    ],
)
def test_bad_outputs_are_refused_in_one_line(corpus, cloud, output, said):
    """Fails if one is asked for ten minutes, ends with a traceback, or overwrites what is there."""
    storage.write("gs://bucket/object", b"")
    storage.write("gs://bucket/other/folder/text", b"")
    if output == STORE:
        prepare(corpus)
    before = in_bucket(cloud, "")
    with pytest.raises(InputError, match=said) as caught:
        prepare(replace(corpus, output=output, tokenizer="bytes"))
    assert "\n" not in str(caught.value) and in_bucket(cloud, "") == before


def test_a_refused_command_leaves_nothing_in_the_bucket(corpus, cloud):
    """Fails if the corrected command is refused for what a mistaken one left."""
    with pytest.raises(InputError, match=r"missing\.txt"):
        prepare(replace(corpus, tokenizer="wordpiece:missing.txt"))
    assert not in_bucket(cloud, "")


def test_what_shares_a_url_and_what_does_not(corpus, cloud):
    """Fails if the join runs beside a part, a part runs twice at once, or another part is refused."""
    with ObjectLock(f"{STORE}/partial/part-0-of-2.lock"):
        for call, config in ((prepare, corpus), (encode_part, replace(corpus, part="0/2"))):
            with pytest.raises(InputError, match=rf"in use by process {os.getpid()} on .*; wait for it or stop it"):
                call(config)
        encode_part(replace(corpus, part="1/2"))
    with ObjectLock(f"{STORE}/partial/lock"), pytest.raises(InputError, match="in use by process"):
        encode_part(replace(corpus, part="0/2"))
    assert not list(cloud.glob("bucket/stores/one/partial/*lock*"))


def test_a_lock_changes_hands(cloud, monkeypatch):
    """Fails if a living lock is taken, a dead one is kept, or a process that lost its own goes on."""
    place = "gs://bucket/lock"
    first = ObjectLock(place)
    with pytest.raises(LockHeld, match=f"process {os.getpid()} on"):
        ObjectLock(place)
    storage.write(place, b"another process, which then ends")
    first._thread.join(10)
    with pytest.raises(RunError, match="lock was replaced by another process"):
        first.check()
    first.close()
    assert storage.is_file(place), "it removed the lock of another process"
    monkeypatch.setattr(object_lock, "WATCHED", 1.0)
    with ObjectLock(place) as second:
        second.check()
        time.sleep(1.0)
        second.check()
    assert not storage.is_file(place)


def test_of_many_processes_one_takes_a_stale_lock(cloud, monkeypatch):
    """Fails if two hold the lock that both have found stale."""
    monkeypatch.setattr(object_lock, "WATCHED", 1.0)
    storage.write("gs://bucket/lock", b"stale")
    taken, refused = [], []

    def take():
        try:
            taken.append(ObjectLock("gs://bucket/lock"))
        except LockHeld as holder:
            refused.append(holder)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(1.0)
    holding = [lock for lock in taken if not lock._is_lost]
    assert len(holding) == 1 and len(taken) + len(refused) == 3
    holding[0].close()
