"""A tokenizer turns text into ids and back, and can be saved, checked and read again.

The merging itself is done by the sentencepiece and Hugging Face `tokenizers` libraries; what is here is what every
scheme shares: the roles of special tokens, the fingerprint over everything that decides ids, and the directory format.
Special tokens go by role, never by spelling: text that spells "<pad>" is text, and never yields the id of pad.
"""

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxlm.atomic_write import write_file, write_json
from jaxlm.bounded_read import read_regular
from jaxlm.errors import InputError

# The roles in the order in which a trained vocabulary holds them.
ROLES = ("pad", "unknown", "start", "end", "delimiter", "extract", "mask", "cls", "sep")

# How published vocabularies spell the roles; the first spelling that a vocabulary has is the role's token.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]", "<|padding|>", "<|pad|>"),
    "unknown": ("<unk>", "[UNK]"),
    "start": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "_start_"),
    "end": ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "delimiter": ("<delimiter>", "_delimiter_"),
    "extract": ("<extract>", "_classify_"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
}

DESCRIPTION = "tokenizer_description.json"

# How pieces spell a line break: as it is, as SentencePiece's byte, as the byte-level symbol.
_LINE_BREAKS = ("\n", "<0x0A>", "<0x0D>", "\u010a", "\u010d")


class Tokenizer(ABC):
    """Text to ids and back.

    kind: the scheme, a name that `load_tokenizer` knows.
    size: the number of ids, special tokens included: the rows of an embedding table.
    specials: role -> id, of those in ROLES that the vocabulary has. Two roles may share an id (GPT-1's id 0).
    files: name -> content of everything the scheme needs; what is saved and what the fingerprint covers.
    notes: sentences about how it was read, for the first to use it; not saved.
    """

    kind: str
    cuts = False  # whether `cut` and `cuts_at` find places
    whole_bytes = 0  # memory for each character of a text that is encoded whole, as measured on books
    continuing = ""  # what begins a piece that continues a word, for schemes that mark these
    opening = ""  # what begins a piece that opens a word, for schemes that mark those
    notes: tuple[str, ...] = ()

    def __init__(self, files: Mapping[str, bytes], base_size: int, specials: Mapping[str, int]):
        self.files = dict(files)
        self.base_size = base_size
        self.size = base_size
        self.specials: Mapping[str, int] = dict(specials)
        self._added: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. No special token is added, and none comes out of plain text."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; faster than one by one."""

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """`encode` of each text, and for each id its place in the text, int64 (ids, 2): [start, end) in code points.

        Raises InputError for a scheme that does not know its places.
        """
        raise InputError(
            f"a tokenizer of the kind {self.kind} does not know the places of its pieces, which spans and tags need; "
            "take wordpiece:VOCAB.txt, sentencepiece:FILE or hf:DIR"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out. Raises ValueError for an id outside the vocabulary."""
        hidden = self._hidden
        return self._decode([i for i in self._checked(ids) if i not in hidden])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One readable string for each id; special tokens that were added show as <role>."""
        return [self._added[i] if i in self._added else self._piece(i) for i in self._checked(ids)]

    def cut(self, text: str, limit: int) -> int:
        """The last place in 1 … `limit` where `text` can be cut without changing its ids, or 0 where none is known.

        It lets long documents be encoded block by block. A scheme that looks at its whole input returns 0 always.
        """
        return 0

    def cuts_at(self, text: str, place: int) -> bool:
        """Whether `text` can be cut before the character `place` without changing its ids, as far as is known."""
        return self.cuts and 0 < place < len(text) and text[place] in " \n" and not text[place - 1].isspace()

    @property
    def continues(self) -> np.ndarray:
        """bool (size,): whether a piece continues the word of the piece before it, for masks of whole words.

        Where a scheme marks neither kind, each piece is a word. Special tokens and line breaks continue nothing.
        """
        found = np.zeros(self.size, bool)
        for i in range(self.base_size):
            piece = self._piece(i)
            if self.continuing:
                found[i] = piece.startswith(self.continuing) and piece != self.continuing
            elif self.opening:
                found[i] = not piece.startswith((self.opening, *_LINE_BREAKS))
        found[list(self._hidden)] = False
        return found

    def with_specials(self, roles: Sequence[str]) -> "Tokenizer":
        """This tokenizer with the missing ones of `roles` as new ids at the end; itself where none is missing."""
        missing = [role for role in dict.fromkeys(roles) if role not in self.specials]
        if unknown := [role for role in missing if role not in ROLES]:
            raise ValueError(f"no such role of a special token: {unknown[0]!r}; the roles are {', '.join(ROLES)}")
        if not missing:
            return self
        grown = copy.copy(self)
        new_ids = {role: self.size + k for k, role in enumerate(missing)}
        grown.specials = {**self.specials, **new_ids}
        grown._added = {**self._added, **{i: f"<{role}>" for role, i in new_ids.items()}}
        grown.size = self.size + len(missing)
        return grown

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over everything that decides ids: the scheme, its files, the special tokens."""
        digest = hashlib.sha256(f"{self.kind}\n{self.size}\n".encode())
        for name in sorted(self.files):
            digest.update(f"{name} {hashlib.sha256(self.files[name]).hexdigest()}\n".encode())
        digest.update(json.dumps(sorted(self.specials.items())).encode())
        return digest.hexdigest()

    def save(self, directory: Path) -> None:
        """Write everything `load_tokenizer` needs into `directory`; the description comes last."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_file(directory / name, content)
        description = {
            "kind": self.kind,
            "size": self.size,
            "base_size": self.base_size,
            "specials": dict(self.specials),
            "files": sorted(self.files),
            "fingerprint": self.fingerprint,
        }
        write_json(directory / DESCRIPTION, description)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids that are in the base vocabulary and not special."""

    @abstractmethod
    def _piece(self, i: int) -> str:
        """One readable string for an id of the base vocabulary."""

    @property
    def _hidden(self) -> set[int]:
        return set(self.specials.values()) | set(self._added)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        checked = [int(i) for i in ids]
        for i in checked:
            if not 0 <= i < self.size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.size}")
        return checked


def read_file(path: Path) -> bytes:
    """The content of one of a tokenizer's files; InputError where it cannot be read, or is not a regular file."""
    try:
        return read_regular(Path(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; a tokenizer's file is expected there") from error


def roles_by_spelling(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """role -> id for the special tokens that `vocabulary` (spelling -> id) has."""
    found = {}
    for role in ROLES:
        for spelling in SPELLINGS[role]:
            if spelling in vocabulary:
                found[role] = vocabulary[spelling]
                break
    return found


def library_offsets(encodings: Sequence) -> list[tuple[list[int], np.ndarray]]:
    """Ids and places from encodings of the `tokenizers` library, whose offsets count code points."""
    return [(encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)) for encoding in encodings]


def cut_before_white_space(text: str, limit: int) -> int:
    """The last place in 1 … `limit` where a blank or line break follows something that is not white space, or 0."""
    place = min(limit, len(text) - 1)
    while (place := max(text.rfind(" ", 1, place + 1), text.rfind("\n", 1, place + 1))) > 0:
        if not text[place - 1].isspace():
            return place
        place -= 1
    return 0
