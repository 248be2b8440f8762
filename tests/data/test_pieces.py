"""Pieces of music as documents: copies, their order, workers, and bad files, against files that mido wrote."""

import random

import pytest
from parity.performance_case import midi, pedal, played
from toy_runs import assert_one_line, run_here

from jaxlm.data.pieces import copies_of
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.reading.midi import read_notes
from jaxlm.text.events import varied, vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four pieces, the last one with a high note that only lower copies have."""
    path, rng = tmp_path_factory.mktemp("pieces"), random.Random(1)
    for name in ("d", "a", "c", "b"):
        notes = [
            m
            for k in range(20)
            for m in played(240 * k, 240 * k + rng.randrange(1, 500), 125 if name == "d" else 60 + k)
        ]
        (path / f"{name}.mid").write_bytes(midi(notes + pedal((100, 127), (700, 0)), played(0, 9, 36, channel=9)))
    return path


def prepared(folder, store, *words: str):
    done = run_here("prepare", "--source", f"midi:{folder}/*.mid", "--output", store, *words)
    assert done.code == 0, done.errors
    return open_store(store)


def documents(store) -> list[str]:
    starts = store.document_starts
    return [store.tokenizer().decode(store.tokens[a:b].tolist()) for a, b in zip(starts, starts[1:], strict=False)]


@pytest.mark.parametrize("name", ["performance", "multitrack"])
def test_documents_are_the_copies_of_each_file(name, folder, tmp_path):
    """Fails when a copy is lost or in another place, or the store depends on the processes or the units of work."""
    words = ["--tokenizer", f"events:{name}", "--transpose", "-3:3", "--stretch", "0.95:1.05"]
    store = prepared(folder, tmp_path / "one", *words, "--workers", "1")
    music, expected = vocabulary(name), []
    for file in sorted(folder.iterdir()):
        notes = read_notes(file)
        copies = [varied(notes, up, by) for by in (0.95, 0.975, 1.0, 1.025, 1.05) for up in range(-3, 4)]
        expected += [" ".join(music.encode(copy)) for copy in copies if copy]
    assert len(expected) == 4 * 35 - 5, "pitch 128 does not exist"
    assert documents(store) == expected
    assert store.tokens[-1] == store.tokenizer().specials["end"] == len(music.words)
    if name == "performance":
        other = prepared(folder, tmp_path / "two", *words, "--workers", "2", "--unit-bytes", "50000")
        assert other.fingerprint == store.fingerprint


def test_the_piece_alone_and_other_tokenizers(folder, tmp_path):
    """Fails when the tokenizer of a store does not decide the words, or a vocabulary of words cannot be counted."""
    store = prepared(folder, tmp_path / "store", "--tokenizer", "events:multitrack")
    assert store.documents == 4
    again = prepared(folder, tmp_path / "again", "--tokenizer", f"store:{tmp_path / 'store'}")
    assert documents(again) == documents(store) and again.tokenizer_fingerprint == store.tokenizer_fingerprint
    counted = prepared(folder, tmp_path / "words", "--tokenizer", "words:400")
    assert documents(counted)[0].startswith("velocity:20 on:60")


def test_bad_files_and_arguments_end_in_one_line(folder, tmp_path):
    (tmp_path / "drums.mid").write_bytes(midi(played(0, 9, 36, channel=9)))
    (tmp_path / "empty.mid").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("on:60")
    for words, why in [
        (["--source", f"midi:{tmp_path}/drums.mid", "--tokenizer", "events:performance"], "drums only"),
        (["--source", f"midi:{tmp_path}/*.mid", "--tokenizer", "events:multitrack"], "empty.mid must be a MIDI file"),
        (["--source", f"midi:{folder}/*.mid", "--tokenizer", "events:piano"], "events:performance, events:multitrack"),
        (["--source", f"midi:{folder}/*.mid", "--tokenizer", "words:9", "--transpose", "3"], "must be LOW:HIGH"),
        (["--source", f"text:{tmp_path}/*.txt", "--tokenizer", "words:9", "--stretch", "1:2"], "a source midi:GLOB"),
    ]:
        done = run_here("prepare", *words, "--output", tmp_path / "store")
        assert_one_line(done, 2, why)
        assert not (tmp_path / "store").exists()


def test_other_copies_need_another_store(folder, tmp_path):
    words = ["prepare", "--source", f"midi:{folder}/*.mid", "--tokenizer", "events:performance"]
    assert run_here(*words, "--transpose", "-1:1", "--output", tmp_path / "store").code == 0
    refused = run_here(*words, "--output", tmp_path / "store")
    assert refused.code == 2 and "--transpose -1:1" in refused.errors


def test_ranges_of_copies():
    assert copies_of("performance", "", "").each == [(1.0, 0)]
    assert copies_of("performance", "-3:3", "0.95:1.05").stretch == (0.95, 0.975, 1.0, 1.025, 1.05)
    for transpose, stretch in [
        ("3:-3", ""),
        ("1.5:2", ""),
        ("", "0:1"),
        ("", "nan:1"),
        ("1", ""),
        ("", "1:1:1"),
        ("", "inf:inf"),
    ]:
        with pytest.raises(InputError, match="must be LOW:HIGH"):
            copies_of("performance", transpose, stretch)
