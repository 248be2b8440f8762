"""Vocabularies in the `tokenizer.json` format of Hugging Face `tokenizers`, with their own normalization.

Roles of special tokens come from `tokenizer_config.json` or `special_tokens_map.json` beside the file if there is one,
else from their spelling. The post-processing (special tokens), padding and truncation of the file are not used.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text.settings import read_object
from jaxlm.text.tokenizer import ROLES, Tokenizer, cut_before_white_space, library_offsets, read_file, roles_by_spelling
from jaxlm.text.wordpiece import cuts_between_words

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


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, and role -> spelling of its special tokens (None: roles are found by spelling)."""

    kind = "tokenizers"
    whole_bytes = 120

    def __init__(self, content: bytes, roles: Mapping[str, str] | None = None, name: str = "tokenizer.json"):
        from tokenizers import Tokenizer as Library

        _check_ids(content, name)
        try:
            self._library = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises a bare Exception
            raise InputError(f"{name} must be a tokenizer.json that this version reads ({error})") from error
        self._library.no_padding()
        self._library.no_truncation()
        # Text that contains the spelling of a special token is plain text.
        self._library.encode_special_tokens = True
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values()) + 1
        special = {t.content: i for i, t in self._library.get_added_tokens_decoder().items() if t.special}
        specials = roles_by_spelling(special)
        specials.update({role: vocabulary[token] for role, token in (roles or {}).items() if token in vocabulary})
        specials = {role: specials[role] for role in ROLES if role in specials}
        spelt = {role: self._library.id_to_token(i) for role, i in specials.items()}
        files = {FILE: content, ROLES_FILE: (json.dumps(spelt, indent=2) + "\n").encode()}
        super().__init__(files, size, specials)
        self._special_ids = set(special.values())
        scheme = json.loads(self._library.to_str())
        kinds = _kinds(scheme)
        self._is_bert = kinds == _BERT
        splits = scheme["pre_tokenizer"] or {}
        patterns = ({"Regex": r"\n|\S+"}, {"Regex": r"[\s\S]"})  # of `units`: no match depends on what precedes it
        is_lookup = kinds == [None, "Split", "WordLevel"] and splits["pattern"] in patterns
        is_bytes = kinds == [None, "ByteLevel", "BPE"] and not scheme["model"]["merges"]
        is_bytes = is_bytes and splits["add_prefix_space"] is False
        cuts = self._is_bert or _is_gpt2(scheme) or is_lookup or is_bytes
        self.cuts = cuts and not any(map(_spans_white_space, scheme["added_tokens"]))
        if is_lookup:
            words = splits["behavior"] == "Removed"
            self.lost = "no spacing, unknown words as one id" if words else "unknown characters as one id"
        elif kinds[2] == "WordPiece":
            self.continuing = scheme["model"]["continuing_subword_prefix"]
        else:  # the marks for a blank in SentencePiece's and GPT-2's vocabularies
            self.opening = next((mark for mark in _BLANKS if any(piece.startswith(mark) for piece in vocabulary)), "")

    @classmethod
    def from_directory(cls, directory: Path) -> "JsonTokenizer":
        """Read `tokenizer.json` in `directory` (or the file itself), and the roles of its special tokens."""
        path = Path(directory)
        path = path / FILE if path.is_dir() else path
        return cls(read_file(path), _named_roles(path.parent), str(path))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        return library_offsets(self._library.encode_batch(list(texts), add_special_tokens=False))

    def cut(self, text: str, limit: int) -> int:
        return cut_before_white_space(text, limit) if self.cuts else 0

    def cuts_at(self, text: str, place: int) -> bool:
        if self._is_bert:
            return self.cuts and cuts_between_words(text, place)
        return super().cuts_at(text, place)

    @property
    def _hidden(self) -> set[int]:
        return super()._hidden | self._special_ids

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _piece(self, i: int) -> str:
        return self._library.id_to_token(i) or f"<{i}>"


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
