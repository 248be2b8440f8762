"""Loader of the tokenizers that `Tokenizer.save` writes, with a check of their fingerprint."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text import bpe, gpt1, piece_models, tokenizer_json, wordpiece
from jaxlm.text.backward import PREFIX, BackwardTokenizer
from jaxlm.text.tokenizer import DESCRIPTION, Tokenizer, read_file

# The files that each kind may have. A description that names another file was not written by jaxlm.
FILES: Mapping[str, tuple[str, ...]] = {
    "sentencepiece": (piece_models.MODEL_FILE,),
    "wordpiece": (wordpiece.FILE, wordpiece.CASE_FILE, wordpiece.SETTINGS_FILE),
    "gpt1": (gpt1.VOCABULARY_FILE, gpt1.MERGES_FILE),
    "gpt2": (bpe.VOCABULARY_FILE, bpe.MERGES_FILE),
    "tokenizers": (tokenizer_json.FILE, tokenizer_json.ROLES_FILE),
}


def read_within(file: Path) -> bytes:
    """Return the content of a file in its own directory; InputError for a link that leads out of it."""
    if file.resolve().parent != file.parent.resolve():
        raise InputError(f"{file} must be a file of its directory, got a link to {file.resolve()}; put a copy there")
    return read_file(file)


def load_tokenizer(directory: Path, read: Callable[[Path], bytes] = read_within) -> Tokenizer:
    """Read the files that `Tokenizer.save` wrote. InputError if they are damaged: the fingerprint is checked.

    read: returns the content of one of the files, or raises InputError.
    """
    directory = Path(directory)
    saved = _description(directory / DESCRIPTION, read)
    damaged = InputError(f"the tokenizer in {directory} is damaged: its files do not match their fingerprint")
    files = {name: read(directory / name) for name in saved["files"]}
    try:
        tokenizer = tokenizer_from_files(saved["kind"], files, str(directory))
    except (KeyError, ValueError, TypeError) as error:
        raise damaged from error
    specials = saved["specials"]
    added = [role for role, i in specials.items() if i >= saved["base_size"]]
    try:
        tokenizer = tokenizer.with_specials(sorted(added, key=specials.__getitem__))
    except ValueError as error:
        raise damaged from error
    if (tokenizer.fingerprint, tokenizer.size, dict(tokenizer.specials)) != (
        saved["fingerprint"],
        saved["size"],
        specials,
    ):
        raise damaged
    return tokenizer


def _description(file: Path, read: Callable[[Path], bytes]) -> dict[str, Any]:
    """Return the values of a description. InputError for a value of a wrong type or a file foreign to the kind."""
    content = read(file)
    try:
        saved = parse_json(content)
        kind, names, specials, _ = (saved[key] for key in ("kind", "files", "specials", "fingerprint"))
        if not all(type(value) is int for value in (saved["size"], saved["base_size"], *specials.values())):
            raise ValueError("sizes and ids must be integers")
        known = FILES.get(kind.removeprefix(PREFIX), ())
        if known and not set(names) <= set(known):
            raise ValueError(f"files must be among {', '.join(known)}, got {', '.join(map(repr, names))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is damaged or not a tokenizer's description ({error}); copy it again") from error
    if not known:
        raise InputError(f"{file.parent}: the tokenizer's kind must be one of {', '.join(FILES)}, got {kind!r}")
    return saved


def tokenizer_from_files(kind: str, files: Mapping[str, bytes], name: str) -> Tokenizer:
    """Return the tokenizer of a kind from the content of its files. KeyError for a missing file."""
    if kind.startswith(PREFIX):
        return BackwardTokenizer(tokenizer_from_files(kind.removeprefix(PREFIX), files, name))
    if kind == "sentencepiece":
        return piece_models.SentencePieceTokenizer(files[piece_models.MODEL_FILE], name)
    if kind == "wordpiece":
        return wordpiece.wordpiece_from_files(files, name)
    if kind == "gpt1":
        return gpt1.GPT1Tokenizer(files[gpt1.VOCABULARY_FILE], files[gpt1.MERGES_FILE], name)
    if kind == "gpt2":
        return bpe.build_gpt2(files[bpe.VOCABULARY_FILE], files[bpe.MERGES_FILE], name)
    roles = parse_json(files[tokenizer_json.ROLES_FILE])
    return tokenizer_json.build_json(files[tokenizer_json.FILE], roles, name)
