"""Specifications of tokenizers on a command line, and their loader."""

from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.text import bpe, gpt1, piece_models, tokenizer_json
from jaxlm.text.published import published_tokenizer, wordpiece_tokenizer
from jaxlm.text.saved import load_tokenizer
from jaxlm.text.tokenizer import DESCRIPTION, Tokenizer
from jaxlm.text.wordpiece import Case

SPECS = "sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR (of a store or a run)"


def tokenizer_from_spec(spec: str, case: Case = "auto") -> Tokenizer:
    """Return the tokenizer that `spec` names, one of SPECS. InputError for another form or missing files.

    case: whether a WordPiece vocabulary keeps the case of text; auto: from the files beside it. `notes` give the
    result.
    """
    kind, colon, location = spec.partition(":")
    if not colon or not location:
        raise InputError(f"tokenizer must be one of {SPECS}, got {spec!r}")
    path = Path(location).expanduser()
    if kind == "sentencepiece":
        return piece_models.SentencePieceTokenizer.from_file(path)
    if kind == "wordpiece":
        return wordpiece_tokenizer(path, case)
    if kind == "hf" and path.is_dir():
        found = published_tokenizer(path, case)
        if found is None:
            raise InputError(f"tokenizer {spec!r}: {path} has no tokenizer files; it should have a tokenizer.json")
        return found
    if case != "auto":
        raise InputError(f"wordpiece_case must be auto for tokenizer {spec!r}, got {case}; leave --wordpiece-case out")
    if kind == "gpt1":
        tokenizer = gpt1.GPT1Tokenizer.from_directory(path)
        tokenizer.require_packages()
        return tokenizer
    if kind == "gpt2":
        return bpe.GPT2Tokenizer.from_directory(path)
    if kind == "hf":
        return tokenizer_json.JsonTokenizer.from_directory(path)
    if kind == "store":
        if not (path / "tokenizer" / DESCRIPTION).exists():
            raise InputError(f"tokenizer {spec!r}: {path} is not a token store or a run, it has no tokenizer")
        return load_tokenizer(path / "tokenizer")
    raise InputError(f"tokenizer must be one of {SPECS}, got {spec!r}")
