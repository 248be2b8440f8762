"""Span corruption: a text with spans left out, and the spans (Raffel et al., 2020, section 3.1.4).

The lengths are those of T5's code (t5/data/preprocessors.py, random_spans_helper and random_spans_noise_mask): 568
tokens become a source of 512 and a target of 114. Text and spans alternate, the text first and a span last, and the
lengths of each are a uniform composition of their sum. The source has a sentinel in place of each span; the target has
the sentinels, each followed by its span. Both end with the end token.
"""

from typing import TYPE_CHECKING

import numpy as np

from jaxlm.data.batch import Batch, RandomNumbers
from jaxlm.errors import InputError
from jaxlm.text.tokenizer import target_marks

if TYPE_CHECKING:
    from jaxlm.data.layouts.spans import Spans
    from jaxlm.data.store import RowOrigin, Section, Store

SENTINELS = 100  # of T5's vocabulary


def num_noise(tokens: int, density: float) -> int:
    """Return the number of tokens that are left out of a text of `tokens`, at least 2: one is left, one is not."""
    return min(max(round(tokens * density), 1), tokens - 1)


def num_spans(tokens: int, density: float, mean_length: float) -> int:
    """Return the number of spans, each with at least one token, as the text between them."""
    noise = num_noise(tokens, density)
    return min(max(round(noise / mean_length), 1), noise, tokens - noise)


def longest_text(length: int, density: float, mean_length: float) -> int:
    """Return the most tokens of which the source, with sentinels and the end token, has at most `length`."""
    tokens = length
    while tokens > 2 and source_tokens(tokens, density, mean_length) > length:
        tokens -= 1
    while source_tokens(tokens + 1, density, mean_length) <= length:
        tokens += 1
    return tokens


def source_tokens(tokens: int, density: float, mean_length: float) -> int:
    """Return the length of the source of a text, with the end token."""
    return tokens - num_noise(tokens, density) + num_spans(tokens, density, mean_length) + 1


def span_mask(tokens: int, density: float, mean_length: float, random: RandomNumbers) -> np.ndarray:
    """Return the tokens that are left out, bool (tokens,), in spans of `mean_length` tokens on average."""
    noise, spans = num_noise(tokens, density), num_spans(tokens, density, mean_length)
    lengths = np.stack([composition(tokens - noise, spans, random), composition(noise, spans, random)], axis=1)
    return np.repeat(np.tile([False, True], spans), lengths.reshape(-1))


def token_mask(tokens: int, density: float, random: RandomNumbers) -> np.ndarray:
    """Return the tokens that are left out, bool (tokens,), each as likely as any other."""
    mask = np.zeros(tokens, bool)
    mask[np.argsort(random.fractions(tokens), kind="stable")[: num_noise(tokens, density)]] = True
    return mask


def composition(total: int, parts: int, random: RandomNumbers) -> np.ndarray:
    """Return `parts` positive integers with this total, int64, each composition as likely as any other."""
    chosen = np.argsort(random.fractions(total - 1), kind="stable")[: parts - 1] + 1
    return np.diff(np.concatenate([[0], np.sort(chosen), [total]]))


def corrupted(tokens: np.ndarray, mask: np.ndarray, sentinels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and the target of a text, int64. mask: the tokens that are left out; runs of them are spans."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    marks = sentinels[np.cumsum(begins) - 1]
    source = np.where(begins, marks, tokens)[begins | ~mask]
    places = np.flatnonzero(begins[mask])
    target = np.insert(tokens[mask], places, marks[begins])
    return np.append(source, end), np.append(target, end)


class CorruptedSection:
    """Rows of a section: consecutive texts of equal length, the last of which may be short, each corrupted anew in each
    epoch."""

    def __init__(self, store: "Store", section: "Section", data: "Spans", *, length: int, seed: int, number: int):
        self.store, self.section, self._data, self._number = store, section, data, number
        self._tokens, self._text = store.tokens, data.text_length(length)
        self._key = np.array([seed % 2**64, data.data_order << 56 | length], np.uint64)
        tokenizer = data.with_special_tokens(store.tokenizer())
        self._sentinels = np.array(tokenizer.sentinels, np.int64)
        self._start, self._end = target_marks(tokenizer.specials, f"the tokenizer of {store.place}")
        needed = data.most_sentinels(length)
        if needed > len(self._sentinels):
            raise InputError(
                f"length must leave at most {len(self._sentinels)} spans, the sentinels of the tokenizer of "
                f"{store.place}, got {length} with {needed}; give a shorter one"
            )
        whole, rest = divmod(section.tokens, self._text)
        self.rows = whole + (rest > 1)
        self.targets = self.rows

    def fill(self, row: int, batch: Batch, b: int, epoch: int) -> None:
        """Write row `row` of an epoch into row b of a batch."""
        first, count = self._place(row)
        random = RandomNumbers(self._key, [0, row, epoch, self._number])
        text = np.asarray(self._tokens[first : first + count], np.int64)
        source, target = self._data.corrupt(text, random, self._sentinels, self._end)
        batch.source[b, : len(source)], batch.source_segments[b, : len(source)] = source, 1
        batch.fill_row(b, self._start, target)

    def origin(self, row: int, epoch: int) -> "list[RowOrigin]":
        """Return the origin of a row's text."""
        first, count = self._place(row)
        return [self.store.origin(self.section, first, first + count)]

    def _place(self, row: int) -> tuple[int, int]:
        start = row * self._text
        return self.section.first_token + start, min(self._text, self.section.tokens - start)
