"""Write tests/golden/performance.json from note_seq 0.0.5: `cd tests && python -m parity.freeze_performance`.

Needs `pip install --no-deps note-seq==0.0.5 protobuf==3.20.3`, pretty_midi, mido, absl-py, attrs, scipy and NumPy 1;
the rest of note_seq's requirements is not imported.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from parity import performance_case as case

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "performance.json"

package = ModuleType("note_seq")  # without its __init__, which imports everything
spec = importlib.util.find_spec("note_seq")
assert spec is not None and spec.submodule_search_locations is not None
package.__path__ = list(spec.submodule_search_locations)
sys.modules["note_seq"] = package

from note_seq import midi_io, performance_lib, sequences_lib  # noqa: E402
from note_seq.performance_encoder_decoder import PerformanceOneHotEncoding  # noqa: E402
from note_seq.protobuf import music_pb2  # noqa: E402

STEPS, BINS = 100, 32


def ids_of(sequence) -> list[int]:
    """Return the ids of a sequence of notes, with the pedal applied."""
    sequence = sequences_lib.apply_sustain_control_changes(sequence)
    quantized = sequences_lib.quantize_note_sequence_absolute(sequence, STEPS)
    performance = performance_lib.Performance(quantized, num_velocity_bins=BINS)
    return [PerformanceOneHotEncoding(BINS).encode_event(event) for event in performance]


def sequence_of(notes):
    """Return note_seq's sequence of (start, end, pitch, velocity)."""
    sequence = music_pb2.NoteSequence()
    for start, end, pitch, velocity in notes:
        sequence.notes.add(start_time=start, end_time=end, pitch=pitch, velocity=velocity)
    return sequence


def notes_of(ids: list[int]) -> list[list[int]]:
    """Return the sorted notes [start, end, pitch, velocity] of ids, times in steps."""
    performance = performance_lib.Performance(steps_per_second=STEPS, num_velocity_bins=BINS)
    for i in ids:
        performance.append(PerformanceOneHotEncoding(BINS).decode_event(i))
    notes = performance.to_sequence().notes
    return sorted([round(n.start_time * STEPS), round(n.end_time * STEPS), n.pitch, n.velocity] for n in notes)


def main() -> None:
    """Write the file."""
    frozen = {
        "files": {name: ids_of(midi_io.midi_to_note_sequence(content)) for name, content in case.files().items()},
        "notes": {name: ids_of(sequence_of(notes)) for name, notes in case.notes().items()},
        "ids": {name: notes_of(ids) for name, ids in case.ids().items()},
    }
    GOLDEN.write_text(json.dumps(frozen) + "\n")


if __name__ == "__main__":
    main()
