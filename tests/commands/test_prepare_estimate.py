"""jaxlm.prepare --estimate: it agrees with the preparation that it is an estimate of, and writes nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy_text import write_sources

from jaxlm.data.estimate import requests
from jaxlm.data.preparation import PrepareConfig, prepare, prepare_store
from jaxlm.data.sources import Slice, Unit
from jaxlm.errors import InputError
from jaxlm.storage import Entry

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two sources of about 30 units in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    return PrepareConfig(write_sources(), "bytes", "out/store", unit_bytes=2000)


def files_of(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


def size_of(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


@pytest.mark.data
@pytest.mark.parametrize("sentences", ["none", "split"])
def test_an_estimate_agrees_with_the_preparation(data_directory, tmp_path, sentences):
    """The reference is the store itself. Fails if tokens or disk are some per cent off, in books never encoded."""
    vocabulary = data_directory / "vocab/bert/bert-base-uncased-vocab.txt"
    config = PrepareConfig(
        (f"text:{data_directory}/books/train/A*o*.txt",),
        f"wordpiece:{vocabulary}",
        str(tmp_path / "store"),
        workers=1,
        sentences=sentences,
        unit_bytes=1 << 18,
    )
    found = prepare_store(**vars(replace(config, estimate=True)))
    assert not list(tmp_path.iterdir())
    store = prepare(config)
    assert found["sample_bytes"] < 0.2 * store.bytes
    assert found["tokens"] == pytest.approx(store.num_tokens, rel=0.05)
    assert found["store_bytes"] == pytest.approx(size_of(store.path), rel=0.05)


@pytest.mark.parametrize("tokenizer", ["bytes", "train-sentencepiece:300", "train-wordpiece:70", "words:200"])
def test_an_estimate_writes_nothing(corpus, tokenizer):
    """Fails if a directory, a tokenizer or a lock is left, or a new tokenizer is another one than is trained later."""
    config, before = replace(corpus, tokenizer=tokenizer), files_of(Path())
    found = prepare_store(**vars(replace(config, estimate=True)))
    assert files_of(Path()) == before
    store = prepare(replace(config, workers=1))
    assert found["tokens"] == pytest.approx(store.num_tokens, rel=0.05)
    assert found["store_bytes"] == pytest.approx(size_of(store.path), rel=0.05, abs=4000)  # the description
    assert (found["training_seconds"] > 0) == (tokenizer != "bytes")


def test_the_command_prints_lines_and_json(corpus):
    """Fails if the last line is not the dictionary of the Python call, or hosts do not follow from --workers."""
    words = ["--source", "text:books/*.txt", "--tokenizer", "bytes", "--output", "out/store", "--estimate"]
    command = [sys.executable, "-m", "jaxlm.prepare", *words, "--workers", "6"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split(":")[0].split()[0] for line in lines] == [
        "source", "estimate", "measured", "disk", "time", "requests,", "assumed"
    ]  # fmt: skip
    found = json.loads(last)
    assert found["hosts"] == -(-6 // len(os.sched_getaffinity(0))) and found["workers"] == 6
    assert found["core_hours"] <= 6 * found["minutes"] / 60
    assert f"{found['requests']['get']:,} of class B (get)" in done.stdout
    assert not Path("out").exists()


def test_requests_are_counted_as_written():
    """The reference is a count by hand. Fails if a kind of object or a page of a list is left out."""
    file = Entry("a", 1, 0)
    units = [Unit(0, (Slice(file, 0, None), Slice(file, 0, None)), 2 << 20), Unit(1, (Slice(file, 0, None),), 17 << 20)]
    # A shard has two arrays and counts. An open asks for the size, and reads 1, 2, 4 … MiB.
    assert requests([1001, 1], units, 2, 4, 2, 9 << 20) == {
        "list": 4 * (2 + 1) + 1,
        "put": 2 * 3 + 2 + 8,
        "compose": 2,
        "get": (2 * 2 + 6) * 2 + 2 + 2 + 2 + 4 * 5,
    }
    many = [units[0]] * 33
    assert requests([1], many, 1, 1, 0, 0)["compose"] == 2, "one request composes at most 32 objects"


def test_a_part_has_no_estimate_of_its_own(corpus):
    with pytest.raises(InputError, match="part must be left out with estimate, got 0/2"):
        prepare_store(**vars(replace(corpus, estimate=True, part="0/2")))
