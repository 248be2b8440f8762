"""Vocabularies of musical events: notes to words and back.

A piece is a sequence of words: notes begin and end, and time passes in between, in steps of 10 ms, at most 100 in one
word. `performance` is the vocabulary of 388 events of Performance RNN and of the Music Transformer (Oore et al., 2018;
Huang et al., 2019), in the order of note_seq (performance_lib.py, PerformanceOneHotEncoding). `multitrack` has
MuseNet's form (Payne, 2019): a word is the instrument, the volume and the pitch together.

Within a step, notes end before others begin, each in the order of (start, pitch), with starts that are not rounded. A
note lasts at least one step. When words become notes, the end of a pitch ends its earliest note; an end without a note
has no effect, a note of no length is dropped, and notes that are open at the end of the piece end there.
"""

import functools
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlm.errors import InputError
from jaxlm.reading.midi import PITCHES, Note, read_notes, write_notes

STEPS_PER_SECOND = 100
LONGEST_SHIFT = 100  # steps
_HALF = 0.5 + 1e-6  # steps, so that a half is rounded up whatever the last bits of the time are
VELOCITY = 100  # of notes before which no velocity is set, note_seq's
_BINS, _BIN = 32, 4  # velocities 1 to 128 in bins of 4
_LEVELS, _LEVEL = 8, 16  # volumes 8, 24, …, 120 of velocities in bins of 16

# The 16 families of 8 programs each of General MIDI, and the percussion channel.
FAMILIES = (
    "piano",
    "chromatic_percussion",
    "organ",
    "guitar",
    "bass",
    "strings",
    "ensemble",
    "brass",
    "reed",
    "pipe",
    "synth_lead",
    "synth_pad",
    "synth_effects",
    "ethnic",
    "percussive",
    "sound_effects",
)
DRUMS = "drums"
_PROGRAMS = 8  # of a family


class Event(NamedTuple):
    """Meaning of a word.

    shift: steps that pass. velocity: of the notes that begin from here on, or of this one; 0: none is set. pitch: of a
    note that begins or, with `ends`, ends; -1: none. voice: its instrument.
    """

    shift: int = 0
    velocity: int = 0
    pitch: int = -1
    ends: bool = False
    voice: str = FAMILIES[0]


class Vocabulary(ABC):
    """A fixed vocabulary of events. name: on the command line. events: word -> meaning, in the order of the ids."""

    name: str

    def __init__(self) -> None:
        self.events: Mapping[str, Event] = self._events()
        self.words = tuple(self.events)

    def encode(self, notes: Iterable[Note]) -> list[str]:
        """Return the words of notes. Times are rounded to steps, halves up."""
        kept = sorted(filter(self.has, notes), key=lambda n: (n.start, n.pitch, voice_of(n), n.end, n.velocity))
        moments = []
        for number, note in enumerate(kept):
            start, end = (int(time * STEPS_PER_SECOND + _HALF) for time in (note.start, note.end))
            moments += [(start, number, False), (max(end, start + 1), number, True)]
        words: list[str] = []
        now, set_before = 0, ""
        for step, number, ends in sorted(moments):
            words += self._shifts(step - now)
            now = step
            *settings, word = self._end(kept[number]) if ends else self._begin(kept[number])
            for setting in settings:
                if setting != set_before:
                    words.append(setting)
                    set_before = setting
            words.append(word)
        return words

    def decode(self, words: Iterable[str]) -> list[Note]:
        """Return the notes of words, in the order in which they end. InputError for a word of another vocabulary."""
        opened: dict[tuple[str, int], deque[tuple[int, int]]] = defaultdict(deque)
        notes: list[Note] = []
        now, velocity = 0, VELOCITY

        def close(voice: str, pitch: int) -> None:
            start, loudness = opened[voice, pitch].popleft()
            if now > start:
                drum = voice == DRUMS
                program = 0 if drum else _PROGRAMS * FAMILIES.index(voice)
                notes.append(Note(start / STEPS_PER_SECOND, now / STEPS_PER_SECOND, pitch, loudness, program, drum))

        for word in words:
            event = self.meaning(word)
            now += event.shift
            velocity = event.velocity or velocity
            key = (event.voice, event.pitch)
            if event.ends and opened[key]:
                close(*key)
            elif event.pitch >= 0 and not event.ends:
                opened[key].append((now, velocity))
        for key, left in opened.items():
            for _ in range(len(left)):
                close(*key)
        return notes

    def meaning(self, word: str) -> Event:
        """Return the meaning of a word. InputError for a word of another vocabulary."""
        if word not in self.events:
            raise InputError(
                f"the text must have words of events:{self.name} only, for example {self.words[0]}, got {word!r:.60}; "
                "give a text or a piece of this vocabulary"
            )
        return self.events[word]

    def read(self, path: Path | str) -> list[Note]:
        """Return the notes of a MIDI file. InputError where it cannot be read, and without notes that have words."""
        notes = read_notes(path)
        if not any(map(self.has, notes)):
            raise InputError(f"{path} must have notes, got drums only; use events:multitrack, or leave it out")
        return notes

    def write(self, path: Path | str, words: Iterable[str]) -> None:
        """Write the notes of words to a MIDI file."""
        write_notes(path, self.decode(words))

    def before(self, words: Sequence[str], seconds: float) -> list[str]:
        """Return the first words of a piece, those of its events before a time. Notes that sound then stay open."""
        now, kept = 0, 0
        for number, word in enumerate(words, 1):
            now += self.meaning(word).shift
            if now >= seconds * STEPS_PER_SECOND:
                break
            if not self.meaning(word).shift:
                kept = number
        return list(words[:kept])

    @abstractmethod
    def has(self, note: Note) -> bool:
        """Return True if the vocabulary has words for a note."""

    @abstractmethod
    def _events(self) -> dict[str, Event]:
        """Return word -> meaning, in the order of the ids."""

    @abstractmethod
    def _begin(self, note: Note) -> tuple[str, ...]:
        """Return the words that begin a note; all but the last set what holds until it is set again."""

    @abstractmethod
    def _end(self, note: Note) -> tuple[str]:
        """Return the word that ends a note."""

    @abstractmethod
    def _shift(self, steps: int) -> str:
        """Return the word of up to LONGEST_SHIFT steps."""

    def _shifts(self, steps: int) -> list[str]:
        whole, rest = divmod(steps, LONGEST_SHIFT)
        return [self._shift(LONGEST_SHIFT)] * whole + [self._shift(rest)] * (rest > 0)


class Performance(Vocabulary):
    """388 events: 128 notes begin, 128 end, time shifts of 1 to 100 steps, 32 velocities, in this order.

    Instruments are not told apart, and drums, whose pitches are instruments, have no words.
    """

    name = "performance"

    def has(self, note: Note) -> bool:
        return not note.drum

    def _events(self) -> dict[str, Event]:
        events = {f"on:{pitch}": Event(pitch=pitch) for pitch in range(PITCHES)}
        events |= {f"off:{pitch}": Event(pitch=pitch, ends=True) for pitch in range(PITCHES)}
        events |= {self._shift(steps): Event(shift=steps) for steps in range(1, LONGEST_SHIFT + 1)}
        return events | {f"velocity:{k}": Event(velocity=(k - 1) * _BIN + 1) for k in range(1, _BINS + 1)}

    def _begin(self, note: Note) -> tuple[str, ...]:
        return f"velocity:{(note.velocity - 1) // _BIN + 1}", f"on:{note.pitch}"

    def _end(self, note: Note) -> tuple[str]:
        return (f"off:{note.pitch}",)

    def _shift(self, steps: int) -> str:
        return f"shift:{steps}"


class Multitrack(Vocabulary):
    """19,684 events: INSTRUMENT:vVOLUME:PITCH, of 16 families and drums, and wait:1 to wait:100.

    Volumes are 0, which ends the note, and 8, 24, …, 120. The order is by instrument, then volume, then pitch.
    """

    name = "multitrack"

    def has(self, note: Note) -> bool:
        return True

    def _events(self) -> dict[str, Event]:
        events = {
            f"{voice}:v{volume}:{pitch}": Event(velocity=volume, pitch=pitch, ends=not volume, voice=voice)
            for voice in (*FAMILIES, DRUMS)
            for volume in (0, *(_LEVEL * k + _LEVEL // 2 for k in range(_LEVELS)))
            for pitch in range(PITCHES)
        }
        return events | {self._shift(steps): Event(shift=steps) for steps in range(1, LONGEST_SHIFT + 1)}

    def _begin(self, note: Note) -> tuple[str, ...]:
        volume = note.velocity // _LEVEL * _LEVEL + _LEVEL // 2
        return (f"{voice_of(note)}:v{volume}:{note.pitch}",)

    def _end(self, note: Note) -> tuple[str]:
        return (f"{voice_of(note)}:v0:{note.pitch}",)

    def _shift(self, steps: int) -> str:
        return f"wait:{steps}"


def voice_of(note: Note) -> str:
    """Return the family of a note's program, or DRUMS."""
    return DRUMS if note.drum else FAMILIES[note.program // _PROGRAMS]


def varied(notes: Iterable[Note], transpose: int, stretch: float) -> list[Note]:
    """Return the notes `transpose` semitones higher and `stretch` times as long; none if one would be out of range.

    Drums keep their pitches.
    """
    moved = [(note, note.pitch + (0 if note.drum else transpose)) for note in notes]
    if not all(0 <= pitch < PITCHES for _, pitch in moved):
        return []
    return [note._replace(start=note.start * stretch, end=note.end * stretch, pitch=pitch) for note, pitch in moved]


VOCABULARIES: Mapping[str, type[Vocabulary]] = {kind.name: kind for kind in (Performance, Multitrack)}
PERFORMANCE = Performance.name


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of a name in VOCABULARIES."""
    return VOCABULARIES[name]()
