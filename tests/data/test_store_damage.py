"""Damage in a store's arrays: found before it is trained on, named in one line, and repaired without losing the run.

Fails when a flipped bit in a chunk reaches a batch, when a store loses its fingerprint or its usability by the
checksums, or when a run that met damage loses the steps before it.
"""

import json
import shutil

import numpy as np
import pytest
from pair_store import pair_store, random_documents
from toy_runs import assert_one_line, checkpoints, make_stores, metrics, pretrain_arguments, run_here

from jaxlm.data import arrays
from jaxlm.data.arrays import CHECKSUMS, DamagedStore, chunk_checksums, file_sha256
from jaxlm.data.config import MEMBERS, Packed, SentencePairs, Windows
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.rows import training_rows
from jaxlm.data.store import description_fingerprint, open_store
from jaxlm.errors import InputError

CHUNK = 1024  # bytes, instead of 64 KiB, so that toy stores have many


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK", CHUNK)


@pytest.fixture
def store(tmp_path, small_chunks):
    return pair_store(tmp_path / "store", random_documents(100)).path


def flip(path, byte, bit=4):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def first_token(rows, row):
    (origin,) = rows.origin(row)
    return int(rows.sources[0].store.document_starts[origin.document]) + origin.token


def _array(name, **changes):
    return lambda description: description["arrays"][name].update(changes)


ALTERED = {
    "another directory": (_array("tokens", file="../secret"), "must name files of its directory, got '../secret'"),
    "an absolute path": (_array("tokens", file="/etc/passwd"), "must name files of its directory, got '/etc/passwd'"),
    "a link": (_array("tokens", file="link"), "must name files of its directory, got 'link'"),
    "no name": (_array("tokens", file=7), "must name files of its directory, got 7"),
    "a dtype": (_array("tokens", dtype="zzz"), "tokens is zzz"),
    "float16": (_array("tokens", dtype="<f2"), "tokens is <f2"),
    "a length": (_array("tokens", shape=[-5]), "tokens is <u2 [-5]"),
    "no length": (_array("tokens", shape=None), "is not a token store's (TypeError"),
    "no tokens": (lambda d: d["arrays"].pop("tokens"), "it has no tokens"),
    "a list": (lambda d: d.update(arrays=[]), "is not a token store's (AttributeError"),
    "a vocabulary": (lambda d: d["tokenizer"].update(size=10**12), "token_counts is <i8"),
    "documents": (lambda d: d.update(documents=d["documents"] + 1), "document_starts is <i8"),
    "a section": (lambda d: d["sections"][0].update(tokens=10**9), "has 1000000000 from 0 on of"),
    "a negative section": (lambda d: d["sections"][0].update(first_document=-1), "from -1 on of"),
    "no sections": (lambda d: d.pop("sections"), "is not a token store's (KeyError"),
}


@pytest.mark.parametrize(("alter", "said"), ALTERED.values(), ids=ALTERED)
def test_a_description_that_lies_is_one_line(store, tmp_path, alter, said):
    """Fails if a description with a right fingerprint names another file of the machine, or ends in a traceback."""
    (tmp_path / "secret").write_bytes((store / "tokens.bin").read_bytes())
    (store / "link").symlink_to(tmp_path / "secret")
    description = json.loads((store / "description.json").read_text())
    alter(description)
    description["fingerprint"] = description_fingerprint(description)
    (store / "description.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="delete it and prepare it again") as raised:
        open_store(store)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("chunks", [True, False], ids=["chunk checksums", "old"])
@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("tokens", 60_000, lambda store: store.tokens[7]),
        ("document_starts", 10**12, lambda store: store.document_starts[7]),
        ("document_starts", -1, lambda store: store.document_starts[7]),
    ],
)
def test_values_that_no_text_has_are_one_line(store, name, value, use, chunks):
    """Fails if ids beyond the vocabulary, in a store whose checksums are right, are found as a loss that is NaN."""
    description = json.loads((store / "description.json").read_text())
    array = description["arrays"][name]
    values = np.fromfile(store / array["file"], array["dtype"])
    values[9] = value
    values.tofile(store / array["file"])
    array["sha256"] = file_sha256(store / array["file"])
    description["fingerprint"] = description_fingerprint(description)
    (store / "description.json").write_text(json.dumps(description))
    if chunks:
        (store / CHECKSUMS).write_bytes(chunk_checksums(store, description))
    else:
        (store / CHECKSUMS).unlink()
    with pytest.raises(DamagedStore, match=rf"{name}\.bin must have values from 0 to [\d,]+, got {value:,}; "):
        use(open_store(store))


@pytest.mark.parametrize("layout", ["windows", "packed", "pairs"])
def test_no_row_holds_a_damaged_token(store, layout):
    """Every row that reads the damaged chunk is refused, every other one is the same. Fails on 2968321: it trains."""
    data = MEMBERS[layout]()
    whole = training_rows([open_store(store)], data, length=32, seed=0)
    count = sum(source.rows for source in whole.sources)
    expected = [whole.read([row]) for row in range(count)]
    chunk = 3
    flip(store / "tokens.bin", chunk * CHUNK + 17)
    rows = training_rows([open_store(store)], data, length=32, seed=0)
    refused = 0
    for row in range(count):
        try:
            found = rows.read([row])
        except DamagedStore as error:
            refused += 1
            assert f"tokens.bin is damaged in bytes {chunk * CHUNK:,} to {(chunk + 1) * CHUNK - 1:,}" in str(error)
            assert "prepare it again" in str(error) and "\n" not in str(error)
        else:
            for name in vars(found):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected[row], name))
    assert 512 // 48 <= refused < count / 4


def test_validation_text_is_checked_too(store):
    flip(store / "tokens.bin", 5 * CHUNK)
    batches = Windows().validation_rows(Reading([open_store(store)], length=32, batch_size=4))
    with pytest.raises(DamagedStore, match=r"tokens\.bin is damaged in bytes 5,120 to 6,143"):
        for _ in batches:
            pass


@pytest.mark.parametrize(
    "array, use",
    [
        ("document_starts", lambda store: training_rows([store], Packed(), length=32, seed=0)),
        ("document_starts", lambda store: training_rows([store], SentencePairs(), length=32, seed=0)),
        ("sentence_starts", lambda store: training_rows([store], SentencePairs(), length=32, seed=0)),
        ("token_counts", lambda store: store.unigram_entropy()),
        ("tokens", lambda store: np.asarray(store.tokens)),
        ("tokens", lambda store: store.tokens[-1]),
        ("tokens", lambda store: store.tokens[::-2]),
        ("tokens", lambda store: store.tokens[[0, 5]]),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_an_array_that_is_read_as_a_whole_is_checked_first(store, array, use, old):
    """Offsets decide what a row is: they are checked before a plan is made. Fails on 2968321: nothing is checked.

    old: a store without chunk checksums, as that commit made it; the SHA-256 of the array tells.
    """
    if old:
        (store / CHECKSUMS).unlink()
    use(open_store(store))
    path = store / f"{array}.bin"
    flip(path, path.stat().st_size - 2)
    with pytest.raises(DamagedStore, match=rf"{array}\.bin is damaged"):
        use(open_store(store))


def test_checksums_are_no_part_of_a_store(store, monkeypatch, caplog):
    """A store without them has the same fingerprint and the same rows; over a size it is used with a warning."""
    whole = open_store(store)
    expected = training_rows([whole], Packed(), length=32, seed=0).read(range(50))
    (store / CHECKSUMS).unlink()
    old = open_store(store)
    assert old.fingerprint == whole.fingerprint
    np.testing.assert_array_equal(training_rows([old], Packed(), length=32, seed=0).read(range(50)).ids, expected.ids)
    monkeypatch.setattr(arrays, "MOST_AT_ONCE", 4000)
    flip(store / "tokens.bin", 1)
    caplog.clear()
    large = open_store(store)
    assert large.num_tokens == len(large.tokens[:])
    assert "was not checked; check it once with --verify-stores" in caplog.text and "tokens.bin" in caplog.text
    with pytest.raises(DamagedStore, match=r"tokens\.bin is damaged"):
        large.verify()


def test_damaged_checksums_are_refused(store, tmp_path):
    """A file of them that is altered, cut, or another store's; deleting it is the remedy, and the line says so."""
    path = store / CHECKSUMS
    content = path.read_bytes()
    for byte in (0, 9, 13, 20, 60, len(content) - 1):
        flip(path, byte)
        with pytest.raises(DamagedStore, match=r"checksums\.bin is damaged; delete this file alone"):
            open_store(store).tokens  # noqa: B018
        path.write_bytes(content)
    path.write_bytes(content[:-4])
    with pytest.raises(DamagedStore, match=r"checksums\.bin is damaged"):
        open_store(store).tokens  # noqa: B018
    other = pair_store(tmp_path / "other", random_documents(100, seed=1)).path
    shutil.copy(other / CHECKSUMS, path)
    with pytest.raises(DamagedStore, match=r"checksums\.bin (is damaged|belongs to another store)"):
        open_store(store).tokens  # noqa: B018
    path.unlink()
    open_store(store).verify()


def test_a_chunk_is_read_once(store, monkeypatch):
    """Rows pay for a chunk the first time only."""
    reads = []
    pread = arrays.os.pread
    monkeypatch.setattr(arrays.os, "pread", lambda *args: reads.append(args[2]) or pread(*args))
    tokens = open_store(store).tokens
    for start in range(0, len(tokens), 7):
        tokens[start : start + 40]
    assert sorted(reads) == list(range(0, 2 * len(tokens), CHUNK))


def test_a_disk_that_fails_is_one_line(store, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    tokens = open_store(store).tokens
    monkeypatch.setattr(arrays.os, "pread", broken)
    with pytest.raises(DamagedStore, match=r"tokens\.bin: bytes 0 to 1,023 cannot be read: Input/output error"):
        tokens[0]


def test_a_run_that_meets_damage_goes_on_after_the_repair(tmp_path, small_chunks):
    """In the middle of a run: one line, code 1, the steps before it saved, and after the repair the same losses.

    The rows are read ahead by threads. Fails on 2968321: the run trains on what the damage made of the text.
    """
    stores = make_stores(tmp_path)
    toy = ("--num-steps", 16, "--eval-every", 0)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "whole", stores, *toy))
    assert ended.code == 0, ended.errors
    rows = training_rows([open_store(stores[0])], Windows(), length=32, seed=0)
    steps: dict[int, int] = {}  # by chunk, those taken before it is read
    for row in range(16 * 8):
        start = 2 * first_token(rows, row)
        for chunk in (start // CHUNK, (start + 65) // CHUNK):
            steps.setdefault(chunk, row // 8)
    chunk, step = max(steps.items(), key=lambda item: item[1])
    assert step > 5
    tokens = stores[0] / "tokens.bin"
    sound = tokens.read_bytes()
    flip(tokens, chunk * CHUNK + 5)
    run = tmp_path / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *toy))
    assert ended.code == 1 and "Traceback" not in ended.errors
    line = ended.errors.splitlines()[-1]
    assert line.startswith("failed: ") and "tokens.bin is damaged in bytes" in line
    assert f"resume from step {step}" in line and checkpoints(run)[-1] == step
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *toy))
    assert ended.code == 1 and f"resume from step {step}" in ended.errors
    tokens.write_bytes(sound)
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *toy))
    assert ended.code == 0, ended.errors
    assert metrics(run) == metrics(tmp_path / "whole")


def test_a_start_refuses_damage(tmp_path, small_chunks):
    """Met before the first step it is wrong input: code 2."""
    stores = make_stores(tmp_path)
    flip(stores[1] / "tokens.bin", 100)
    run = tmp_path / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, "--num-steps", 2))
    assert ended.code == 2 and "Traceback" not in ended.errors
    assert "tokens.bin is damaged" in ended.errors.splitlines()[-1]
    flip(stores[1] / "tokens.bin", 100)
    flip(stores[0] / "token_counts.bin", 100)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "other", stores, "--num-steps", 2))
    assert_one_line(ended, 2, "token_counts.bin is damaged")
