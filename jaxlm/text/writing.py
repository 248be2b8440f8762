"""Texts as files: music as MIDI, any other text as it is."""

from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.files import write_file
from jaxlm.reading.midi import is_midi
from jaxlm.text.events import Vocabulary
from jaxlm.text.tokenizer import Tokenizer


def music_for(tokenizer: Tokenizer, path: Path | str, flag: str) -> Vocabulary:
    """Return the event vocabulary of a tokenizer. InputError for one of text. path: the MIDI file given as `flag`."""
    if tokenizer.music is None:
        raise InputError(f"{flag} must be a text for a vocabulary of text, got {path}; only events:… has MIDI")
    return tokenizer.music


def write_text(path: Path, tokenizer: Tokenizer, text: str) -> None:
    """Write a text to a file, as MIDI if it ends in .mid or .midi. InputError if the text is not music then."""
    if is_midi(path):
        music_for(tokenizer, path, "--output").write(path, text.split())
    else:
        write_file(path, text)
