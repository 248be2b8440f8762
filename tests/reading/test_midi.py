"""MIDI files written by mido, whose reader is the reference, and read here; damaged files."""

import io
import random

import mido
import pytest
from parity.performance_case import midi, pedal, played, tempo

from jaxlm.errors import InputError
from jaxlm.reading.midi import Note, read_notes, write_notes

NOTE = played(0, 480, 60)


def notes_of(content: bytes, tmp_path) -> list[Note]:
    (tmp_path / "a.mid").write_bytes(content)
    return sorted(read_notes(tmp_path / "a.mid"))


def by_mido(content: bytes) -> list[tuple[float, float, int]]:
    """The notes (start, end, pitch) by mido's own clock, first in, first out."""
    now, opened, found = 0.0, {}, []
    for message in mido.MidiFile(file=io.BytesIO(content)):
        now += message.time
        if message.type == "note_on" and message.velocity:
            opened.setdefault(message.note, []).append(now)
        elif message.type in ("note_on", "note_off") and opened.get(message.note):
            found.append((opened[message.note].pop(0), now, message.note))
    return sorted(found)


def random_piece(seed: int) -> bytes:
    rng = random.Random(seed)
    notes = []
    for _ in range(100):
        start = rng.randrange(5000)
        notes += played(start, start + rng.randrange(1, 500), rng.randrange(60, 64), rng.randrange(1, 128))
    return midi(notes, [tempo(rng.randrange(5000), rng.randrange(200_000, 900_000)) for _ in range(5)], ticks=96)


@pytest.mark.parametrize("seed", range(3))
def test_tempo_of_a_later_track_and_overlapping_notes(seed, tmp_path):
    """Fails when a tempo counts for its own track alone, or a note of a pitch that sounds already ends first."""
    content = random_piece(seed)
    found = [(note.start, note.end, note.pitch) for note in notes_of(content, tmp_path)]
    assert [pitch for *_, pitch in found] == [pitch for *_, pitch in by_mido(content)]
    for mine, theirs in zip(found, by_mido(content), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


def test_instruments_and_drums(tmp_path):
    strings = [mido.Message("program_change", program=48, channel=1, time=0), *played(0, 240, 64, 70, 1)]
    found = notes_of(midi(NOTE, strings + played(0, 10, 38, 90, channel=9)), tmp_path)
    assert [(note.program, note.drum, note.pitch) for note in found] == [(0, True, 38), (48, False, 64), (0, False, 60)]


def test_the_pedal_holds_the_notes_of_its_track(tmp_path):
    """Fails when a pedal holds the notes of another track, or drums."""
    other = played(0, 480, 67, channel=1)
    drums = played(0, 480, 38, channel=9) + pedal((0, 127), channel=9)
    found = notes_of(midi(NOTE + pedal((0, 127), (960, 0)), other, drums), tmp_path)
    assert {note.pitch: note.end for note in found} == {60: 1.0, 67: 0.5, 38: 0.5}


def test_other_programs_read_what_is_written(tmp_path):
    notes = [Note(0.0, 0.5, 60, 1), Note(0.5, 1.25, 60, 127, 48), Note(0.25, 12.0, 36, 64, 0, True)]
    write_notes(tmp_path / "a.mid", notes)
    content = (tmp_path / "a.mid").read_bytes()
    assert by_mido(content) == [(0.0, 0.5, 60), (0.25, 12.0, 36), (0.5, 1.25, 60)]
    assert notes_of(content, tmp_path) == sorted(notes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "an empty one"),
        (b"It was a dark night", "cannot be read"),
        (midi(NOTE)[:30], "cannot be read"),
        (midi([tempo(0, 500_000)]), "must have notes, got none"),
        (midi(NOTE).replace(b"\x01\xe0MTrk", b"\xe7\x28MTrk"), "SMPTE"),
        (midi(NOTE).replace(b"\x01\xe0MTrk", b"\x00\x00MTrk"), "0 ticks"),
        (midi(played(0, 1 << 27, 60)), "within 24 hours"),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(content, why, tmp_path):
    with pytest.raises(InputError, match=why) as caught:
        notes_of(content, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "a.mid")) and "\n" not in str(caught.value)


def test_random_damage_is_an_input_error(tmp_path):
    """Fails when damage ends in another error than InputError."""
    rng, whole, refused = random.Random(1), random_piece(0), 0
    for _ in range(200):
        damaged = bytearray(whole[: rng.randrange(20, len(whole))])
        for _ in range(5):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            notes_of(bytes(damaged), tmp_path)
        except InputError:
            refused += 1
    assert refused > 100
