"""The tokenizers that a command line or a directory can name."""

import json
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.text import bpe, gpt1, piece_models, tokenizer_json, wordpiece
from jaxlm.text.tokenizer import DESCRIPTION, Tokenizer, read_file

SPECS = "sentencepiece:FILE, wordpiece:VOCAB.txt, gpt1:DIR, gpt2:DIR, hf:DIR, store:DIR"


def tokenizer_from_spec(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names, one of SPECS. InputError where it is not one, or its files are not there."""
    kind, colon, place = spec.partition(":")
    if not colon or not place:
        raise InputError(f"tokenizer {spec!r}: expected one of {SPECS}")
    path = Path(place).expanduser()
    if kind == "sentencepiece":
        return piece_models.SentencePieceTokenizer.from_file(path)
    if kind == "wordpiece":
        return wordpiece.WordPieceTokenizer.from_file(path)
    if kind == "gpt1":
        tokenizer = gpt1.GPT1Tokenizer.from_directory(path)
        tokenizer.require_packages()
        return tokenizer
    if kind == "gpt2":
        return bpe.GPT2Tokenizer.from_directory(path)
    if kind == "hf":
        found = published_tokenizer(path) if path.is_dir() else tokenizer_json.JsonTokenizer.from_directory(path)
        if found is None:
            raise InputError(f"tokenizer {spec!r}: no tokenizer's files in {path}; a tokenizer.json is expected there")
        return found
    if kind == "store":
        if not (path / "tokenizer" / DESCRIPTION).exists():
            raise InputError(f"tokenizer {spec!r}: {path} is not a token store (no tokenizer in it)")
        return load_tokenizer(path / "tokenizer")
    raise InputError(f"tokenizer {spec!r}: no kind {kind!r}; expected one of {SPECS}")


def published_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer among the files of a published model, by Hugging Face's names for them; None where there is none.

    GPT-1's vocabulary gets its own text treatment, which its `tokenizer.json` lacks; elsewhere that file comes first.
    """
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    of_pairs = vocabulary.is_file() and merges.is_file()
    if of_pairs and gpt1.END_OF_WORD.encode() in read_file(vocabulary):
        return gpt1.GPT1Tokenizer(read_file(vocabulary), read_file(merges), str(directory))
    if (directory / tokenizer_json.FILE).is_file():
        return tokenizer_json.JsonTokenizer.from_directory(directory)
    if of_pairs:
        return bpe.GPT2Tokenizer(read_file(vocabulary), read_file(merges), str(directory))
    if (directory / wordpiece.FILE).is_file():
        settings = directory / "tokenizer_config.json"
        lower_case = None
        if settings.is_file():
            try:
                lower_case = json.loads(read_file(settings)).get("do_lower_case")
            except (ValueError, AttributeError) as error:
                raise InputError(f"{settings} is not a JSON object ({error}); download it again") from error
        file = directory / wordpiece.FILE
        return wordpiece.WordPieceTokenizer(read_file(file), str(file), lower_case)
    return None


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read what `Tokenizer.save` wrote. InputError where it is damaged: the fingerprint is checked."""
    directory = Path(directory)
    try:
        description = json.loads(read_file(directory / DESCRIPTION))
        kind, names, specials = description["kind"], description["files"], dict(description["specials"])
        base_size, size, fingerprint = description["base_size"], description["size"], description["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{directory / DESCRIPTION} is damaged or not a tokenizer's description ({error!r})"
        ) from error
    damaged = InputError(f"the tokenizer in {directory} is damaged: its files do not match their fingerprint")
    files = {name: read_file(directory / name) for name in names}
    try:
        tokenizer = _from_files(kind, files, str(directory))
    except KeyError as error:
        raise damaged from error
    added = [role for role, i in specials.items() if i >= base_size]
    tokenizer = tokenizer.with_specials(sorted(added, key=specials.__getitem__))
    if (tokenizer.fingerprint, tokenizer.size, dict(tokenizer.specials)) != (fingerprint, size, specials):
        raise damaged
    return tokenizer


def _from_files(kind: str, files: dict[str, bytes], name: str) -> Tokenizer:
    if kind == "sentencepiece":
        return piece_models.SentencePieceTokenizer(files[piece_models.MODEL_FILE], name)
    if kind == "wordpiece":
        case = files.get(wordpiece.CASE_FILE)
        return wordpiece.WordPieceTokenizer(files[wordpiece.FILE], name, None if case is None else case == b"uncased\n")
    if kind == "gpt1":
        return gpt1.GPT1Tokenizer(files[gpt1.VOCABULARY_FILE], files[gpt1.MERGES_FILE], name)
    if kind == "gpt2":
        return bpe.GPT2Tokenizer(files[bpe.VOCABULARY_FILE], files[bpe.MERGES_FILE], name)
    if kind == "tokenizers":
        roles = json.loads(files[tokenizer_json.ROLES_FILE])
        return tokenizer_json.JsonTokenizer(files[tokenizer_json.FILE], roles, name)
    raise InputError(f"{name}: no tokenizer of kind {kind!r} in this version of jaxlm")
