"""Sizes that batches of text are padded to, few enough that compiling their programs does not outweigh the padding."""

from collections import Counter
from collections.abc import Callable, Sequence

import jax

Sizes = tuple[int, ...]

# FLOPs in the time in which a program is compiled: 1.3 s on a CPU core for GPT-2 of 4 x 256, at 60 GFLOP/s. On
# accelerators, about a second at 100 TFLOP/s.
_CPU, _ACCELERATOR = 8e10, 1e14


def program_flops() -> float:
    """Return the FLOPs that the default devices do in about the time in which a program is compiled."""
    return _CPU if jax.default_backend() == "cpu" else _ACCELERATOR


class PaddedSizes:
    """The sizes of the batches of an evaluation, a block of batches at a time. Each size is a compiled program.

    Sizes are added while one more saves padding that is worth a program, by an estimate: as much as this block would
    save in each block so far. So a short evaluation has few programs, and a long one hardly pads. The choice depends on
    the batches only, so all processes choose the same sizes. rows: of a batch. flops(*sizes): those of a padded row.
    program: FLOPs that take as long as the compilation of a program.
    """

    def __init__(self, rows: int, flops: Callable[..., float], program: float) -> None:
        self._rows, self._flops, self._program, self._blocks = rows, flops, program, 0
        self._used: list[Sizes] = []

    def __call__(self, wanted: Sequence[Sizes]) -> list[Sizes]:
        """Return the sizes to pad each batch of a block to. wanted: the least sizes of each batch."""
        self._blocks += 1
        counts = Counter(wanted)
        largest = tuple(map(max, zip(*counts, strict=True)))
        if wanted and not any(_hold(used, largest) for used in self._used):
            self._used.append(largest)
        while counts:
            costs = {one: self._flops(*self._smallest(one)) for one in counts}
            own = {more: self._flops(*more) for more in counts}
            saved = {
                more: sum(n * max(costs[one] - own[more], 0) for one, n in counts.items() if _hold(more, one))
                for more in counts
            }
            best = max(saved, key=lambda more: saved[more])
            if self._rows * saved[best] * self._blocks <= self._program:
                break
            self._used.append(best)
        return [self._smallest(one) for one in wanted]

    def _smallest(self, wanted: Sizes) -> Sizes:
        return min((used for used in self._used if _hold(used, wanted)), key=lambda used: self._flops(*used))


def batch_length(length: int, longest: int) -> int:
    """Return the length that a batch is padded to: that of its longest row up to 16, then the smallest of 20, 24, 28,
    32, 40, 48, 56, 64, 80, … and `longest` that is at least as long.

    Rows are sorted by length, so short sentences, as those of BLiMP, are hardly padded. `PaddedSizes` chooses the
    lengths that are worth a program.
    """
    step = 1 if length <= 16 else 4
    while length > 8 * step and step > 1:
        step *= 2
    return min(-(-length // step) * step, longest)


def _hold(sizes: Sizes, wanted: Sizes) -> bool:
    return all(size >= least for size, least in zip(sizes, wanted, strict=True))
