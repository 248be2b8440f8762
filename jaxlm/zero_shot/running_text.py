"""Language-model texts: WikiText, the Penn Treebank, the One Billion Word Benchmark, enwik8 and text8.

Radford et al., 2019, section 3.1. The log-probability of the whole text, detokenized, is divided by the number
of units of the original file: words, characters or bytes. Published perplexities of word models count each line end as
a word, as it is a token to them; the value without line ends is there too, and the one per token, which depends on the
vocabulary. The text is one sequence, scored in overlapping windows, each token once; or read as one stream, if the
model was trained on streams and no window is asked for. lm-evaluation-harness scores each page of WikiText by itself.
"""

import codecs
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jaxlm.data.shards import blocks
from jaxlm.errors import InputError
from jaxlm.inference.scoring import Score, Scored
from jaxlm.models.family import DEFAULT_WINDOW, UNLIMITED
from jaxlm.progress import Progress
from jaxlm.reading.lines import Lines, open_input
from jaxlm.zero_shot.detokenizers import ONE_BILLION_WORDS, PTB, WIKITEXT, Detokenizer
from jaxlm.zero_shot.task import Measured, ZeroShotTask

WHOLE, TEST = 100_000_000, 5_000_000  # bytes of enwik8 and text8, and of the part at their end that is the test set
_FRAGMENT = 1 << 18
_BLOCKS = 256  # encoded at a time
_BATCHES = 4  # of windows that are scored together


@dataclass
class Units:
    """Numbers of units of the original file. not_invertible: lines (characters without a detokenizer)."""

    lines: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    not_invertible: int = 0


@dataclass
class Losses:
    """Sums over sequences: of losses in nats, of a number of units, and of their squares and products."""

    sequences: int = 0
    loss: float = 0.0
    units: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, loss: float, units: float) -> None:
        """Add a sequence."""
        self.sequences += 1
        self.loss += loss
        self.units += units
        for index, product in enumerate((loss * loss, loss * units, units * units)):
            self._squares[index] += product

    @property
    def stderr(self) -> float:
        """The standard error of the total loss, given the units of each sequence; nan for fewer than two."""
        if self.sequences < 2:
            return math.nan
        ratio = self.loss / self.units
        rest = self._squares[0] - 2 * ratio * self._squares[1] + ratio * ratio * self._squares[2]
        return math.sqrt(max(rest, 0.0) * self.sequences / (self.sequences - 1))

    def perplexity(self, units: float) -> tuple[float, float]:
        """Return the perplexity per unit for that number of units, and its standard error by the delta method."""
        value = math.exp(min(self.loss / units, 700.0))
        return value, value * self.stderr / units

    def bits(self, units: float) -> tuple[float, float]:
        """Return the bits per unit for that number of units, and the standard error."""
        return self.loss / units / math.log(2), self.stderr / units / math.log(2)


def windows(ids: Iterable[Sequence[int]], left: Sequence[int], *, length: int, stride: int) -> Iterator[Scored]:
    """Yield windows of a sequence of ids, which comes in parts, that score each id once.

    The first window scores `length` ids, each further one `stride`, given at most `length` ids before the last one and,
    but in the first window, at least length - stride + 1 before the first one. left: 0 or 1 id in front; without it the
    first id is not scored.
    """
    buffer, at, size = list(left), max(len(left), 1), length + 1 - max(len(left), 1)

    def window(end: int) -> Scored:
        begin = max(0, end - length - 1)
        return Scored(buffer[begin:end], at - begin)

    for part in ids:
        buffer += part
        while len(buffer) >= at + size:
            yield window(at + size)
            at, size = at + size, stride
        drop = max(0, at - length)
        buffer, at = buffer[drop:], at - drop
    if len(buffer) > at:
        yield window(len(buffer))


def measure(model, path: Path, options, *, text: "RunningText") -> Iterator[Measured]:
    """Yield the values of a text. InputError for a file without text, and for windows that do not fit."""
    length, stride = window_sizes(model.positions, options)
    reads_stream = model.stream is not None and options.context_length is None and options.stride is None
    if reads_stream:
        how = {"row_length": model.stream.length, "context": "the state after the row before"}
        yield from measure_whole(model, path, text, partial(_stream_scores, model), how)
    else:
        how = {"stride": stride, "context_length": length}
        scores = partial(_window_scores, model, length=length, stride=stride)
        yield from measure_whole(model, path, text, scores, how)


def _stream_scores(
    model, ids: Iterable[Sequence[int]], left: Sequence[int], report: Callable[[int], None]
) -> Iterator[Score]:
    """Yield the scores of rows of the ids. left, report: as in `_window_scores`."""
    for rows, score in enumerate(model.stream(model.params, chain([left], ids)), 1):
        report(rows * model.stream.length)
        yield score


def _window_scores(
    model,
    ids: Iterable[Sequence[int]],
    left: Sequence[int],
    report: Callable[[int], None],
    *,
    length: int,
    stride: int,
) -> Iterator[Score]:
    """Yield the scores of windows of the ids. left: as in `windows`. report: called with the number of tokens that are
    scored, after each batch.
    """
    found, before = windows(ids, left, length=length, stride=stride), 0

    def of_block(done: int) -> None:
        report((before + done) * stride)

    while some := list(islice(found, _BATCHES * model.batch_size)):
        for scores in model.scorer.tokens(model.params, some, of_block):
            yield scores.score
        before += len(some)


def window_sizes(longest: int, options) -> tuple[int, int]:
    """Return the context length and the stride of options; by default both are the longest context, if it is finite."""
    default = DEFAULT_WINDOW if longest == UNLIMITED else longest
    length = default if options.context_length is None else options.context_length
    if length > longest:
        raise InputError(
            f"--context-length must be at most {longest}, the positions of the model that are used, got {length}; "
            "give a smaller one"
        )
    stride = length if options.stride is None else options.stride
    if stride > length:
        raise InputError(
            f"--stride must be at most the context length {length}, got {stride}; give a smaller one, as a "
            "larger stride would skip tokens"
        )
    return length, stride


def measure_whole(
    model,
    path: Path,
    text: "RunningText",
    scores: Callable[[Iterable[Sequence[int]], Sequence[int], Callable[[int], None]], Iterator[Score]],
    context: Mapping[str, Any],
) -> Iterator[Measured]:
    """Yield the values of a whole text per unit of its file. context: how `scores` reads the text, for the results."""
    units, losses = Units(), Losses()
    unknown, unknowns = model.tokenizer.specials.get("unknown"), 0
    tokens_read = bytes_read = 0
    left = model.begin if model.begin_all else []

    def encoded() -> Iterator[list[int]]:
        nonlocal unknowns, tokens_read, bytes_read
        parts = blocks(text.fragments(path, units), model.tokenizer)
        while some := [block.text for block in islice(parts, _BLOCKS)]:
            ids = list(chain.from_iterable(model.tokenizer.encode_batch(some)))
            unknowns, tokens_read = unknowns + ids.count(unknown), tokens_read + len(ids)
            bytes_read += sum(len(one.encode()) for one in some)
            yield ids

    def report(tokens: int) -> None:
        # The text is read ahead of the scores: of its bytes so far, the scored share of the tokens is done.
        progress.update(bytes_read * min(tokens / tokens_read, 1.0))

    size = _size(path) - _begin(path, text)
    with Progress(text.name, size, active=model.show_progress, compiles=True) as progress:
        for score in scores(encoded(), left, report):
            losses.add(-score.log_probability, score.tokens)
        progress.update(units.bytes)
    tokens = int(losses.units)
    if not tokens:
        raise InputError(f"{path} must have at least two tokens of text, got fewer; give the task's file")
    how = {
        **context,
        "detokenizer": text.detokenizer.name if text.detokenizer else "none",
        "not_invertible": units.not_invertible,
        "tokens": tokens,
    }
    how |= {"unknown_tokens": unknowns} if unknowns else {}
    how |= {"filters": f"the last {TEST:,} bytes, the test set"} if _begin(path, text) else {}
    with_ends, without = units.words + units.lines, units.words
    rows = units.lines if text.detokenizer else 1
    values = {
        "word_perplexity": (losses.perplexity, with_ends, "word of the file, line ends included"),
        "word_perplexity_without_line_ends": (losses.perplexity, without, "word of the file"),
        "bits_per_byte": (losses.bits, units.bytes, "byte of the file"),
        "bits_per_character": (losses.bits, units.characters, "character of the file"),
        "token_perplexity": (losses.perplexity, tokens, "token of the vocabulary"),
    }
    for metric in text.metrics:
        value, count, unit = values[metric]
        if not count:
            raise InputError(f"{path} must have words, got blanks only; give the task's file")
        yield Measured(metric, *value(count), rows, rows, {"unit": f"{unit} ({count:,})", **how})


@dataclass(frozen=True)
class RunningText:
    """A text. detokenizer: of lines of tokens; None: the file is the text, byte for byte."""

    name: str
    metrics: tuple[str, ...]
    detokenizer: Detokenizer | None = None

    def fragments(self, path: Path, units: Units) -> Iterator[tuple[str, bool]]:
        """Yield the text in fragments, (text, whether it is the last), and count the units."""
        for text in (
            self._bytes(path, units) if self.detokenizer is None else self._lines(path, units, self.detokenizer)
        ):
            yield text, False
        yield "", True

    def _lines(self, path: Path, units: Units, detokenizer: Detokenizer) -> Iterator[str]:
        waiting: list[str] = []
        size = 0
        for _, line in Lines(path):
            plain = detokenizer.plain(line)
            units.lines += 1
            units.words += len(line.split())
            units.characters += len(line) + 1
            units.not_invertible += not detokenizer.comes_back(line, plain)
            waiting += [plain, "\n"]
            size += len(plain) + 1
            units.bytes += len(line.encode()) + 1
            if size > _FRAGMENT:
                yield "".join(waiting)
                waiting, size = [], 0
        yield "".join(waiting)
        units.bytes = _size(path)

    def _bytes(self, path: Path, units: Units) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with open_input(path) as stream:
            stream.seek(_begin(path, self))
            while chunk := stream.read(_FRAGMENT):
                text = decoder.decode(chunk)
                units.bytes += len(chunk)
                yield self._counted(text, chunk.count(b"\xef\xbf\xbd"), units)
            yield self._counted(decoder.decode(b"", final=True), 0, units)

    def _counted(self, text: str, marks: int, units: Units) -> str:
        units.lines += text.count("\n")
        units.characters += len(text)
        units.not_invertible += max(text.count("\ufffd") - marks, 0)
        return text


def _size(path: Path) -> int:
    with open_input(path) as stream:
        if size := os.fstat(stream.fileno()).st_size:
            return size
    raise InputError(f"{path} must have text, got an empty file; give the task's file")


def _begin(path: Path, text: RunningText) -> int:
    """Return the first byte that counts: of the test set if the file is a whole data set of 100,000,000 bytes."""
    return WHOLE - TEST if text.detokenizer is None and _size(path) == WHOLE else 0


_WORDS = (
    "word_perplexity",
    "word_perplexity_without_line_ends",
    "bits_per_byte",
    "bits_per_character",
    "token_perplexity",
)
_TEXTS: tuple[tuple[RunningText, str, str], ...] = (
    (RunningText("wikitext2", _WORDS, WIKITEXT), "WikiText-2 (wiki.test.raw, or .tokens)", "wikitext"),
    (RunningText("wikitext103", _WORDS, WIKITEXT), "WikiText-103 (wiki.test.raw, or .tokens)", "wikitext"),
    (RunningText("ptb", _WORDS, PTB), "the Penn Treebank (ptb.test.txt)", ""),
    (RunningText("1bw", _WORDS, ONE_BILLION_WORDS), "the One Billion Word Benchmark (a held-out file)", ""),
    (
        RunningText("enwik8", ("bits_per_byte", "bits_per_character", "token_perplexity")),
        "enwik8 (the file, or its test part)",
        "",
    ),
    (
        RunningText("text8", ("bits_per_character", "token_perplexity")),
        "text8 (the file, or its test part)",
        "",
    ),
)
RUNNING_TEXTS = tuple(
    ZeroShotTask(text.name, title, partial(measure, text=text), options=("stride", "context_length"), harness=harness)
    for text, title, harness in _TEXTS
)
