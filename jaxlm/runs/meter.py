"""The speed of training, without the time that evaluation and compilation take."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """Speed over a stretch of training: what was done a second, the share of time waiting for data, seconds left."""

    tokens_per_second: float
    flops_per_second: float
    waiting: float
    eta: float


Work = Callable[[int], tuple[float, float]]


def even_work(tokens: float, flops_per_token: float) -> Work:
    """The work of a run whose steps all have `tokens` tokens."""
    return lambda step: (step * tokens, step * tokens * flops_per_token)


class Meter:
    """Times training, leaving out what is not: `with meter.pause("evaluation")` and `pause("compilation")`.

    `with meter.waiting()` marks the time that the step waits for data, which counts as training.
    total: the step at which training ends. work: step -> (tokens, FLOPs) of a whole run up to it; steps may differ, and
    the time left goes by tokens. clock: seconds, for tests.
    """

    def __init__(self, *, start: int, total: int, work: Work, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._total = total
        self._work = work
        self._begin = self._mark = clock()
        self._start = self._mark_step = self._step = start
        self._paused = 0.0  # since the mark
        self._waited = 0.0  # since the mark
        self._compiled = 0.0  # since the beginning: it does not come again, so the time left leaves it out
        self._is_paused = False

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Leave a section out of the speed; the time left counts evaluations and checkpoints, not "compilation"."""
        assert not self._is_paused, "a pause within a pause would be left out twice"
        self._is_paused = True
        began = self._clock()
        try:
            yield
        finally:
            self._is_paused = False
            seconds = self._clock() - began
            self._paused += seconds
            if what == "compilation":
                self._compiled += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time that the step waits for its batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self._step = step

    def read(self) -> Reading:
        """The speed since the last reading, and the time left at the pace since the beginning."""
        now = self._clock()
        active = max(now - self._mark - self._paused, 1e-9)
        (tokens, flops), (old_tokens, old_flops) = self._work(self._step), self._work(self._mark_step)
        done = tokens - self._work(self._start)[0]
        pace = (now - self._begin - self._compiled) / done if done else math.nan
        reading = Reading(
            tokens_per_second=(tokens - old_tokens) / active,
            flops_per_second=(flops - old_flops) / active,
            waiting=min(self._waited / active, 1.0),
            eta=max(self._work(self._total)[0] - tokens, 0) * pace,
        )
        self._mark, self._mark_step, self._paused, self._waited = now, self._step, 0.0, 0.0
        return reading
