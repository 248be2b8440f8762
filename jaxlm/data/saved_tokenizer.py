"""The files of a tokenizer in a directory or below a URL."""

import tempfile
from pathlib import Path

from jaxlm import storage
from jaxlm.text import Tokenizer, load_tokenizer
from jaxlm.text.tokenizer import DESCRIPTION


def is_saved(place: str) -> bool:
    """Return True if a tokenizer is there."""
    return storage.is_file(f"{place}/{DESCRIPTION}")


def saved_tokenizer(place: str) -> Tokenizer:
    """Return the tokenizer whose files are there. InputError if they are damaged."""
    if not storage.is_url(place):
        return load_tokenizer(Path(place))
    return load_tokenizer(Path(place), lambda file: storage.read(f"{place}/{file.name}"))


def upload_tokenizer(tokenizer: Tokenizer, place: str) -> None:
    """Write the files of a tokenizer below a URL; the description comes last."""
    with tempfile.TemporaryDirectory(prefix="jaxlm-tokenizer-") as directory:
        tokenizer.save(Path(directory))
        for name in [*tokenizer.files, DESCRIPTION]:
            storage.write(f"{place}/{name}", (Path(directory) / name).read_bytes())
