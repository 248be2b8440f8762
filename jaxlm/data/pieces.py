"""Pieces of music as documents: the words of a MIDI file, and of its transposed and stretched copies.

The copies are those of the Music Transformer's data (magenta, score2perf.py): each stretch of time with each
transposition; a copy with a note out of range is left out.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxlm.errors import InputError
from jaxlm.reading.midi import PITCHES
from jaxlm.text.events import PERFORMANCE, varied, vocabulary

SEMITONE = 1
STRETCH_STEP = 0.025  # of score2perf: 0.95, 0.975, 1, 1.025, 1.05
_LARGEST_STRETCH = 10.0


@dataclass(frozen=True)
class Copies:
    """Copies of each piece: one per stretch of time and, within it, per transposition.

    events: name of the vocabulary of their words. transpose: semitones. stretch: factors of the duration.
    """

    events: str = PERFORMANCE
    transpose: tuple[int, ...] = (0,)
    stretch: tuple[float, ...] = (1.0,)

    @functools.cached_property
    def each(self) -> list[tuple[float, int]]:
        """(stretch, transposition) of each copy."""
        return list(itertools.product(self.stretch, self.transpose))


def copies_of(events: str, transpose: str, stretch: str) -> Copies:
    """Return the copies for the values LOW:HIGH of --transpose and --stretch, "" for none. InputError for others."""
    low, high = _bounds("--transpose", transpose, "whole semitones", "-3:3", int, 1 - PITCHES, PITCHES - 1)
    slow, fast = _bounds("--stretch", stretch, "factors", "0.95:1.05", float, STRETCH_STEP, _LARGEST_STRETCH)
    semitones = (0,) if not transpose else tuple(range(int(low), int(high) + 1, SEMITONE))
    steps = int((fast - slow) / STRETCH_STEP + 1e-6)
    factors = (1.0,) if not stretch else tuple(round(slow + k * STRETCH_STEP, 6) for k in range(steps + 1))
    return Copies(events, semitones, factors)


def read_piece(path: str, copies: Copies, begin: int, end: int | None) -> Iterator[str]:
    """Yield the words of copies [begin, end) of a MIDI file, separated by blanks.

    InputError for a file that cannot be read or has no notes with words.
    """
    music = vocabulary(copies.events)
    notes = music.read(path)
    for stretch, transpose in copies.each[begin:end]:
        if words := music.encode(varied(notes, transpose, stretch)):
            yield " ".join(words)


def _bounds(
    flag: str, value: str, what: str, example: str, kind: type[int] | type[float], least: float, most: float
) -> tuple[float, float]:
    """Return LOW and HIGH of a value LOW:HIGH, both 0 for ""."""
    if not value:
        return 0, 0
    try:
        low, high = (kind(part) for part in value.split(":"))
        fits = math.isfinite(low + high) and least <= low <= high <= most
    except ValueError:
        fits = False
    if not fits:
        raise InputError(
            f"{flag} must be LOW:HIGH, {what} from {least:g} to {most:g}, got {value!r}; give, for example, {example}"
        )
    return low, high
