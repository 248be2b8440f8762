"""jaxlm.prepare --part: processes encode parts of one store beside each other, with the bytes of one process."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from toy_store import contents
from toy_text import write_sources

from jaxlm.data import plan
from jaxlm.data.preparation import PrepareConfig, encode_part, prepare, prepare_store
from jaxlm.errors import InputError
from jaxlm.host import lock_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two sources of some 40 units, with relative paths, so that descriptions can be compared."""
    monkeypatch.chdir(tmp_path)
    config = PrepareConfig(
        source=write_sources(),
        tokenizer="words:200",
        output="store",
        workers=1,
        unit_bytes=1500,
    )
    prepare(replace(config, output="whole"))
    return config


def start(config: PrepareConfig, part: str, **options) -> subprocess.Popen:
    """Start the command for a part in a process of its own."""
    words = [word for source in config.source for word in ("--source", source)]
    words += ["--tokenizer", config.tokenizer, "--output", config.output, "--unit-bytes", config.unit_bytes]
    command = [sys.executable, "-m", "jaxlm.prepare", *words, "--workers", 1, "--part", part]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(list(map(str, command)), env=environment, text=True, **options)


def test_parts_in_any_order_and_joined_give_the_bytes_of_one_process(corpus, capsys):
    """Fails if a part encodes units of another, or an order or a number of parts changes a byte."""
    counts = [prepare_store(**vars(replace(corpus, part=part))) for part in ("2/3", "0/3", "1/3")]
    assert not list(Path("store.partial").glob("writer.json")), "a part joined shards"
    shards = {int(path.stem) for path in Path("store.partial/shards").glob("*.json")}
    assert not capsys.readouterr().out, "a call from Python prints nothing"
    store = prepare(corpus)
    assert f"continuing: {len(shards)} of {len(shards)} units are done" in capsys.readouterr().out
    assert shards == set(range(len(shards))), "some units were nobody's"
    assert contents(Path("store")) == contents(Path("whole")) and not Path("store.partial").exists()
    assert sum(each["documents"] for each in counts) == store.documents
    assert sum(each["tokens"] for each in counts) == store.num_tokens
    assert encode_part(replace(corpus, part="1/3"))["tokens"] == store.num_tokens, "of the complete store"


def test_the_command_encodes_what_no_part_has(corpus):
    """Fails if the join waits for parts that nobody runs, or encodes again what a part has done."""
    empty = prepare_store(**vars(replace(corpus, part="998/999")))
    assert empty["documents"] == 0, "there are fewer units than parts"
    encode_part(replace(corpus, part="1/4"))
    times = {path.name: path.stat().st_mtime_ns for path in Path("store.partial/shards").glob("*.tokens")}
    encode_part(replace(corpus, part="1/2"))  # another number of parts goes on with the same shards
    after = {path.name: path.stat().st_mtime_ns for path in Path("store.partial/shards").glob("*.tokens")}
    assert times.items() <= after.items() and len(after) > len(times)
    prepare(corpus)
    assert contents(Path("store")) == contents(Path("whole"))


def test_two_processes_train_one_tokenizer_and_one_is_killed(corpus):
    """Fails if each process trains a vocabulary, the join begins beside them, or a kill loses a shard."""
    first, second = (start(corpus, part, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for part in ("0/2", "1/2"))
    deadline = time.monotonic() + 120
    while not list(Path("store.partial").glob("shards/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    printed = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert second.returncode == 0
    assert sum("training a vocabulary of words" in text for text in printed) <= 1, printed
    again = start(corpus, "0/2", stdout=subprocess.PIPE)
    assert "part 0/2 is done" in again.communicate(timeout=120)[0] and again.returncode == 0
    prepare(corpus)
    assert contents(Path("store")) == contents(Path("whole"))


def test_a_tokenizer_is_waited_for(corpus, monkeypatch, capsys):
    """Fails if a process that finds another one training trains too, or waits for ever."""
    partial = Path("store.partial")
    partial.mkdir()
    trains = lock_file(partial / "tokenizer.lock")

    def other_ends(seconds):
        assert seconds == plan.WAIT
        trains.close()

    monkeypatch.setattr(plan.time, "sleep", other_ends)
    encode_part(replace(corpus, part="0/2"))
    waits = f"waiting for process {os.getpid()} on "
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(waits)] and trains.closed


@pytest.mark.parametrize("part", ["2/2", "-1/2", "1", "a/b", "0/0", "1/2/3", "٠/٢"])
def test_a_part_that_is_none_is_refused(corpus, part):
    with pytest.raises(InputError, match=re.escape(f"--part must be I/N with I from 0 to N - 1, got {part}; give")):
        encode_part(replace(corpus, part=part))
    assert not Path("store.partial").exists()


def test_parts_of_another_preparation_are_refused(corpus):
    """Fails if parts made with other arguments, or of a text that has changed, would be joined."""
    encode_part(replace(corpus, part="0/2"))
    with pytest.raises(InputError, match="was begun with --tokenizer words:200, not words:100"):
        encode_part(replace(corpus, part="1/2", tokenizer="words:100"))
    Path("blocks.txt").write_text("another text")
    with pytest.raises(InputError, match=r"the sources have changed since store\.partial was begun"):
        encode_part(replace(corpus, part="1/2"))
    assert list(Path("store.partial/shards").glob("*.json")), "the refusal removed the other part's shards"


def test_what_shares_the_directory_and_what_does_not(corpus):
    """Fails if the join runs beside a part, a part runs twice at once, or another part is refused."""
    partial = Path("store.partial")
    partial.mkdir()
    with plan.locked(partial, plan.Part(0, 2)):
        with pytest.raises(InputError, match=r"store\.partial is in use by process \d+ on .*; wait for it or stop it"):
            prepare(corpus)
        with pytest.raises(InputError, match="in use by process"):
            encode_part(replace(corpus, part="0/2"))
        encode_part(replace(corpus, part="1/2"))
    with plan.locked(partial, None), pytest.raises(InputError, match="in use by process"):
        encode_part(replace(corpus, part="0/2"))


def test_a_refused_part_leaves_nothing_unless_others_work(corpus):
    """Fails if the corrected command is refused for what a mistaken one left, or a living part loses its directory."""
    wrong = replace(corpus, tokenizer="wordpiece:missing.txt", part="0/2")
    with pytest.raises(InputError, match=r"missing\.txt"):
        encode_part(wrong)
    assert not Path("store.partial").exists()
    Path("store.partial").mkdir()
    with plan.locked(Path("store.partial"), plan.Part(1, 2)), pytest.raises(InputError, match=r"missing\.txt"):
        encode_part(wrong)
    assert Path("store.partial").exists()
