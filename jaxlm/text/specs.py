"""The tokenizers that a command line or a directory can name."""

from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.text import bpe, gpt1, piece_models, tokenizer_json
from jaxlm.text.published import published_tokenizer, wordpiece_tokenizer
from jaxlm.text.saved import load_tokenizer
from jaxlm.text.tokenizer import DESCRIPTION, Tokenizer
from jaxlm.text.wordpiece import Case

SPECS = "sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR (of a store or a run)"


def tokenizer_from_spec(spec: str, case: Case = "auto") -> Tokenizer:
    """The tokenizer that `spec` names, one of SPECS. InputError where it is not one, or its files are not there.

    case: whether a WordPiece vocabulary keeps the case of text; auto: as what stands beside it says. `notes` say which.
    """
    kind, colon, place = spec.partition(":")
    if not colon or not place:
        raise InputError(f"tokenizer {spec!r}: expected one of {SPECS}")
    path = Path(place).expanduser()
    if kind == "sentencepiece":
        return piece_models.SentencePieceTokenizer.from_file(path)
    if kind == "wordpiece":
        return wordpiece_tokenizer(path, case)
    if kind == "hf" and path.is_dir():
        found = published_tokenizer(path, case)
        if found is None:
            raise InputError(f"tokenizer {spec!r}: no tokenizer's files in {path}; a tokenizer.json is expected there")
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
            raise InputError(f"tokenizer {spec!r}: {path} is not a token store or a run (no tokenizer in it)")
        return load_tokenizer(path / "tokenizer")
    raise InputError(f"tokenizer {spec!r}: no kind {kind!r}; expected one of {SPECS}")
