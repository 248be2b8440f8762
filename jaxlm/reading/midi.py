"""Notes of MIDI files, read and written with symusic.

A file is a Standard MIDI File of type 0 or 1 (MIDI 1.0, RP-001). Tempo changes of every track count for all tracks, and
a note of a pitch that sounds already ends after the earlier one: first in, first out. Notes that never end are left
out. The sustain pedal lengthens notes by the rule of note_seq (sequences_lib.py, apply_sustain_control_changes), which
the data of the Music Transformer were made with.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlm.errors import InputError
from jaxlm.files import write_file
from jaxlm.reading.lines import open_input

EXTRA = "run launch/setup.sh cpu music, or pip install 'jaxlm[music]'"
SUFFIXES = (".mid", ".midi")
PITCHES = 128
DAMAGED = "replace it, or leave it out"
LONGEST = 24 * 3600  # seconds; a damaged file may last for years
_SUSTAIN, _DOWN = 64, 64  # the controller, and the lowest value of a pedal that is down
# A tick of a file that is written is 1 ms: 120 quarter notes per minute.
_TICKS_PER_QUARTER, _QUARTERS_PER_MINUTE, _TICKS_PER_SECOND = 500, 120.0, 1000
# Events at the same time in the order in which they are processed.
_PEDAL_DOWN, _PEDAL_UP, _BEGIN, _END = range(4)


class Note(NamedTuple):
    """A note. start, end: in seconds. pitch: 0 to 127. velocity: 1 to 127. program: 0 to 127, of General MIDI.

    drum: True for a note of the percussion channel, whose pitch is an instrument.
    """

    start: float
    end: float
    pitch: int
    velocity: int
    program: int = 0
    drum: bool = False


def is_midi(path: Path | str) -> bool:
    """Return True if a path has the suffix of a MIDI file."""
    return Path(path).suffix.lower() in SUFFIXES


def read_notes(path: Path | str) -> list[Note]:
    """Return the notes of a MIDI file, at least one, in no particular order. .gz, .xz and .zst are decompressed.

    InputError for a file that is damaged, empty, without notes, or timed by SMPTE frames, and without symusic.
    """
    symusic = _symusic(str(path))
    with open_input(path, decompress=True) as file:
        content = file.read()
    if not content:
        raise InputError(f"{path} must be a MIDI file, got an empty one; {DAMAGED}")
    if content[:4] == b"MThd" and len(content) >= 14 and content[12] & 0x80:
        raise InputError(f"{path} must be timed in ticks per quarter note, got SMPTE frames; convert it")
    try:
        score = symusic.Score.from_midi(content)
        if score.ticks_per_quarter < 1:
            raise ValueError("0 ticks per quarter note")
        found = [note for track in score.tracks for note in _notes_of(track, score)]
    except (RuntimeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path} must be a MIDI file, got one that cannot be read ({reason}); {DAMAGED}") from None
    if not found:
        raise InputError(f"{path} must have notes, got none; {DAMAGED}")
    if (end := max(note.end for note in found)) > LONGEST:
        raise InputError(f"{path} must end within 24 hours, got {end / 3600:,.0f} hours; {DAMAGED}")
    return found


def write_notes(path: Path | str, notes: Iterable[Note]) -> None:
    """Write notes to a MIDI file of type 1: a track per program, and one of the drums. Times are rounded to 1 ms."""
    symusic = _symusic(str(path))
    score = symusic.Score(_TICKS_PER_QUARTER)
    score.tempos.append(symusic.Tempo(0, _QUARTERS_PER_MINUTE))
    tracks: dict[tuple[bool, int], Any] = {}
    for note in sorted(notes, key=lambda note: (note.drum, note.program, note.start, note.end)):
        voice = (note.drum, 0 if note.drum else note.program)
        if voice not in tracks:
            tracks[voice] = symusic.Track("drums" if note.drum else "", voice[1], note.drum)
        start, end = (round(time * _TICKS_PER_SECOND) for time in (note.start, note.end))
        tracks[voice].notes.append(symusic.Note(start, end - start, note.pitch, note.velocity))
    for track in tracks.values():
        score.tracks.append(track)
    write_file(Path(path), score.dumps_midi())


def _notes_of(track: Any, score: Any) -> list[Note]:
    """Return the notes of a track, with those that the pedal lengthens."""
    columns = track.notes.numpy()
    starts, pitches = columns["time"].tolist(), columns["pitch"].tolist()
    ends = (columns["time"] + columns["duration"]).tolist()
    pedal = [(control.time, control.value >= _DOWN) for control in track.controls if control.number == _SUSTAIN]
    if pedal and not track.is_drum:
        ends = sustained(list(zip(starts, ends, pitches, strict=True)), pedal)
    velocities = columns["velocity"].tolist()
    notes = zip(_seconds(starts, score), _seconds(ends, score), pitches, velocities, strict=True)
    voice = (track.program, track.is_drum)
    return [Note(*note, *voice) for note, end in zip(notes, ends, strict=True) if end >= 0]


def sustained(notes: Sequence[tuple[int, int, int]], pedal: Sequence[tuple[int, bool]]) -> list[int]:
    """Return the ends of notes (start, end, pitch) of a track under a sustain pedal; -1: the note is left out.

    pedal: (time, whether it is down). While it is down, a note lasts until the pedal is up or the next note of its
    pitch begins. Of two that begin together the later one is kept.
    """
    moments = [(time, _PEDAL_DOWN if down else _PEDAL_UP, -1) for time, down in pedal]
    for number, (start, end, _) in enumerate(notes):
        moments += [(start, _BEGIN, number), (end, _END, number)]
    moments.sort(key=lambda moment: moment[:2])
    ends = [end for _, end, _ in notes]
    sounding: list[int] = []
    down = False
    for time, kind, number in moments:
        if kind in (_PEDAL_DOWN, _PEDAL_UP):
            down = kind == _PEDAL_DOWN
            if not down:
                held = [k for k in sounding if ends[k] >= time]
                for k in sounding:
                    ends[k] = max(ends[k], time)
                sounding = held
        elif kind == _BEGIN:
            if down:
                for k in [k for k in sounding if notes[k][2] == notes[number][2]]:
                    ends[k] = time if notes[k][0] < time else -1
                    sounding.remove(k)
            sounding.append(number)
        elif not down and number in sounding:
            sounding.remove(number)
    for k in sounding:
        ends[k] = moments[-1][0]
    return ends


def _seconds(ticks: Sequence[int], score: Any) -> list[float]:
    """Return times in seconds by the tempo changes of all tracks, from sums of integers, which are exact."""
    tempos = {0: 500_000} | {tempo.time: tempo.mspq for tempo in sorted(score.tempos, key=lambda tempo: tempo.time)}
    changes, per_quarter = np.array(list(tempos), np.int64), np.array(list(tempos.values()), np.int64)
    before = np.concatenate([[0], np.cumsum(np.diff(changes) * per_quarter[:-1])])  # microseconds times ticks
    at = np.asarray(ticks, np.int64)
    last = np.maximum(np.searchsorted(changes, at, side="right") - 1, 0)
    elapsed = before[last] + (at - changes[last]) * per_quarter[last]
    return (elapsed / (score.ticks_per_quarter * 1e6)).tolist()


def _symusic(path: str) -> Any:
    try:
        import symusic
    except ImportError as error:
        raise InputError(f"{path} needs symusic, which is not installed; {EXTRA}") from error
    return symusic
