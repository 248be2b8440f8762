"""Vocabularies in the `tokenizer.json` format of Hugging Face `tokenizers`, with their own normalization.

Roles of special tokens come from `tokenizer_config.json` or `special_tokens_map.json` next to the file if there is one,
else from their spelling. The post-processing (special tokens), padding and truncation of the file are not used.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text.library import LibraryTokenizer
from jaxlm.text.settings import read_object
from jaxlm.text.tokenizer import ROLES, read_file, roles_by_spelling

FILE = "tokenizer.json"
ROLES_FILE = "roles.json"

# The types of the normalizer, the pre-tokenizer and the model of BERT's scheme.
_BERT = ["BertNormalizer", "BertPreTokenizer", "WordPiece"]

# The largest id of a vocabulary of N tokens: SPARSE * N + SPARE. Published vocabularies have few unused ids.
SPARSE, SPARE = 10, 10_000

_BLANKS = ("\u2581", "\u0120")

# The names that Hugging Face gives to roles; other roles are additional special tokens there.
ROLE_NAMES = {
    "pad": "pad_token",
    "unknown": "unk_token",
    "start": "bos_token",
    "end": "eos_token",
    "mask": "mask_token",
    "cls": "cls_token",
    "sep": "sep_token",
}


def build_json(content: bytes, roles: Mapping[str, str] | None = None, name: str = FILE) -> LibraryTokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    roles: role -> spelling of its special tokens; None: roles are found by spelling.
    """
    from tokenizers import Tokenizer as Library

    _check_ids(content, name)
    try:
        library = Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises a bare Exception
        raise InputError(f"{name} must be a tokenizer.json that this version reads ({error})") from error
    vocabulary = library.get_vocab(with_added_tokens=True)
    specials = roles_by_spelling({t.content: i for i, t in library.get_added_tokens_decoder().items() if t.special})
    specials.update({role: vocabulary[token] for role, token in (roles or {}).items() if token in vocabulary})
    specials = {role: specials[role] for role in ROLES if role in specials}
    spelt = {role: library.id_to_token(i) for role, i in specials.items()}
    files = {FILE: content, ROLES_FILE: (json.dumps(spelt, indent=2) + "\n").encode()}
    scheme = json.loads(library.to_str())
    return LibraryTokenizer("tokenizers", library, files, specials, **_word_rules(scheme, vocabulary))


def read_json(directory: Path) -> LibraryTokenizer:
    """Read `tokenizer.json` in `directory` (or the file itself), and the roles of its special tokens."""
    path = Path(directory)
    path = path / FILE if path.is_dir() else path
    return build_json(read_file(path), _named_roles(path.parent), str(path))


def _check_ids(content: bytes, name: str) -> None:
    """Raise InputError for ids far above the number of entries: the library stores every id up to the largest one."""
    try:
        scheme = parse_json(content)
        words, added = scheme["model"]["vocab"], scheme.get("added_tokens") or []
        ids = [entry["id"] for entry in added] + (list(words.values()) if isinstance(words, dict) else [])
        largest, limit = max(map(int, ids), default=0), SPARSE * (len(words) + len(added)) + SPARE
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # the library names what is wrong
    if largest > limit:
        raise InputError(
            f"{name} must have ids of at most {limit:,} for its {len(words) + len(added):,} tokens, got {largest:,}; "
            "number the tokens from 0 on"
        )


def _kinds(scheme: dict[str, Any]) -> list[str | None]:
    """Return the types of a scheme's normalizer, pre-tokenizer and model."""
    return [(scheme.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]


def _word_rules(scheme: dict[str, Any], vocabulary: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of LibraryTokenizer that a scheme decides: how it splits texts and marks words."""
    kinds, splits = _kinds(scheme), scheme["pre_tokenizer"] or {}
    patterns = ({"Regex": r"\n|\S+"}, {"Regex": r"[\s\S]"})  # of `units`: no match depends on what precedes it
    is_lookup = kinds == [None, "Split", "WordLevel"] and splits["pattern"] in patterns
    is_bytes = kinds == [None, "ByteLevel", "BPE"] and not scheme["model"]["merges"]
    is_bytes = is_bytes and splits["add_prefix_space"] is False
    can_split = kinds == _BERT or _is_gpt2(scheme) or is_lookup or is_bytes
    can_split = can_split and not any(map(_spans_white_space, scheme["added_tokens"]))
    rules: dict[str, Any] = {"can_split": can_split, "bert_words": kinds == _BERT}
    if is_lookup:
        words = splits["behavior"] == "Removed"
        note = "no spacing, unknown words as one id" if words else "unknown characters as one id"
        return rules | {"lossy_note": note}
    if kinds[2] == "WordPiece":
        return rules | {"continuing": scheme["model"]["continuing_subword_prefix"]}
    # The marks for a blank in SentencePiece's and GPT-2's vocabularies.
    return rules | {"word_start": next((m for m in _BLANKS if any(piece.startswith(m) for piece in vocabulary)), "")}


def _is_gpt2(scheme: dict[str, Any]) -> bool:
    """Return True if words are split and merged as in GPT-2: white space is only at the front of a word."""
    if _kinds(scheme) != [None, "ByteLevel", "BPE"]:
        return False
    words, dropout = scheme["pre_tokenizer"], scheme["model"].get("dropout")
    return words.get("add_prefix_space") is False and words.get("use_regex", True) is True and not dropout


def _spans_white_space(token: dict[str, Any]) -> bool:
    """Return True if an added token that is searched in texts may contain white space or absorb what follows it."""
    return not token["special"] and (token["rstrip"] or any(map(str.isspace, token["content"])))


def _named_roles(directory: Path) -> dict[str, str] | None:
    for name in (ROLES_FILE, "special_tokens_map.json", "tokenizer_config.json"):
        if not (directory / name).exists():
            continue
        named = read_object(directory / name)
        if name == ROLES_FILE:
            return named
        roles = {}
        for role, key in ROLE_NAMES.items():
            token = named.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                roles[role] = token
        if roles:
            return roles
    return None
