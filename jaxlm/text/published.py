"""The tokenizer of a published model, found by Hugging Face's file names.

A `tokenizer.json` is complete in itself. A vocabulary without one comes with settings in `tokenizer_config.json`: the
settings that decide ids are applied, and an error names those without a counterpart here.
"""

from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.text import bpe, gpt1, tokenizer_json, wordpiece
from jaxlm.text.exporting import OWN, same_vocabulary
from jaxlm.text.saved import load_tokenizer
from jaxlm.text.settings import FILE as SETTINGS
from jaxlm.text.settings import Settings
from jaxlm.text.tokenizer import DESCRIPTION, Tokenizer, read_file


def published_tokenizer(directory: Path, case: wordpiece.Case = "auto") -> Tokenizer | None:
    """Return the tokenizer in `directory`, or None. InputError for features without a counterpart here.

    The copy that jaxlm's export keeps is preferred. GPT-1's vocabulary gets its own text normalization, which its
    `tokenizer.json` lacks; for other vocabularies that file is preferred next.
    case: as in `wordpiece_tokenizer`.
    """
    notes: tuple[str, ...] = ()
    if (directory / OWN / DESCRIPTION).is_file():
        own, notes = _exported(directory)
        if own is not None:
            return _without_case(own, case, f"{directory}/{OWN} defines the text normalization")
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    of_pairs = vocabulary.is_file() and merges.is_file()
    has_json = (directory / tokenizer_json.FILE).is_file()
    settings = Settings(directory)
    found: Tokenizer
    if of_pairs and gpt1.END_OF_WORD.encode() in read_file(vocabulary) and (settings.fit("gpt1") or not has_json):
        settings.check("gpt1")
        found = gpt1.GPT1Tokenizer(read_file(vocabulary), read_file(merges), str(directory))
    elif has_json:
        found = tokenizer_json.read_json(directory)
        found.notes = notes
        return _without_case(found, case, f"{directory}/{tokenizer_json.FILE} defines the text normalization")
    elif of_pairs:
        settings.check("gpt2")
        found = bpe.build_gpt2(read_file(vocabulary), read_file(merges), str(directory))
    elif (directory / wordpiece.FILE).is_file():
        return wordpiece_tokenizer(directory / wordpiece.FILE, case)
    else:
        return None
    return _without_case(settings.with_added(found), case, f"{directory} has no WordPiece vocabulary")


def _exported(directory: Path) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the copy of its tokenizer that jaxlm's export left in OWN, or None if files next to it were changed."""
    own, file = directory / OWN, directory / tokenizer_json.FILE
    try:
        found = load_tokenizer(own, read_file)
    except InputError as error:
        raise InputError(f"{error}; restore it, or delete {own} to read {tokenizer_json.FILE} alone") from error
    if file.is_file() and same_vocabulary(found, read_file(file)):
        return found, ()
    return None, (f"{OWN} is not used: {tokenizer_json.FILE} next to it has been changed since the export",)


def wordpiece_tokenizer(file: Path, case: wordpiece.Case = "auto") -> Tokenizer:
    """Return a WordPiece vocabulary with the settings next to it, if it is called `vocab.txt`.

    case: whether text keeps its case; auto: from the settings, else guessed from the vocabulary. `notes` give the
    result.
    """
    if file.name == wordpiece.FILE and (file.parent / DESCRIPTION).is_file():
        return _saved_here(file, case)
    settings = Settings(file.parent if file.name == wordpiece.FILE else None)
    settings.check("wordpiece")
    said = settings.truth("do_lower_case")
    lower_case = said if case == "auto" else case == "uncased"
    found = wordpiece.build_wordpiece(
        read_file(file),
        str(file),
        lower_case,
        strip_accents=settings.truth("strip_accents"),
        part_ideographs=settings.truth("tokenize_chinese_chars") is not False,
    )
    settings.check_roles(found)
    source = "from --wordpiece-case" if case != "auto" else f"from {SETTINGS}"
    found.notes = (_case_note(found.lower_case, source if lower_case is not None else None),)
    return settings.with_added(found)


def _saved_here(file: Path, case: wordpiece.Case) -> Tokenizer:
    """Return a vocabulary that jaxlm saved, with the settings that it saved next to it."""
    names = [name for name in (wordpiece.CASE_FILE, wordpiece.SETTINGS_FILE) if (file.parent / name).is_file()]
    files = {name: read_file(file.parent / name) for name in names} | {wordpiece.FILE: read_file(file)}
    if case != "auto":
        files[wordpiece.CASE_FILE] = f"{case}\n".encode()
    try:
        found = wordpiece.wordpiece_from_files(files, str(file))
    except (ValueError, TypeError) as error:
        raise InputError(f"{file.parent}/{wordpiece.SETTINGS_FILE} is damaged ({error}); copy it again") from error
    source = "from --wordpiece-case" if case != "auto" else f"from {DESCRIPTION}"
    found.notes = (_case_note(found.lower_case, source),)
    return found


def _case_note(lower_case: bool, source: str | None) -> str:
    result, other, value = ("lower-cased", "cased", "false") if lower_case else ("kept", "uncased", "true")
    if source is None:
        source = (
            f"guessed from the vocabulary; to change it, give --wordpiece-case {other}, or put a {SETTINGS} with "
            f'{{"do_lower_case": {value}}} next to the vocabulary'
        )
    return f"case: {result}, {source}"


def _without_case(tokenizer: Tokenizer, case: wordpiece.Case, why: str) -> Tokenizer:
    if case != "auto":
        raise InputError(f"wordpiece_case must be auto here, got {case}: {why}; leave --wordpiece-case out")
    return tokenizer
