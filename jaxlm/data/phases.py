"""Phases of a run: short rows in the first steps, long rows in the rest.

Devlin et al. (2019, appendix A.2): 90 % of the steps at 128 tokens, the rest at 512, where attention costs more and the
positions beyond 128 are learned. The phase is a function of the step. Each phase has its own rows and its own order of
them, from its own epoch 0 on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxlm.data.batch import Batch, PairBatch, mask_seeds
from jaxlm.data.config import DataConfig, SentencePairs, Streams
from jaxlm.data.origin import PairOrigin, RowOrigin
from jaxlm.data.rows import TrainingRows, rows_per_epoch, training_rows
from jaxlm.data.store import Store
from jaxlm.data.streams import StreamRows
from jaxlm.data.versions import CURRENT, DataVersions
from jaxlm.errors import InputError


@dataclass(frozen=True)
class Phase:
    """Steps first_step to end_step - 1 of a run, in rows of `length`."""

    number: int
    length: int
    first_step: int
    end_step: int


def phases(data: DataConfig, *, length: int, num_steps: int) -> tuple[Phase, ...]:
    """Return the one or two phases of a run. Raises InputError unless the short length is below `length`."""
    data.check()
    if not isinstance(data, SentencePairs) or not data.short_length:
        return (Phase(0, length, 0, num_steps),)
    if data.short_length >= length:
        raise InputError(
            f"data.short_length must be below length {length}, got {data.short_length}; give a smaller one, or 0 for a "
            "single length"
        )
    boundary = round(data.short_share * num_steps)
    both = (Phase(0, data.short_length, 0, boundary), Phase(1, length, boundary, num_steps))
    return tuple(phase for phase in both if phase.end_step > phase.first_step)


def phase_at(step: int, all_phases: Sequence[Phase]) -> Phase:
    """Return the phase of a step, or the last phase for steps beyond the end."""
    for phase in all_phases:
        if step < phase.end_step:
            return phase
    return all_phases[-1]


def trained_phase(step: int, all_phases: Sequence[Phase]) -> Phase:
    """Return the phase of the last of `step` updates; before the first update, the first phase."""
    return phase_at(max(step - 1, 0), all_phases)


def steps_of_passes(
    stores: Sequence[Store],
    data: DataConfig,
    *,
    length: int,
    batch_size: int,
    num_epochs: float,
    versions: DataVersions = CURRENT,
    seed: int = 0,
) -> int:
    """Return the number of steps of num_epochs passes, summed over the phases. seed: the run's."""
    if isinstance(data, Streams):
        return StreamRows(stores, length, batch_size, data.windows, seed).windows.steps(num_epochs)
    passes = 0.0  # per step
    for phase in phases(data, length=length, num_steps=1_000_000):
        fraction = (phase.end_step - phase.first_step) / 1_000_000
        passes += fraction * batch_size / rows_per_pass(stores, data, phase.length, batch_size, versions)
    return max(1, math.ceil(num_epochs / passes - 1e-9))


def rows_per_pass(
    stores: Sequence[Store],
    data: DataConfig,
    length: int,
    batch_size: int,
    versions: DataVersions = CURRENT,
    seed: int = 0,
) -> int:
    """Return the number of rows in one pass over the stores. Raises InputError if they are too short for a row."""
    if isinstance(data, Streams):
        return StreamRows(stores, length, batch_size, data.windows, seed).rows
    return sum(rows_per_epoch(stores, data, length, versions))


class PhasedRows:
    """Rows of all phases of a run: row r belongs to step r // batch_size.

    phases: one or two. rows: those of each phase. mask_seed: seed of the masks of rows of text, or None for no masks.
    """

    def __init__(
        self,
        all_phases: Sequence[Phase],
        rows: Sequence[TrainingRows | StreamRows],
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

    def slots(self, step: int) -> list[tuple[int, int]]:
        """Return the length of each phase, and the tokens of its rows in the first `step` steps of the run."""
        found = []
        for phase, rows in zip(self.phases, self.rows, strict=True):
            steps = min(max(step, phase.first_step), phase.end_step) - phase.first_step
            fixed = steps * self.batch_size * phase.length
            found.append((phase.length, rows.slots(steps) if isinstance(rows, StreamRows) else fixed))
        return found

    def origin(self, index: int) -> list[RowOrigin] | list[PairOrigin]:
        """Return the origins of the tokens of a row, in order."""
        number, first = self._phase(index)
        return self.rows[number].origin(index - first)

    def _with_seeds(self, batch: Any, indices: Sequence[int] | np.ndarray) -> Any:
        return batch if self._mask_seed is None else replace(batch, mask_seeds=mask_seeds(self._mask_seed, indices))

    def _phase(self, index: int) -> tuple[int, int]:
        """Return the number of the phase of row `index`, and its first row."""
        phase = phase_at(index // self.batch_size, self.phases)
        return self.phases.index(phase), phase.first_step * self.batch_size


def phased_rows(
    stores: Sequence[Store],
    data: DataConfig,
    *,
    length: int,
    seed: int,
    num_steps: int,
    batch_size: int,
    versions: DataVersions = CURRENT,
    masked: bool = False,
) -> PhasedRows:
    """Return the rows of all phases of a run.

    versions: those of the run. masked: whether rows of text get seeds for the masks of a masked language model.
    """
    mask_seed = seed if masked and data.layout != "pairs" else None  # rows of pairs have their own seeds
    found = phases(data, length=length, num_steps=num_steps)
    if isinstance(data, Streams):
        streams = [
            StreamRows(stores, phase.length, batch_size, data.windows, seed, data.reset_probability) for phase in found
        ]
        return PhasedRows(found, streams, batch_size, mask_seed)
    rows = [training_rows(stores, data, length=phase.length, seed=seed, versions=versions) for phase in found]
    return PhasedRows(found, rows, batch_size, mask_seed)
