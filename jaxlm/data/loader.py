"""Loader of batches: the rows of a step, short ones in the first phase of a run, read by prefetching threads.

Devlin et al. (2019, appendix A.2): 90 % of the steps at 128 tokens, the rest at 512, where attention costs more and the
positions beyond 128 are learned. The phase is a function of the step. Each phase has its own rows and its own order of
them, from its own epoch 0 on.

Step s holds rows s * B to (s + 1) * B - 1 for any number of processes, each of which reads only its own rows. The
state of the loader is the number of the step.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from jaxlm.data.batch import Batch, PairBatch, mask_seeds
from jaxlm.data.config import DataConfig
from jaxlm.data.layouts.layout import Layout, Reading
from jaxlm.data.rows import TrainingRows
from jaxlm.data.sentence_streams import SentenceStreamRows
from jaxlm.data.store import PairOrigin, RowOrigin
from jaxlm.data.streams import StreamRows


@dataclass(frozen=True)
class Phase:
    """Steps first_step to end_step - 1 of a run, in rows of `length`."""

    number: int
    length: int
    first_step: int
    end_step: int


def phases(data: Layout, *, length: int, num_steps: int) -> tuple[Phase, ...]:
    """Return the one or two phases of a run. Raises InputError unless the short length is below `length`."""
    data.check()
    found, first = [], 0
    for number, (rows, fraction) in enumerate(data.lengths(length)):
        end = round(fraction * num_steps)
        found.append(Phase(number, rows, first, end))
        first = end
    return tuple(phase for phase in found if phase.end_step > phase.first_step) or tuple(found[-1:])


def phase_at(step: int, all_phases: Sequence[Phase]) -> Phase:
    """Return the phase of a step, or the last phase for steps beyond the end."""
    for phase in all_phases:
        if step < phase.end_step:
            return phase
    return all_phases[-1]


def trained_phase(step: int, all_phases: Sequence[Phase]) -> Phase:
    """Return the phase of the last of `step` updates; before the first update, the first phase."""
    return phase_at(max(step - 1, 0), all_phases)


class PhasedRows:
    """Rows of all phases of a run: row r belongs to step r // batch_size.

    phases: one or two phases. rows: the rows of each phase. mask_seed: seed of the masks of text, or None.
    """

    def __init__(
        self,
        all_phases: Sequence[Phase],
        rows: Sequence[TrainingRows | StreamRows | SentenceStreamRows],
        batch_size: int,
        mask_seed: int | None = None,
    ):
        self.phases, self.rows, self.batch_size = tuple(all_phases), tuple(rows), batch_size
        self._mask_seed = mask_seed

    def empty(self, number: int, rows: int) -> Batch | PairBatch:
        """Return a batch of padding with the shapes of phase `number`."""
        return self._with_seeds(self.rows[number].empty(rows), range(rows))

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch | PairBatch:
        """Return the rows of these indices, all of one step, as one batch."""
        number, first = self._phase(int(indices[0]))
        batch = self.rows[number].read([int(index) - first for index in indices])
        return self._with_seeds(batch, indices)

    def tokens_until(self, step: int) -> list[tuple[int, int]]:
        """Return the length of each phase, and the tokens of its rows in the first `step` steps of the run."""
        found = []
        for phase, rows in zip(self.phases, self.rows, strict=True):
            steps = min(max(step, phase.first_step), phase.end_step) - phase.first_step
            found.append((phase.length, rows.inputs(steps) * self.batch_size))
        return found

    def origin(self, index: int) -> list[RowOrigin] | list[PairOrigin]:
        """Return the origins of the tokens of a row, in order."""
        number, first = self._phase(index)
        return self.rows[number].origin(index - first)

    def _with_seeds(self, batch: Any, indices: Sequence[int] | np.ndarray) -> Any:
        if self._mask_seed is None or batch.mask_seeds is not None:  # rows of pairs have their own seeds
            return batch
        return replace(batch, mask_seeds=mask_seeds(self._mask_seed, indices))

    def _phase(self, index: int) -> tuple[int, int]:
        """Return the number of the phase of row `index`, and its first row."""
        phase = phase_at(index // self.batch_size, self.phases)
        return self.phases.index(phase), phase.first_step * self.batch_size


def phased_rows(data: DataConfig, reading: Reading, num_steps: int) -> PhasedRows:
    """Return the rows of all phases of a run of `num_steps`."""
    found = phases(data, length=reading.length, num_steps=num_steps)
    rows = [data.rows(replace(reading, length=phase.length)) for phase in found]
    return PhasedRows(found, rows, reading.batch_size, reading.seed if reading.masked else None)


_THREADS = 2

Rows = TrainingRows | StreamRows | SentenceStreamRows | PhasedRows


class _Batches(grain.MapDataset):
    """Grain data set whose element s is this process's rows of step first_step + s."""

    def __init__(self, rows: Rows, batch_size: int, host_rows: np.ndarray, first_step: int):
        super().__init__()
        self._rows, self._batch_size, self._host_rows, self._first_step = rows, batch_size, host_rows, first_step

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size - self._first_step

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return batch_at(self._rows, self._first_step + index, self._batch_size, self._host_rows)


def batches(
    rows: Rows, *, batch_size: int, host_rows: np.ndarray, first_step: int, prefetch: int = 4
) -> Iterator[Batch | PairBatch]:
    """Return the endless batches of steps first_step, first_step + 1, …, with `prefetch` read ahead (0: none).

    batch_size: rows of the global batch. host_rows: indices in it that this process reads, in this order.
    """
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(_Batches(rows, batch_size, np.asarray(host_rows), first_step).to_iter_dataset(options))


def batch_at(rows: Rows, step: int, batch_size: int, host_rows: np.ndarray | None = None) -> Any:
    """Return the batch of a step, or this process's rows of it: a PairBatch for rows of pairs, otherwise a Batch."""
    within = np.arange(batch_size) if host_rows is None else host_rows
    return rows.read([step * batch_size + int(row) for row in within])


def row_origins(rows: Rows, step: int, batch_size: int) -> list[list[RowOrigin] | list[PairOrigin]]:
    """Return the origins of each row of a step's global batch."""
    return [rows.origin(step * batch_size + row) for row in range(batch_size)]


def describe_rows(rows: Rows, step: int, batch_size: int, most: int = 8) -> str:
    """Return one line with the origins of the first `most` rows of a step."""
    named = []
    for row in range(min(batch_size, most)):
        first, *others = rows.origin(step * batch_size + row)
        named.append(f"{first} and {len(others)} more" if others else str(first))
    more = f", and {batch_size - most} more" if batch_size > most else ""
    return f"rows {step * batch_size} to {(step + 1) * batch_size - 1}: {', '.join(named)}{more}"
