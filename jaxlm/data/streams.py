"""Streams: row b of each batch continues row b of the previous batch.

For models that carry a state from batch to batch: truncated backpropagation through time (Zaremba et al., 2014,
"Recurrent neural network regularization", section 4.1), the memory of Transformer-XL (Dai et al., 2019). As in
the other layouts, the batch is arithmetic on the step; it also depends on the batch size, and on a seed only if the
windows vary or carries are emptied at random.
"""

import bisect
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np

from jaxlm.data.batch import Batch, RandomNumbers
from jaxlm.data.layouts.streams import LONGER, Streams
from jaxlm.data.store import RowOrigin, Store
from jaxlm.errors import InputError


class Text:
    """Concatenated tokens of several stores. tokens: their number."""

    def __init__(self, stores: Sequence[Store]):
        self._stores = tuple(stores)
        self._starts = np.append(0, np.cumsum([store.num_tokens for store in stores], dtype=np.int64)).tolist()
        self.tokens: int = self._starts[-1]

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the tokens from `start` up to `end`, int32."""
        spans = [
            store.tokens[max(start - first, 0) : end - first]
            for store, first in zip(self._stores, self._starts, strict=False)
            if start < first + store.num_tokens and first < end
        ]
        return np.concatenate(spans, dtype=np.int32)

    def origins(self, start: int, end: int) -> list[RowOrigin]:
        """Return the origins of the tokens from `start` up to `end`, one per section of a store."""
        found = []
        for store, first in zip(self._stores, self._starts, strict=False):
            for section in store.sections:
                own = first + section.first_token
                token, last = max(start, own) - first, min(end, own + section.tokens) - first
                if token < last:
                    found.append(store.origin(section, token, last))
        return found


class FixedWindows:
    """Windows of `length` inputs of a stream of `size` inputs: the same in every epoch, the remainder left out."""

    note = ""

    def __init__(self, size: int, length: int):
        self._length, self.per_epoch = length, size // length
        self.unused = size - self.per_epoch * length

    def place(self, step: int) -> tuple[int, int]:
        """Return the first input of the window of a step, and its number of inputs."""
        return step % self.per_epoch * self._length, self._length

    def steps(self, epochs: float) -> int:
        """Return the steps of a number of epochs."""
        return max(1, math.ceil(epochs * self.per_epoch - 1e-9))

    def inputs(self, steps: int) -> int:
        """Return the inputs of a stream in the first `steps` steps."""
        return steps * self._length


class VariedWindows:
    """Windows of varied numbers of inputs, sampled for each epoch; the last of an epoch ends with the stream.

    A window has max(5, int(n)) inputs, n from N(length, 5), or with a probability of 5 % from N(length / 2, 5) (Merity
    et al., 2018, section 4.1; awd-lstm-lm, main.py:180-187), and at most length + LONGER, as in its finetune.py, so
    that all rows have one shape. The samples are a function of the seed and the epoch.
    """

    note, unused = ", in windows of varied lengths", 0

    def __init__(self, size: int, length: int, seed: int):
        self._size, self._length, self._seed = size, length, seed
        self._epochs: list[np.ndarray] = []  # first input of each window, and the size
        self._first_steps = [0]
        self._prepare(0)
        self.per_epoch = self._first_steps[1]

    def place(self, step: int) -> tuple[int, int]:
        """Return the first input of the window of a step, and its number of inputs."""
        epoch = self._epoch_of(step)
        starts, window = self._epochs[epoch], step - self._first_steps[epoch]
        return int(starts[window]), int(starts[window + 1] - starts[window])

    def steps(self, epochs: float) -> int:
        """Return the steps of a number of epochs."""
        whole = math.floor(epochs + 1e-9)
        self._prepare(whole)
        part = (epochs - whole) * (self._first_steps[whole + 1] - self._first_steps[whole])
        return max(1, self._first_steps[whole] + math.ceil(part - 1e-9))

    def inputs(self, steps: int) -> int:
        """Return the inputs of a stream in the first `steps` steps."""
        epoch = self._epoch_of(steps)
        return epoch * self._size + int(self._epochs[epoch][steps - self._first_steps[epoch]])

    def _epoch_of(self, step: int) -> int:
        while self._first_steps[-1] <= step:
            self._prepare(len(self._epochs))
        return bisect.bisect_right(self._first_steps, step) - 1

    def _prepare(self, epoch: int) -> None:
        for number in range(len(self._epochs), epoch + 1):
            starts = self._drawn(number)
            self._epochs.append(starts)
            self._first_steps.append(self._first_steps[-1] + len(starts) - 1)

    def _drawn(self, epoch: int) -> np.ndarray:
        key = np.random.SeedSequence((self._seed % 2**64, epoch)).generate_state(2, np.uint64)
        normal, starts = NormalDist(0.0, _SPREAD).inv_cdf, [0]
        numbers = RandomNumbers(key, (0, 0, 0, 0))
        while starts[-1] < self._size:
            short, place = numbers.fractions(2)
            mean = self._length / 2 if short < _SHORT_SHARE else self._length
            tokens = max(_FEWEST, int(mean + normal(max(place, 2.0**-53))))
            starts.append(min(starts[-1] + min(tokens, self._length + LONGER), self._size))
        return np.array(starts)


_SPREAD, _SHORT_SHARE, _FEWEST = 5.0, 0.05, 5


class StreamRows:
    """Endless rows of a run in streams: row r belongs to stream r % batch_size.

    The T concatenated tokens of the stores are split into B = batch_size streams of S = floor((T - 1) / B)
    inputs: stream b has the inputs b S to b S + S - 1, and the tokens that follow them as targets. Its rows are
    windows of it, one per step; the last target of a row is the first input of the next, and all streams have the same
    windows. Fixed windows have `length` inputs: S mod length inputs at the end of each stream are in no row. Varied
    windows are padded to `longest` inputs. (T - 1) mod B inputs at the end of the text are in no row. Every epoch has
    the same streams. rows: number of rows per epoch, of varied windows those of the first one. unused: number of inputs
    in no row. seed: of the varied windows and of the rows that begin with an empty carry, besides the first of each
    stream, with `reset_probability` (Melis et al., 2018, "On the state of the art of evaluation in neural language
    models"); these are a function of the seed and the row, other ones in each epoch.

    Raises InputError if the text is too short for one row per stream.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        length: int,
        batch_size: int,
        windows: Literal["fixed", "varied"] = "fixed",
        seed: int = 0,
        reset_probability: float = 0.0,
    ):
        self._text = Text(stores)
        inputs = max(self._text.tokens - 1, 0)
        if inputs < length * batch_size:
            most = inputs // length
            name, most, got = ("batch_size", most, batch_size) if most else ("length", inputs, length)
            raise InputError(
                f"{name} must be at most {most} for streams of {self._text.tokens:,} tokens in rows of {length}, "
                f"got {got}; give a smaller one, or more text"
            )
        self._data = Streams(windows=windows)
        self.batch_size, self.longest = batch_size, self._data.longest_row(length)
        self._weighted = any(section.weight is not None for store in stores for section in store.sections)
        self._stream, self._reset_probability = inputs // batch_size, reset_probability
        self._reset_key = np.random.SeedSequence(seed % 2**64, spawn_key=(0,)).generate_state(2, np.uint64)
        varied = windows == "varied"
        self.windows = VariedWindows(self._stream, length, seed) if varied else FixedWindows(self._stream, length)
        self.rows = self.windows.per_epoch * batch_size
        self.unused = inputs - (self._stream - self.windows.unused) * batch_size

    def empty(self, rows: int) -> Batch:
        """Return a batch of padding, (rows, longest)."""
        return self._data.empty(rows, self.longest)

    def read(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the rows of these indices as one batch, (len(indices), longest)."""
        batch = self.empty(len(indices))
        for b, index in enumerate(indices):
            start, tokens, first = self._place(int(index))
            span = self._text.read(start, start + tokens + 1)
            batch.fill_row(b, span[0], span[1:])
            batch.begins[b] = first or self._is_reset(int(index))
        return batch

    def origin(self, index: int) -> list[RowOrigin]:
        """Return the origins of a row's tokens, its last target included."""
        start, tokens, _ = self._place(index)
        return self._text.origins(start, start + tokens + 1)

    def inputs(self, steps: int) -> int:
        """Return the inputs of one stream in the first `steps` steps."""
        return self.windows.inputs(steps)

    def description(self) -> str:
        """Return one line on the streams for logs."""
        return (
            f"{self.batch_size} streams of {self._stream - self.windows.unused:,} tokens, {self.windows.per_epoch:,} "
            f"steps per epoch{self.windows.note}; {self.unused:,} tokens, at the ends of the streams and of the text, "
            "are in no row"
            + (f"; a row begins empty with probability {self._reset_probability}" if self._reset_probability else "")
            + ("; the weights given at preparation are not used" if self._weighted else "")
        )

    def _is_reset(self, index: int) -> bool:
        """Return True if row `index` is sampled to begin with an empty carry."""
        if not self._reset_probability:
            return False
        return bool(RandomNumbers(self._reset_key, (0, 0, 0, index)).fractions(1)[0] < self._reset_probability)

    def _place(self, index: int) -> tuple[int, int, bool]:
        """Return the token at which row `index` begins, its inputs, and whether it is the first of its stream."""
        step, stream = divmod(index, self.batch_size)
        start, tokens = self.windows.place(step)
        return stream * self._stream + start, tokens, start == 0
