"""BERT's WordPiece vocabularies (Devlin et al., 2019), published and trained here, run by Hugging Face `tokenizers`.

A vocabulary without upper-case letters lower-cases and strips accents, as BERT's uncased models do. Words of more than
200 characters are unknown, as in google-research/bert (the library's default is 100). Case, white space and what is
unknown are lost, so a decoded text is not the original.

The library differs from Google's code in four points. A capital sigma at the end of a word is lower-cased to σ, there
to ς. Private-use characters are dropped, there they make their word unknown. The 256 ideographs from U+2B820 are part
of the word around them, there words of their own. And characters go by the categories of Unicode 8, there by those of
the Python in use, so that later punctuation does not part words and later combining marks stay.

Training is the library's. Left alone, it numbers characters in the order of a hash table that differs from process to
process, and ties between pairs follow those numbers; here every character comes first, in order, so that the same text
gives the same bytes.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from jaxlm.bounded_read import parse_json
from jaxlm.errors import InputError
from jaxlm.text.piece_models import split_sentence
from jaxlm.text.tokenizer import (
    SPELLINGS,
    Tokenizer,
    cut_before_white_space,
    library_offsets,
    roles_by_spelling,
)

FILE = "vocab.txt"
CASE_FILE = "case.txt"  # only where the vocabulary does not show whether it lower-cases
SETTINGS_FILE = "settings.json"  # only where accents or ideographs are treated otherwise than BERT's models do
# Whether text keeps its case; auto: as what stands beside the vocabulary says, else as the vocabulary looks.
Case = Literal["auto", "uncased", "cased"]
UNKNOWN = "[UNK]"
CONTINUES = "##"
LONGEST_WORD = 200

# The special tokens of a trained vocabulary, in this order from id 0.
TRAINED_ROLES = ("pad", "unknown", "cls", "sep", "mask")

# Pieces for characters (at the beginning of a word, and within one) take at most this share of a trained vocabulary;
# words with rarer characters are parted there in training, and unknown in texts.
CHARACTER_SHARE = 0.5

_SPACES = " \n\t\r"
# Characters that are words of their own, after which sentences end. (BERT parts words at all of Unicode's punctuation;
# which characters that is depends on the version of Unicode.)
_PUNCTUATION = frozenset(".!?:;,\"')]}…”’»›。！？；：，」』）】．｡؟۔।॥")


class WordPieceTokenizer(Tokenizer):
    """A `vocab.txt`: a piece a line, its id the number of the line, from 0.

    lower_case: whether text is lower-cased; None: where the vocabulary has no upper-case letter.
    strip_accents: whether text loses its accents; None: where it is lower-cased.
    part_ideographs: whether each Chinese character is a word of its own.
    """

    kind = "wordpiece"
    cuts = True
    continuing = CONTINUES

    def __init__(
        self,
        vocabulary: bytes,
        name: str = FILE,
        lower_case: bool | None = None,
        *,
        strip_accents: bool | None = None,
        part_ideographs: bool = True,
    ):
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models

        lines = _lines(vocabulary, name)
        ids = {line.strip(): number for number, line in enumerate(lines)}
        if UNKNOWN not in ids:
            raise InputError(f"{name}: no {UNKNOWN} among its {len(lines)} lines; it is not a WordPiece vocabulary")
        self.lower_case = _looks_lower(ids, "[]", "<>") if lower_case is None else lower_case
        strip_accents = None if strip_accents == self.lower_case else strip_accents
        model = models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD)
        self._library = Library(model)
        self._library.normalizer, self._library.pre_tokenizer = _treatment(
            self.lower_case, strip_accents, part_ideographs
        )
        self._library.decoder = decoders.WordPiece()
        files = {FILE: vocabulary}
        if self.lower_case != _looks_lower(ids, "[]"):
            files[CASE_FILE] = b"uncased\n" if self.lower_case else b"cased\n"
        if strip_accents is not None or not part_ideographs:
            settings = {"strip_accents": strip_accents, "part_ideographs": part_ideographs}
            files[SETTINGS_FILE] = (json.dumps(settings) + "\n").encode()
        super().__init__(files, len(lines), roles_by_spelling(ids))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], name: str) -> "WordPieceTokenizer":
        """The tokenizer whose `files` these are. KeyError or ValueError where they are not those of one.

        Without a CASE_FILE the vocabulary decides as it always did there, by all pieces but those in square brackets.
        """
        vocabulary = files[FILE]
        case = files.get(CASE_FILE)
        looks = _looks_lower(map(str.strip, _lines(vocabulary, name)), "[]")
        lower_case = looks if case is None else case == b"uncased\n"
        settings = parse_json(files.get(SETTINGS_FILE, b"{}"))
        return cls(vocabulary, name, lower_case, **settings)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        return library_offsets(self._library.encode_batch(list(texts), add_special_tokens=False))

    def cut(self, text: str, limit: int) -> int:
        return cut_before_white_space(text, limit)

    def cuts_at(self, text: str, place: int) -> bool:
        return cuts_between_words(text, place)

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _piece(self, i: int) -> str:
        return self._library.id_to_token(i) or f"<{i}>"


def train_wordpiece(
    sentences: Iterable[str], size: int, case: Literal["uncased", "cased"] = "uncased"
) -> WordPieceTokenizer:
    """Train a vocabulary of exactly `size` ids: special tokens (TRAINED_ROLES), characters, pieces.

    The same sentences give the same bytes, in any order and on any number of cores. Raises InputError where there is no
    text, where `size` leaves no room for characters, and where the text cannot fill the vocabulary (the largest size
    possible is named).
    """
    specials = [SPELLINGS[role][1] for role in TRAINED_ROLES]
    if size <= len(specials) + 2:
        raise InputError(
            f"a WordPiece vocabulary of {size} is too small: {len(specials)} special tokens come first; ask for 64 or "
            "more"
        )
    lines = [line for sentence in sentences for line in split_sentence(sentence)]
    if not lines:
        raise InputError("no text to train a tokenizer on: the sources hold only blanks")
    room = max(2, int(CHARACTER_SHARE * (size - len(specials))))
    everything = _train(lines, case, "", specials, 0)[len(specials) :]
    while True:
        rare = _rare_characters(lines, case, everything, room)
        characters = _train(lines, case, rare, specials, 0)[len(specials) :] if rare else everything
        characters.sort(key=lambda piece: (piece.startswith(CONTINUES) and piece != CONTINUES, piece))
        pieces = _train(lines, case, rare, specials + characters, size)
        if len(pieces) == size:
            break
        if not rare:
            raise InputError(
                f"the text cannot fill a vocabulary of {size}: {len(pieces)} is the largest size possible; "
                "ask for that or less, or give more text"
            )
        # Too little is left to merge where characters are kept out: let in as many as pieces are wanting.
        room += size - len(pieces)
    return WordPieceTokenizer("".join(f"{piece}\n" for piece in pieces).encode(), FILE, case == "uncased")


def _train(lines: list[str], case: str, rare: str, first: list[str], size: int) -> list[str]:
    """The pieces of a vocabulary of `size` in their order: `first`, the characters that these lack, then merges."""
    from tokenizers import Regex, models, normalizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.WordPiece({}, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    normalizer, library.pre_tokenizer = _treatment(case == "uncased")
    if rare:
        part = normalizers.Replace(Regex("[" + "".join(f"\\x{{{ord(c):x}}}" for c in rare) + "]"), " ")
        normalizer = normalizers.Sequence([normalizer, part])
    library.normalizer = normalizer
    # Only their ids are wanted: the trainer gives what it calls special tokens the first ids, in this order.
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, min_frequency=0, show_progress=False)
    library.train_from_iterator(iter(lines), trainer, length=len(lines))
    vocabulary = library.get_vocab(with_added_tokens=False) | {piece: k for k, piece in enumerate(first)}
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _rare_characters(lines: list[str], case: str, pieces: list[str], room: int) -> str:
    """The characters to leave out so that the pieces of those that stay are at most `room`, the rarest first."""
    if len(pieces) <= room:
        return ""
    normalizer, _ = _treatment(case == "uncased")
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(normalizer.normalize_str(line))
    forms = Counter(piece[-1] for piece in pieces)
    ranked = sorted(forms, key=lambda character: (-counts[character], character))
    used = 0
    for rank, character in enumerate(ranked):
        used += forms[character]
        if used > room:
            return "".join(ranked[rank:])
    return ""


def _lines(vocabulary: bytes, name: str) -> list[str]:
    try:
        return vocabulary.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: byte {error.start} is not UTF-8; a WordPiece vocabulary is UTF-8") from error


def _looks_lower(pieces: Iterable[str], *brackets: str) -> bool:
    """Return whether no token outside these pairs of brackets has an upper-case letter."""
    special = lambda piece: any(piece.startswith(pair[0]) and piece.endswith(pair[1]) for pair in brackets)  # noqa: E731
    return not any(piece != piece.lower() and not special(piece) for piece in pieces)


def _treatment(lower_case: bool, strip_accents: bool | None = None, part_ideographs: bool = True):
    """What BERT does to text before its words are looked up: (normalizer, pre-tokenizer)."""
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(
        lowercase=lower_case, strip_accents=strip_accents, handle_chinese_chars=part_ideographs
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()


def cuts_between_words(text: str, place: int) -> bool:
    """Whether BERT's treatment of `text` ends a word before the character `place`: at white space and punctuation.

    What combines with the character before it is never parted from it.
    """
    if not 0 < place < len(text) or unicodedata.category(text[place])[0] == "M":
        return False
    return text[place] in _SPACES or text[place - 1] in _SPACES or text[place - 1] in _PUNCTUATION
