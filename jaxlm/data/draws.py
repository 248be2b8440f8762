"""Counter-based random numbers of a row of pairs, generated on demand."""

from collections.abc import Sequence

import numpy as np

_WORDS = 16  # random words generated at a time


class Draws:
    """Random numbers of a row from Philox (Salmon et al., 2011), a function of a key and a counter.

    key: (2,) uint64. counter: four integers; the last three name the row. seeds: two 32-bit words for its masks.
    """

    def __init__(self, key: np.ndarray, counter: Sequence[int]):
        self._generator = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
        self._words = self._generator.random_raw(_WORDS).tolist()
        word = self._words.pop()
        self.seeds = (word & 0xFFFFFFFF, word >> 32)

    def below(self, count: int) -> int:
        """Return an integer from 0 to count - 1, uniform to within count / 2^64."""
        return (self._word() * count) >> 64

    def heads(self, tosses: int) -> int:
        """Return the number of heads in `tosses` fair coin tosses."""
        heads = 0
        while tosses > 0:
            heads += (self._word() >> max(0, 64 - tosses)).bit_count()
            tosses -= 64
        return heads

    def fractions(self, count: int) -> np.ndarray:
        """Return (count,) float64 in [0, 1), uniform multiples of 2^-53."""
        return (self._generator.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def _word(self) -> int:
        if not self._words:
            self._words = self._generator.random_raw(_WORDS).tolist()
        return self._words.pop()
