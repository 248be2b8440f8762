"""GPT-2's published byte-level BPE (Radford et al., 2019), run by Hugging Face `tokenizers`.

The tokenization is lossless: 256 byte symbols and their merges spell any text. Id 50256, <|endoftext|>, ends documents.
"""

from pathlib import Path

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text.library import LibraryTokenizer
from jaxlm.text.tokenizer import read_file

VOCABULARY_FILE = "encoder.json"
MERGES_FILE = "vocab.bpe"
END = "<|endoftext|>"
BLANK = "\u0120"  # in the byte-level alphabet


def build_gpt2(vocabulary: bytes, merges: bytes, name: str = "GPT-2's vocabulary") -> LibraryTokenizer:
    """Return the tokenizer of GPT-2's `encoder.json` and `vocab.bpe` (50,257 ids in the published pair)."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    ids, pairs = read_vocabulary(vocabulary, name), read_merges(merges, name)
    library = Library(build_bpe(models.BPE, ids, pairs, name))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    files = {VOCABULARY_FILE: vocabulary, MERGES_FILE: merges}
    specials = {"end": ids[END]} if END in ids else {}
    # The pattern that splits words takes white space only at the front of a word.
    return LibraryTokenizer("gpt2", library, files, specials, can_split=True, word_start=BLANK)


def read_gpt2(directory: Path) -> LibraryTokenizer:
    """Return the tokenizer of the two files in `directory`. InputError for a missing or damaged file."""
    directory = Path(directory)
    return build_gpt2(read_file(directory / VOCABULARY_FILE), read_file(directory / MERGES_FILE), str(directory))


def read_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """Return token -> id of a JSON vocabulary; InputError for any other content."""
    try:
        ids = parse_json(content)
    except ValueError as error:
        raise InputError(f"{name}: the vocabulary is not JSON ({error}); copy it again") from error
    if not isinstance(ids, dict) or not ids or not all(isinstance(i, int) for i in ids.values()):
        raise InputError(f"{name}: the vocabulary must be a JSON object from token to id")
    return ids


def read_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a merges file, in order, without its `#version` line; InputError names an invalid line."""
    pairs = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").split("\n"), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise InputError(f"{name}: line {number} of the merges must be two tokens and a blank, got {line!r}")
        pairs.append((parts[0], parts[1]))
    return pairs


def build_bpe(model, ids: dict[str, int], pairs: list[tuple[str, str]], name: str, **options):
    """Return the library's BPE model; InputError if vocabulary and merges do not match."""
    try:
        return model(vocab=ids, merges=pairs, **options)
    except Exception as error:  # the library raises a bare Exception
        raise InputError(f"{name}: vocabulary and merges must match ({error}); copy both again") from error
