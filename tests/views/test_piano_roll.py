"""Piano rolls against drawings by hand, and against the rolls of symusic."""

import random

import symusic

from jaxlm.reading.midi import Note
from jaxlm.views.piano_roll import COLUMNS, roll_lines


def test_a_roll_has_a_line_per_pitch_and_instrument():
    """Fails when a pitch is on another line, a note begins or ends in another column, or instruments are mixed."""
    notes = [
        Note(1.0, 1.1, 60, 80),
        Note(1.1, 1.3, 62, 80),
        Note(1.0, 1.05, 36, 80, 0, True),
        Note(1.2, 1.21, 42, 80, 0, True),
    ]
    assert list(roll_lines(notes)) == [
        "piano: 2 notes, 1.00 to 1.30 s, 0.05 s per column",
        "  D4 |  o---",
        " C#4 |",
        "  C4 |o-",
        "drums: 2 notes, 1.00 to 1.30 s, 0.05 s per column",
        "  42 |    o",
        "  36 |o",
    ]
    assert list(roll_lines([])) == ["no notes"]


def test_a_roll_is_that_of_symusic():
    """Fails when a cell is empty while its note sounds. Times are multiples of a column, pitches do not overlap."""
    rng, notes, free = random.Random(1), [], dict.fromkeys(range(50, 70), 0)
    track = symusic.Track("", 0, False)
    for column in range(80):
        pitch = rng.randrange(50, 70)
        if free[pitch] <= column:
            free[pitch] = column + rng.randrange(1, 9)
            notes.append(Note(column / 20, free[pitch] / 20, pitch, 80))
            track.notes.append(symusic.Note(column, free[pitch] - column, pitch, 80))
    score = symusic.Score(1)
    score.tracks.append(track)
    theirs = score.pianoroll(modes=["frame"], pitch_range=[0, 128])[0, 0] > 0  # (pitches, columns)
    title, *lines = roll_lines(notes)
    assert "0.05 s per column" in title and theirs.shape[1] <= COLUMNS
    top = max(note.pitch for note in notes)
    for number, line in enumerate(lines):
        cells = line[6:].ljust(theirs.shape[1])
        assert [cell != " " for cell in cells] == theirs[top - number].tolist()
    assert sum(line.count("o") for line in lines) == len(notes)
