"""Pieces for the parity with note_seq: files with pedal and tempo changes, notes that overlap, and random events."""

import io
import random

import mido

TICKS = 480  # per quarter note


def midi(*tracks: list[mido.Message], ticks: int = TICKS) -> bytes:
    """Return the content of a file of type 1. Times of the messages are in ticks from the beginning, in any order."""
    file = mido.MidiFile(type=1, ticks_per_beat=ticks)
    for messages in tracks:
        track, now = mido.MidiTrack(), 0
        for message in sorted(messages, key=lambda message: message.time):
            track.append(message.copy(time=message.time - now))
            now = message.time
        file.tracks.append(track)
    content = io.BytesIO()
    file.save(file=content)
    return content.getvalue()


def played(start: int, end: int, pitch: int, velocity: int = 80, channel: int = 0) -> list[mido.Message]:
    """Return the two messages of a note, in ticks."""
    begin = mido.Message("note_on", note=pitch, velocity=velocity, channel=channel, time=start)
    return [begin, mido.Message("note_off", note=pitch, velocity=0, channel=channel, time=end)]


def pedal(*times_and_values: tuple[int, int], channel: int = 0) -> list[mido.Message]:
    """Return messages of the sustain pedal, in ticks."""
    return [
        mido.Message("control_change", control=64, value=value, channel=channel, time=time)
        for time, value in times_and_values
    ]


def tempo(time: int, microseconds: int) -> mido.MetaMessage:
    """Return a change of the tempo, in microseconds per quarter note."""
    return mido.MetaMessage("set_tempo", tempo=microseconds, time=time)


def files() -> dict[str, bytes]:
    """Return pieces without overlapping notes of one pitch, which note_seq's reader ends together.

    No time is half a step, which note_seq rounds by the last bit of a sum.
    """
    rng, free = random.Random(7), [0] * 128
    notes: list[mido.Message] = []
    for start in sorted(rng.randrange(20_000) for _ in range(300)):
        pitch = rng.randrange(36, 84)
        if free[pitch] <= start:
            free[pitch] = start + rng.randrange(1, 900) + 1
            notes += played(start, free[pitch] - 1, pitch, rng.randrange(1, 128))
    presses = sorted(rng.sample(range(20_000), 40))
    values = [(time, 127 * (k % 2 == 0)) for k, time in enumerate(presses)]
    held = played(0, 100, 60) + played(300, 400, 60) + played(350, 900, 64) + played(1000, 1100, 67)
    return {
        "a rest of 12 s, and all velocities": midi(
            [m for v in range(1, 128) for m in played(11_520 + 60 * v, 11_550 + 60 * v, v, v)]
        ),
        "pedal": midi(held + pedal((50, 64), (500, 63), (950, 127), (1500, 0))),
        "pedal that stays down": midi(held + pedal((50, 127))),
        "random, with pedal and tempo changes": midi(
            [tempo(0, 400_007), tempo(7_001, 731_113)], notes + pedal(*values)
        ),
    }


def notes() -> dict[str, list[tuple[float, float, int, int]]]:
    """Return lists of (start, end, pitch, velocity), times in seconds, with notes of one pitch that overlap."""
    rng = random.Random(3)
    starts = [round(rng.uniform(0, 9), 4) for _ in range(400)]
    found = [
        (start, round(start + rng.expovariate(2), 4), rng.randrange(50, 60), rng.randrange(1, 128)) for start in starts
    ]
    return {
        "overlapping": [(0.0, 1.0, 60, 64), (0.1, 0.5, 60, 100), (0.2, 0.2, 62, 1), (0.5, 3.5, 60, 127)],
        "random": found,
    }


def ids() -> dict[str, list[int]]:
    """Return random ids of events: ends without a note, notes of no length, and notes that stay open."""
    rng = random.Random(5)
    few = [*range(60, 64), *range(188, 192), 256, 258, 300, *range(356, 388, 5)]
    return {"uniform": [rng.randrange(388) for _ in range(2000)], "few pitches": [rng.choice(few) for _ in range(2000)]}
