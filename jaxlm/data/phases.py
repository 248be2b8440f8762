"""Two lengths in one run: short rows for the first steps, long ones for the rest.

Devlin et al. (2019, appendix A.2): 90 % of the steps at 128 tokens, the rest at 512, where attention costs more and the
positions past 128 are learnt. Which phase a step is in is a function of the step; each phase has rows of its own, in
orders of its own, from its own epoch 0 on.
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
    """The phases of a run of num_steps, one or two. InputError where the short length is not a shorter one."""
    data.check()
    if not isinstance(data, SentencePairs) or not data.short_length:
        return (Phase(0, length, 0, num_steps),)
    if data.short_length >= length:
        raise InputError(
            f"data.short_length {data.short_length}: it must be below the length {length}, or 0 for one length"
        )
    border = round(data.short_share * num_steps)
    both = (Phase(0, data.short_length, 0, border), Phase(1, length, border, num_steps))
    return tuple(phase for phase in both if phase.end_step > phase.first_step)


def phase_at(step: int, all_phases: Sequence[Phase]) -> Phase:
    """The phase of a step; of one past the end, the last."""
    for phase in all_phases:
        if step < phase.end_step:
            return phase
    return all_phases[-1]


def trained_phase(step: int, all_phases: Sequence[Phase]) -> Phase:
    """The phase of the last of `step` updates, the longest that has begun; before the first update, the first."""
    return phase_at(max(step - 1, 0), all_phases)


def steps_of_passes(
    stores: Sequence[Store],
    data: DataConfig,
    *,
    length: int,
    batch_size: int,
    num_epochs: float,
    versions: DataVersions = CURRENT,
) -> int:
    """The steps of num_epochs passes; where the length changes on the way, the passes of its phases together."""
    passes = 0.0  # of one step
    for phase in phases(data, length=length, num_steps=1_000_000):
        share = (phase.end_step - phase.first_step) / 1_000_000
        passes += share * batch_size / rows_per_pass(stores, data, phase.length, batch_size, versions)
    return max(1, math.ceil(num_epochs / passes - 1e-9))


def rows_per_pass(
    stores: Sequence[Store], data: DataConfig, length: int, batch_size: int, versions: DataVersions = CURRENT
) -> int:
    """Return the rows in one pass over the stores. InputError where these are too short for a row."""
    if isinstance(data, Streams):
        return StreamRows(stores, length, batch_size).rows
    return sum(rows_per_epoch(stores, data, length, versions))


class PhasedRows:
    """The rows of all phases of a run, for the loader: row r belongs to step r // batch_size.

    phases: one or two. rows: of each. mask_seed: the seed of the masks of rows of text; None: they have none.
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
        """Return a batch of padding as phase `number` has them."""
        return self._with_seeds(self.rows[number].empty(rows), range(rows))

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch | PairBatch:
        """Return the rows of these indices, all of one step, as one batch."""
        number, first = self._phase(int(indices[0]))
        batch = self.rows[number].read([int(index) - first for index in indices])
        return self._with_seeds(batch, indices)

    def origin(self, index: int) -> list[RowOrigin] | list[PairOrigin]:
        """Where the pieces of a row came from, in their order."""
        number, first = self._phase(index)
        return self.rows[number].origin(index - first)

    def _with_seeds(self, batch: Any, indices: Sequence[int] | np.ndarray) -> Any:
        return batch if self._mask_seed is None else replace(batch, mask_seeds=mask_seeds(self._mask_seed, indices))

    def _phase(self, index: int) -> tuple[int, int]:
        """Which phase row `index` is in, and its first row."""
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
    """Return the rows of a run whose length may change on the way.

    versions: those of the run. masked: rows of text get the seeds that a masked language model draws its masks from.
    """
    mask_seed = seed if masked and data.layout != "pairs" else None  # rows of pairs have seeds of their own
    found = phases(data, length=length, num_steps=num_steps)
    if isinstance(data, Streams):
        streams = [StreamRows(stores, phase.length, batch_size) for phase in found]
        return PhasedRows(found, streams, batch_size, mask_seed)
    rows = [training_rows(stores, data, length=phase.length, seed=seed, versions=versions) for phase in found]
    return PhasedRows(found, rows, batch_size, mask_seed)
