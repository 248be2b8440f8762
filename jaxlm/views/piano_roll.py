"""Piano rolls in text: a line per pitch, from high to low, and a column per stretch of time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from jaxlm.reading.midi import Note
from jaxlm.text.events import DRUMS, voice_of
from jaxlm.wording import counted

COLUMNS = 96
BEGINS, LASTS, SILENCE = "o", "-", " "
_RESOLUTIONS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds per column
_NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


def roll_lines(notes: Sequence[Note]) -> Iterator[str]:
    """Yield the roll of each instrument, from the first note of the piece to its last, or a line if there is no note.

    A note begins with `o` and lasts as long as `-` follows. Where two of a pitch overlap, the later one is drawn.
    """
    if not notes:
        yield "no notes"
        return
    first, last = min(note.start for note in notes), max(note.end for note in notes)
    each = next((size for size in _RESOLUTIONS if (last - first) / size <= COLUMNS), (last - first) / COLUMNS)
    voices = defaultdict(list)
    for note in notes:
        voices[voice_of(note)].append(note)
    for voice, own in voices.items():
        yield f"{voice}: {counted(len(own), 'note')}, {first:.2f} to {last:.2f} s, {each:g} s per column"
        yield from _lines_of(own, first, each, is_drums=voice == DRUMS)


def _lines_of(notes: Sequence[Note], first: float, each: float, *, is_drums: bool) -> Iterator[str]:
    rows: dict[int, list[str]] = defaultdict(lambda: [SILENCE] * (COLUMNS + 1))
    for note in sorted(notes):
        begin, end = (round((time - first) / each, 6) for time in (note.start, note.end))
        for column in range(int(begin), min(max(int(begin) + 1, -int(-end // 1)), COLUMNS + 1)):
            rows[note.pitch][column] = BEGINS if column == int(begin) else LASTS
    # Drums are instruments, so that no line is drawn for those that are not played.
    pitches = sorted(rows) if is_drums else range(min(rows), max(rows) + 1)
    for pitch in reversed(pitches):
        name = str(pitch) if is_drums else f"{_NAMES[pitch % 12]}{pitch // 12 - 1}"
        yield f"{name:>4} |{''.join(rows[pitch])}".rstrip()
