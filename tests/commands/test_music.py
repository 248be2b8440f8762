"""From MIDI files to MIDI files through the commands; mido, another program, opens what was written."""

import random

import mido
import pytest
import toy_run
from parity.performance_case import midi, played
from toy_runs import assert_one_line, run_here

from jaxlm.data.store import open_store
from jaxlm.reading.midi import read_notes
from jaxlm.text.events import vocabulary

pytestmark = pytest.mark.usefixtures("two_devices")

PERFORMANCE = vocabulary("performance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with pieces, their store, and a run with random parameters."""
    path, rng = tmp_path_factory.mktemp("music"), random.Random(1)
    for name in "ab":
        notes = [played(480 * k, 480 * k + rng.randrange(1, 900), rng.randrange(50, 80)) for k in range(100)]
        (path / f"{name}.mid").write_bytes(midi(sum(notes, [])))
    words = ["--source", f"midi:{path}/*.mid", "--tokenizer", "events:performance", "--output", path / "store"]
    assert run_here("prepare", *words).code == 0
    toy_run.pretrained(path / "run", open_store(path / "store"))
    return path


def generated(folder, *words):
    return run_here("generate", "--run", folder / "run", *words)


def test_a_prompt_is_continued_into_a_file(folder, tmp_path):
    """Fails when the file lacks the beginning of the prompt, or is not what the printed words say."""
    target = tmp_path / "longer.mid"
    done = generated(
        folder,
        "--prompt",
        f"{folder}/a.mid",
        "--prompt-seconds",
        "2.5",
        "--length",
        "20",
        "--output",
        target,
        "--beyond-length",
    )
    assert done.code == 0, done.errors
    words = done.output.split()
    begun = PERFORMANCE.before(PERFORMANCE.encode(read_notes(folder / "a.mid")), 2.5)
    assert words[: len(begun)] == begun and 0 < len(words) - len(begun) <= 20
    notes = PERFORMANCE.decode(words)
    messages = [message for message in mido.MidiFile(target) if message.type == "note_on" and message.velocity]
    assert sorted(message.note for message in messages) == sorted(note.pitch for note in notes)
    assert len(notes) >= 5


def test_a_new_piece_begins_without_a_prompt(folder, tmp_path):
    done = generated(folder, "--prompt", "", "--length", "9", "--output", tmp_path / "new.mid")
    assert done.code == 0 and len(done.output.split()) <= 9 and mido.MidiFile(tmp_path / "new.mid").type == 1


def test_a_document_is_written_back(folder, tmp_path):
    """Fails when document K is another file, or the events of the file differ from those of the store."""
    store = folder / "store"
    for number, name in enumerate("ab"):
        for target in (tmp_path / "back.mid", tmp_path / "back.txt"):
            assert run_here("show", store, "--document", number, "--output", target).code == 0
        words = PERFORMANCE.encode(read_notes(folder / f"{name}.mid"))
        assert PERFORMANCE.encode(read_notes(tmp_path / "back.mid")) == words
        assert (tmp_path / "back.txt").read_text() == " ".join(words)
    assert run_here("show", store, "--document", "1").output.startswith("piano: 100 notes")
    for words in ([store], [folder / "run", "--step", "0"], ["debug/gpt", "--data.store", store]):
        assert "s per column" in run_here("show", *words).output


def test_a_text_is_written_back(tmp_path):
    text = " It was\r\na dark  night.\n\nÉ 🙂"
    (tmp_path / "a.txt").write_bytes(text.encode())
    words = ["--source", f"text:{tmp_path}/a.txt", "--tokenizer", "bytes", "--output", tmp_path / "store"]
    assert run_here("prepare", *words).code == 0
    assert run_here("show", tmp_path / "store", "--document", "0", "--output", tmp_path / "b.txt").code == 0
    assert (tmp_path / "b.txt").read_bytes() == text.encode()
    refused = run_here("show", tmp_path / "store", "--document", "0", "--output", tmp_path / "b.mid")
    assert_one_line(refused, 2, "must be a text for a vocabulary of text")


def test_bad_input_ends_in_one_line(folder, tmp_path):
    (tmp_path / "bad.mid").write_bytes(b"MThd")
    piece = f"{folder}/a.mid"
    for words, why in [
        (["--prompt", "It was"], "events:performance only"),
        (["--prompt", f"{tmp_path}/bad.mid"], "bad.mid must be a MIDI file"),
        (["--prompt", f"{tmp_path}/none.mid"], "none.mid cannot be read"),
        (["--prompt", piece, "--prompt-seconds", "0"], "--prompt-seconds must be above 0"),
        (["--prompt", "on:60", "--prompt-seconds", "1"], "with --prompt FILE.mid"),
        (["--prompt", piece, "--output", f"{tmp_path}/x.mid", "--num-samples", "2"], "a .jsonl file"),
        (["--output", f"{tmp_path}/x.mid"], "--prompt must be given"),
        (["--prompt", piece, "--output", f"{tmp_path}/none/x.mid"], "can be written"),
    ]:
        assert_one_line(generated(folder, *words), 2, why)
    for words, why in [
        (["--document", "2"], "must be below 2"),
        (["--output", f"{tmp_path}/x.mid"], "with --document"),
        (["--document", "0", "--output", f"{tmp_path}/none/x.mid"], "can be written"),
    ]:
        assert_one_line(run_here("show", folder / "store", *words), 2, why)
    assert_one_line(run_here("show", folder / "run", "--document", "0"), 2, "with one token store")


def test_a_model_of_text_refuses_midi(folder, tmp_path):
    """Fails when a model of text reads the name of a MIDI file as a prompt, or writes a file without music."""
    toy_run.pretrained(tmp_path / "run", toy_run.toy_store(tmp_path / "store", toy_run.toy_tokenizer()))
    assert_one_line(generated(tmp_path, "--prompt", f"{folder}/a.mid"), 2, "--prompt must be a text")
    refused = generated(tmp_path, "--prompt", "It", "--output", tmp_path / "x.mid")
    assert_one_line(refused, 2, "--output must be a text")
