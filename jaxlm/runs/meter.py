"""Training speed, without the time for evaluation and compilation."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """Speed over an interval: tokens and FLOPs per second, the fraction of time waiting for data, seconds left.

    tokens: the total number of tokens that were trained so far.
    """

    tokens: float
    tokens_per_second: float
    flops_per_second: float
    waiting: float
    eta: float


Work = Callable[[int], tuple[float, float]]


def even_work(tokens: float, flops_per_token: float) -> Work:
    """Return the `Work` of a run with `tokens` tokens in every step."""

    def work(step: int) -> tuple[float, float]:
        return step * tokens, step * tokens * flops_per_token

    return work


class Meter:
    """Meter of training time: `pause("evaluation")` and `pause("compilation")` are context managers that stop it.

    `with meter.waiting()` measures the time that a step waits for data, which counts as training.
    total: the last step. work: step -> (tokens, FLOPs) from step 0 to it; steps may differ in length, so the time left
    is estimated from tokens. clock: returns seconds, replaced in tests.
    """

    def __init__(self, *, start: int, total: int, work: Work, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._total = total
        self._work = work
        self._begin = self._mark = clock()
        self._start = self._mark_step = self._step = start
        self._paused = 0.0  # since the mark
        self._waited = 0.0  # since the mark
        self._compiled = 0.0  # since the start; excluded from the time left, as it does not recur
        self._is_paused = False

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Exclude a section from the speed. The time left includes evaluations and checkpoints, not "compilation"."""
        assert not self._is_paused, "nested pauses would be subtracted twice"
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
        """Measure the time that a step waits for its batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def advance(self, step: int) -> None:
        """Record that `step` steps are done."""
        self._step = step

    def read(self) -> Reading:
        """Return the speed since the last reading, and the time left at the average pace since the start."""
        now = self._clock()
        active = max(now - self._mark - self._paused, 1e-9)
        (tokens, flops), (old_tokens, old_flops) = self._work(self._step), self._work(self._mark_step)
        done = tokens - self._work(self._start)[0]
        pace = (now - self._begin - self._compiled) / done if done else math.nan
        reading = Reading(
            tokens=tokens,
            tokens_per_second=(tokens - old_tokens) / active,
            flops_per_second=(flops - old_flops) / active,
            waiting=min(self._waited / active, 1.0),
            eta=max(self._work(self._total)[0] - tokens, 0) * pace,
        )
        self._mark, self._mark_step, self._paused, self._waited = now, self._step, 0.0, 0.0
        return reading
