"""Musical events against frozen outputs of note_seq, and passes through MIDI files.

`tests/parity/freeze_performance.py` made tests/golden/performance.json with note_seq, whose code is the reference.
"""

import json
import random

import pytest
from parity import performance_case as case
from paths import REPOSITORY

from jaxlm.errors import InputError
from jaxlm.reading.midi import Note, read_notes, write_notes
from jaxlm.text import load_tokenizer, published_files, tokenizer_from_spec
from jaxlm.text.events import DRUMS, FAMILIES, VOCABULARIES, varied, vocabulary

FROZEN = json.loads((REPOSITORY / "tests/golden/performance.json").read_text(encoding="utf-8"))
PERFORMANCE = vocabulary("performance")


def ids_of(notes) -> list[int]:
    return [PERFORMANCE.words.index(word) for word in PERFORMANCE.encode(notes)]


@pytest.mark.parametrize("name", FROZEN["files"])
def test_files_have_the_ids_of_note_seq(name, tmp_path):
    """Fails on another order of ids or events, another rounding, and another rule of the sustain pedal or the tempo."""
    (tmp_path / "a.mid").write_bytes(case.files()[name])
    assert ids_of(read_notes(tmp_path / "a.mid")) == FROZEN["files"][name]
    assert len(FROZEN["files"][name]) > 10


@pytest.mark.parametrize("name", FROZEN["notes"])
def test_overlapping_notes_have_the_ids_of_note_seq(name):
    assert ids_of(Note(*note) for note in case.notes()[name]) == FROZEN["notes"][name]


@pytest.mark.parametrize("name", FROZEN["ids"])
def test_ids_give_the_notes_of_note_seq(name):
    """Fails when an end without a note, a note of no length, or one that stays open is treated otherwise."""
    notes = PERFORMANCE.decode(PERFORMANCE.words[i] for i in case.ids()[name])
    assert sorted([round(n.start * 100), round(n.end * 100), n.pitch, n.velocity] for n in notes) == FROZEN["ids"][name]


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("seed", range(3))
def test_passes_through_files_change_nothing_after_the_first(name, seed, tmp_path):
    """Fails when a file loses a note, a time or an instrument, or changes the order of notes that begin together."""
    rng, music = random.Random(seed), vocabulary(name)
    notes = []
    for _ in range(400):
        start = rng.choice([rng.uniform(0, 20), rng.randrange(40) / 2])
        end = start + rng.choice([0, 0.004, rng.expovariate(1)])
        drum = rng.random() < 0.1
        notes.append(Note(start, end, rng.randrange(48, 56), rng.randrange(1, 128), rng.randrange(128), drum))
    passes = [music.encode(notes)]
    for _ in range(3):
        write_notes(tmp_path / "a.mid", music.decode(passes[-1]))
        passes.append(music.encode(read_notes(tmp_path / "a.mid")))
    assert passes[1] == passes[2] == passes[3]
    # The order alone may change, of notes that begin within one step, and with it the number of velocities.
    first, second = (sorted(word for word in words if not word.startswith("velocity")) for words in passes[:2])
    assert first == second
    voices = {word.split(":")[0] for word in passes[1]}
    assert name != "multitrack" or voices == {*FAMILIES, DRUMS, "wait"}


def test_the_vocabularies_are_fixed():
    """Fails when an id moves: stores and runs of an earlier version could not be read."""
    words = PERFORMANCE.words
    assert len(words) == 388
    assert [words.index(word) for word in ("on:0", "off:0", "shift:1", "shift:100", "velocity:1")] == [
        0,
        128,
        256,
        355,
        356,
    ]
    words = vocabulary("multitrack").words
    assert len(words) == 17 * 9 * 128 + 100
    assert [words[i] for i in (0, 128, 60 + 128 * 5, 9 * 128, 17 * 9 * 128)] == [
        "piano:v0:0",
        "piano:v8:0",
        "piano:v72:60",
        "chromatic_percussion:v0:0",
        "wait:1",
    ]


def test_copies_are_higher_and_longer():
    notes = [Note(1.0, 2.0, 60, 80), Note(1.0, 2.0, 38, 80, 0, True)]
    assert varied(notes, 3, 1.05) == [Note(1.05, 2.1, 63, 80), Note(1.05, 2.1, 38, 80, 0, True)]
    assert varied(notes, 68, 1.0) == [], "pitch 128 does not exist"


def test_a_prompt_has_the_events_before_its_end():
    """Fails when a prompt has a note that begins later, loses an open note, or ends in a pause."""
    words = PERFORMANCE.encode([Note(0.0, 4.0, 60, 80), Note(1.5, 2.5, 62, 80), Note(3.0, 3.5, 64, 80)])
    assert PERFORMANCE.before(words, 2.0) == ["velocity:20", "on:60", "shift:100", "shift:50", "on:62"]
    assert PERFORMANCE.before(words, 1.5) == ["velocity:20", "on:60"]
    assert PERFORMANCE.before(words, 99) == words


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_saved_and_an_exported_tokenizer_has_the_same_ids(name, tmp_path):
    from tokenizers import Tokenizer as Library

    tokenizer = tokenizer_from_spec(f"events:{name}")
    assert tokenizer.specials == {"end": len(vocabulary(name).words)}
    text = " ".join(random.Random(1).choices(vocabulary(name).words, k=50))
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.specials["end"]]) == text
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.music is vocabulary(name)
    assert Library.from_str(published_files(tokenizer, 9)["tokenizer.json"].decode()).encode(text).ids == ids
    saved = tmp_path / "events.txt"
    saved.write_text(saved.read_text().replace(":1\n", ":one\n"))
    with pytest.raises(InputError, match="damaged"):
        load_tokenizer(tmp_path)


def test_other_words_and_names_are_refused():
    for encode in ("encode_batch", "encode_batch_with_offsets"):
        with pytest.raises(InputError, match=r"events:performance only, .* got 'It'"):
            getattr(tokenizer_from_spec("events:performance"), encode)(["It was a day"])
    with pytest.raises(InputError, match=r"events:performance only, .* got 'It'"):
        tokenizer_from_spec("events:performance").encode("on:60 It was")
    with pytest.raises(InputError, match=r"events:performance, events:multitrack, got 'events:perform'"):
        tokenizer_from_spec("events:perform")
