"""Vocabularies that Hugging Face `tokenizers` runs: GPT-2's, WordPiece, and every `tokenizer.json`.

The modules of the kinds build the library's tokenizer from their files; the class here encodes and decodes with it.
"""

import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.text.tokenizer import Tokenizer

_SPACES = " \n\t\r"
# Characters that are words of their own in BERT's rules, after which sentences end. (BERT splits words at all of
# Unicode's punctuation, which depends on the version of Unicode.)
_PUNCTUATION = frozenset(".!?:;,\"')]}…”’»›。！？；：，」』）】．｡؟۔।॥")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the library, a `tokenizers.Tokenizer`, and the files of its kind that it was built from.

    The library's padding and truncation are switched off, and text that contains the spelling of a special token is
    plain text. kind, files, specials, can_split, continuing, word_start, lossy_note: as in `Tokenizer`.
    bert_words: True if words end where BERT's rules end them, at punctuation too.
    """

    bytes_per_character = 120

    def __init__(
        self,
        kind: str,
        library,
        files: Mapping[str, bytes],
        specials: Mapping[str, int],
        *,
        can_split: bool,
        bert_words: bool = False,
        continuing: str = "",
        word_start: str = "",
        lossy_note: str = "",
    ):
        super().__init__(files, max(library.get_vocab(with_added_tokens=True).values()) + 1, specials)
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True
        self.kind, self.can_split, self.lossy_note = kind, can_split, lossy_note
        self.continuing, self.word_start = continuing, word_start
        self._library, self._bert_words = library, bert_words
        self._special_ids = {i for i, token in library.get_added_tokens_decoder().items() if token.special}

    @property
    def lower_case(self) -> bool:
        """True if the normalization of BERT lower-cases the text."""
        return getattr(self._library.normalizer, "lowercase", False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        encodings = self._library.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)) for encoding in encodings]

    def is_split_point(self, text: str, place: int) -> bool:
        if self._bert_words:
            return self.can_split and ends_bert_word(text, place)
        return super().is_split_point(text, place)

    @property
    def _hidden(self) -> set[int]:
        return super()._hidden | self._special_ids

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _piece(self, i: int) -> str:
        return self._library.id_to_token(i) or f"<{i}>"


def ends_bert_word(text: str, place: int) -> bool:
    """Return True if BERT's rules end a word before character `place` of `text`: at white space and punctuation.

    A combining mark is never separated from the preceding character.
    """
    if not 0 < place < len(text) or unicodedata.category(text[place])[0] == "M":
        return False
    return text[place] in _SPACES or text[place - 1] in _SPACES or text[place - 1] in _PUNCTUATION
