"""Settings next to a published vocabulary that decide ids: `tokenizer_config.json`, added tokens, the class's name.

They are read only for a vocabulary without a `tokenizer.json`. Errors name settings without a counterpart here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text.tokenizer import SPELLINGS, Tokenizer, read_file

FILE = "tokenizer_config.json"
REMEDY = "give a directory with a tokenizer.json"

# Hugging Face's classes that normalize text as a kind here does; each may also have the suffix Fast.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "gpt1": ("OpenAIGPTTokenizer",),
    "gpt2": ("GPT2Tokenizer", "RobertaTokenizer"),
    "wordpiece": ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
}
# Settings that change ids, and the one value that has a counterpart here; null means the default.
ONLY: Mapping[str, Mapping[str, Any]] = {
    "gpt1": {},
    "gpt2": {"add_prefix_space": False},
    "wordpiece": {
        "do_basic_tokenize": True,
        "do_word_tokenize": True,
        "do_subword_tokenize": True,
        "word_tokenizer_type": "basic",
        "subword_tokenizer_type": "wordpiece",
        "never_split": [],
    },
}
# The special tokens of BERT's input by their names in the settings; other special tokens are not used.
_ROLES = {"pad": "pad_token", "unknown": "unk_token", "mask": "mask_token", "cls": "cls_token", "sep": "sep_token"}


class Settings:
    """The settings in a directory, empty if it is None or has no settings file.

    added: content -> id of the tokens that are added to the vocabulary. ordinary: the added tokens that are not
    special.
    """

    def __init__(self, directory: Path | None):
        self.file = Path(FILE) if directory is None else directory / FILE
        self.values: dict[str, Any] = {}
        self.added: dict[str, int] = {}
        self.ordinary: set[str] = set()
        if directory is None:
            return
        self.values = read_object(self.file)
        if self.values.get("tokenizer_class") is None:
            self.values["tokenizer_class"] = read_object(directory / "config.json").get("tokenizer_class")
        try:
            self.added = {content: int(i) for content, i in read_object(directory / "added_tokens.json").items()}
            for i, token in (self.values.get("added_tokens_decoder") or {}).items():
                self.added[token["content"]] = int(i)
                if not token.get("special"):
                    self.ordinary.add(token["content"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{directory}: its added tokens are damaged ({error!r}); download it again") from error

    def fit(self, kind: str) -> bool:
        """Return True if the settings name no class, or one that normalizes text as `kind` does."""
        name = self.values.get("tokenizer_class")
        return name is None or str(name).removesuffix("Fast") in CLASSES[kind]

    def check(self, kind: str) -> None:
        """Raise InputError for a class or a setting that has no counterpart in `kind`."""
        if not self.fit(kind):
            raise InputError(
                f"{self.file.parent}: tokenizer_class must be {' or '.join(CLASSES[kind])} for such a vocabulary, got "
                f"{self.values['tokenizer_class']}, which has no counterpart here; {REMEDY}"
            )
        for key, only in ONLY[kind].items():
            value = self.values.get(key)
            if value not in (None, only):
                raise InputError(f"{self.file}: {key} must be {only}, got {value!r}; {REMEDY}")

    def truth(self, key: str) -> bool | None:
        """Return a setting that is true or false, or None if it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.file}: {key} must be true or false, got {value!r}; download it again")
        return value

    def check_roles(self, tokenizer: Tokenizer) -> None:
        """Raise InputError if the settings name another token of the vocabulary as a special token than jaxlm uses."""
        ids = _ids(tokenizer)
        for role, key in _ROLES.items():
            token = self.values.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in ids and ids[token] != tokenizer.specials.get(role):
                used = f"the {role} token of the vocabulary"
                raise InputError(f"{self.file}: {key} must be {used}, got {token!r}; {REMEDY}")

    def with_added(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return `tokenizer` with the special tokens that were added after its vocabulary.

        Raises InputError for a token that is searched in texts before words are split, or has another id than here.
        """
        ids = _ids(tokenizer) if self.added else {}
        for content, i in sorted(self.added.items(), key=lambda item: item[1]):
            if ids.get(content) == i and (i in tokenizer.specials.values() or content not in self.ordinary):
                continue
            role = next((role for role, spellings in SPELLINGS.items() if content in spellings), None)
            if role is None or role in tokenizer.specials or i != tokenizer.size:
                raise InputError(
                    f"{self.file.parent}: the added token {content!r} of id {i} has no counterpart here; {REMEDY}"
                )
            tokenizer = tokenizer.with_specials([role])
        return tokenizer


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return token -> id."""
    return {piece: i for i, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}


def read_object(file: Path) -> dict[str, Any]:
    """Return the values of a JSON object, or an empty dict if the file does not exist."""
    if not file.exists():
        return {}
    try:
        values = parse_json(read_file(file))
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} must be a JSON object, got {type(values).__name__}; download it again")
    return values
