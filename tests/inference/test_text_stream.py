"""Text of ids that arrive one by one: against the text decoded at once, and against a reader of single characters."""

import numpy as np
import pytest

from jaxlm.inference.generation import TextStream, first_stop


class Bytes:
    """A stand-in tokenizer: ids are bytes of UTF-8."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve – 漢字 and 🎈!", "🎈🎈", "broken \ufffd kept"])
def test_streamed_text_is_the_text_and_never_changes(text):
    stream, parts = TextStream(Bytes(), b"ab"), []
    parts.append(stream.push())
    for byte in text.encode():
        parts.append(stream.push(byte))
        assert "\ufffd" not in parts[-1] or "\ufffd" in text  # half a character is held back
    parts.append(stream.finish())
    assert "".join(parts) == "ab" + text
    assert stream.generated == text


def test_broken_bytes_at_the_end_come_out_when_finished():
    stream = TextStream(Bytes(), b"")
    given = "".join(stream.push(byte) for byte in [97, 0xE2, 0x82])
    assert given == "a"
    assert stream.finish() == "\ufffd"


def read(text, stops):
    """The text before the first stop, by a reader that looks at all stops after each character; and the stop."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_stops_are_those_of_a_reader_of_characters():
    """Random texts over two letters, so that stops overlap, in random tokens. Fails when a stop across a border of
    tokens is missed, when text that begins a stop is printed too early or lost, or when the prompt is searched."""
    rng = np.random.default_rng(0)
    stopped = 0
    for _ in range(400):
        text = "".join(rng.choice(list("abé"), size=rng.integers(1, 14)))
        stops = ["".join(rng.choice(list("abé"), size=rng.integers(1, 5))) for _ in range(rng.integers(0, 3))]
        stream = TextStream(Bytes(), "abaé".encode(), stops)
        parts, ids = [stream.push()], list(text.encode())
        while ids:
            size = int(rng.integers(1, 4))
            parts.append(stream.push(*ids[:size]))
            ids = ids[size:]
        parts.append(stream.finish())
        wanted, stop = read(text, stops)
        assert ("".join(parts), stream.generated, stream.stopped) == ("abaé" + wanted, wanted, stop)
        stopped += stop is not None
    assert 50 < stopped < 350


def test_the_stop_that_is_complete_first_counts():
    """Fails when the result depends on the tokens: a token may hold both stops."""
    assert first_stop("xabcd", ["abcd", "bc"]) == (2, "bc")
    assert first_stop("xabc", ["c", "bc"]) == (2, "bc")
    assert first_stop("xabc", []) is None
