"""Text of ids that arrive one by one: whole characters only, up to a stop string."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxlm.inference.sampling import ENDED
from jaxlm.text import Tokenizer

_PARTIAL_CHARACTERS = 3  # bytes of an incomplete UTF-8 character, each of which may decode to one U+FFFD


class TextStream:
    """Decoder of ids that arrive one by one into text; text already returned never changes.

    A character whose bytes have not all arrived is held back, and so is the beginning of a stop string. The ids are
    decoded together with the prompt, as some tokenizers write the blank between two tokens only if both are present.

    given: the text so far, prompt included. stopped: the stop string after the prompt that completed first, if any; the
    text ends before it, wherever the borders of the tokens are. Of two that complete at once, it is the longer one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)
        self.stop = tuple(stop)
        self.given = ""
        self.stopped: str | None = None
        self._start = len(tokenizer.decode(self.ids))

    @property
    def generated(self) -> str:
        """The text so far, without the prompt."""
        return self.given[self._start :]

    def push(self, *ids: int) -> str:
        """Add ids; return the new text that further ids cannot change. Ids after a stop string have no effect."""
        if self.stopped is not None:
            return ""
        self.ids.extend(ids)
        text = self.tokenizer.decode(self.ids)
        end = self._end(text, len(text) - _unfinished(text))
        return self._give(text, end if self.stopped is not None else end - _held(text[self._start : end], self.stop))

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self.tokenizer.decode(self.ids)
        return self._give(text, self._end(text, len(text)))

    def _end(self, text: str, end: int) -> int:
        """Return the first index, up to `end`, that is not part of the output, and keep the stop string there."""
        found = first_stop(text[self._start : end], self.stop)
        if found is None:
            return end
        at, self.stopped = found
        return self._start + at

    def _give(self, text: str, end: int) -> str:
        if end <= len(self.given) or not text.startswith(self.given):
            return ""
        fresh, self.given = text[len(self.given) : end], text[:end]
        return fresh


def collect(
    streams: Sequence[TextStream], steps: Iterable[np.ndarray], on_text: Callable[[str], None] | None = None
) -> None:
    """Add the new ids of each step to streams until all are complete, and finish the streams.

    steps: of a `Sampler`, ids (prompts, samples), which may have further rows at the end; they are not read further
    than needed. on_text: called with each piece of the first stream's text, prompt included.
    """
    if on_text is not None:
        on_text(streams[0].push())
    for new in steps:
        ids = new.reshape(-1).tolist()[: len(streams)]
        for stream, i in zip(streams, ids, strict=True):
            if i == ENDED:
                continue
            if on_text is None and not stream.stop:
                stream.ids.append(i)  # decoded once, at the end
            elif (fresh := stream.push(i)) and on_text is not None:
                on_text(fresh)
        if all(i == ENDED or stream.stopped is not None for stream, i in zip(streams, ids, strict=True)):
            break
    rest = [stream.finish() for stream in streams]
    if on_text is not None:
        on_text(rest[0])


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return the index and the stop string that a reader of `text` completes first, the longer of two; or None."""
    found = [(at + len(word), at, word) for word in stop if (at := text.find(word)) >= 0]
    return min(found)[1:] if found else None


def _held(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    longest = max((len(word) - 1 for word in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-size:]) for word in stop):
            return size
    return 0


def _unfinished(text: str) -> int:
    """Return the number of characters at the end that further ids may change."""
    return next((k for k in range(_PARTIAL_CHARACTERS) if not text[: len(text) - k].endswith("\ufffd")), 3)
