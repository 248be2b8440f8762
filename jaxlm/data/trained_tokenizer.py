"""The tokenizer of a preparation: it is trained or read once, and kept with the partial store."""

import errno
import functools
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from jaxlm.data.plan import alone
from jaxlm.data.prepare_config import PrepareConfig
from jaxlm.data.saved_tokenizer import is_saved, saved_tokenizer, upload_tokenizer
from jaxlm.data.sources import Source, Unit, read_unit
from jaxlm.errors import InputError
from jaxlm.files import rename_synced
from jaxlm.progress import Output
from jaxlm.storage import is_url
from jaxlm.text import (
    Tokenizer,
    tokenizer_from_spec,
    train_characters,
    train_sentencepiece,
    train_wordpiece,
    train_words,
)
from jaxlm.text.specs import COUNTED, TRAINED
from jaxlm.text.units import whole_words
from jaxlm.wording import byte_size

# Maximum amount of text that a tokenizer is trained on, sampled evenly from the whole.
TRAINING_BYTES = 64 << 20
TRAINING_UNITS = 1024


def make_tokenizer(
    config: PrepareConfig,
    sources: tuple[Source, ...],
    units: Callable[[], list[Unit]],
    partial: str,
    messages: Output,
) -> Tokenizer:
    """Return the tokenizer, and keep a copy in the partial store, which workers and the processes of other parts read.

    It is trained or read once, by the first process. units: returns those that it is trained on.
    """
    place = f"{partial}/tokenizer"
    trains = config.tokenizer.partition(":")[0] in TRAINED
    read = functools.partial(tokenizer_from_spec, config.tokenizer, config.wordpiece_case, trains=True)
    if not is_saved(place):
        with alone(f"{partial}/tokenizer.lock", "prepares the tokenizer", messages):
            if not is_saved(place):
                tokenizer = _train(config, sources, units(), messages) if trains else read()
                for note in () if trains else tokenizer.notes:
                    messages.say(f"tokenizer {config.tokenizer}: {note}")
                (upload_tokenizer if is_url(place) else _save)(tokenizer, place)
                return tokenizer
    tokenizer = saved_tokenizer(place)
    if not trains and read().fingerprint != tokenizer.fingerprint:
        raise InputError(f"tokenizer {config.tokenizer!r} has changed since {partial} was begun; delete {partial}")
    return tokenizer


def tokenizer_for_estimate(
    config: PrepareConfig, sources: tuple[Source, ...], units: Callable[[], list[Unit]], messages: Output
) -> tuple[Tokenizer, float]:
    """Return the tokenizer of an estimate, and the seconds that a preparation trains it; no file is written.

    It is trained on the same text as in a preparation, except that words:SIZE and characters:SIZE count a sample.
    """
    kind = config.tokenizer.partition(":")[0]
    if kind not in TRAINED:
        return tokenizer_from_spec(config.tokenizer, config.wordpiece_case, trains=True), 0.0
    began, total = time.monotonic(), sum(unit.size for unit in units())
    tokenizer = _train(config, sources, units(), messages, samples=True)
    seconds = time.monotonic() - began
    return tokenizer, seconds * max(1.0, total / TRAINING_BYTES if kind in COUNTED else 1.0)


def _save(tokenizer: Tokenizer, place: str) -> None:
    """Save the tokenizer, unless another process has saved it first on a file system without locks."""
    directory = Path(place)
    fresh = directory.with_name(f".tokenizer.{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    tokenizer.save(fresh)
    try:
        rename_synced(fresh, directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(fresh, ignore_errors=True)


def _train(
    config: PrepareConfig, sources: tuple[Source, ...], units: list[Unit], messages: Output, *, samples: bool = False
) -> Tokenizer:
    """Return the tokenizer trained on `units`. samples: True if words and characters are counted on a sample too."""
    total, chosen = sum(unit.size for unit in units), units
    kind, _, words = config.tokenizer.partition(":")
    size, samples = int(words), samples or kind not in COUNTED
    if samples and len(units) > TRAINING_UNITS:
        chosen = [units[k * len(units) // TRAINING_UNITS] for k in range(TRAINING_UNITS)]
    each = None if not samples or total <= TRAINING_BYTES else TRAINING_BYTES // len(chosen)
    read = 0

    def sentences() -> Iterator[str]:
        nonlocal read
        for unit in chosen:
            left = each
            fragments = read_unit(sources[unit.source], unit, config.errors)
            for text in whole_words(fragments) if kind in COUNTED else (text for text, _ in fragments):
                text = text if left is None else text[:left]
                read += len(text.encode())
                yield text
                if left is not None and (left := left - len(text.encode())) <= 0:
                    break

    how = "all of the text" if each is None else f"the first {each:,} bytes of {len(chosen):,} of {len(units):,} units"
    case: Literal["uncased", "cased"] = "cased" if config.wordpiece_case == "cased" else "uncased"
    trainers: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
        "train-sentencepiece": (
            f"a SentencePiece {config.sentencepiece_model} vocabulary",
            lambda: train_sentencepiece(sentences(), size, config.sentencepiece_model),
        ),
        "train-wordpiece": (f"a WordPiece {case} vocabulary", lambda: train_wordpiece(sentences(), size, case)),
        "words": ("a vocabulary of words", lambda: train_words(sentences(), size, config.minimum_count)),
        "characters": ("a vocabulary of characters", lambda: train_characters(sentences(), size, config.minimum_count)),
    }
    name, train = trainers[kind]
    messages.say(f"training {name} of {size:,} on {how}")
    began = time.monotonic()
    tokenizer = train()
    messages.say(f"trained on {byte_size(read)} of about {byte_size(total)} in {time.monotonic() - began:.0f} s")
    return tokenizer
