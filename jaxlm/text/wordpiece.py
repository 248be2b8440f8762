"""BERT's published WordPiece vocabularies (Devlin et al., 2019), run by Hugging Face `tokenizers`.

A vocabulary without upper-case letters lower-cases and strips accents, as BERT's uncased models do. Words of more than
200 characters are unknown, as in google-research/bert (the library's default is 100). Case, white space and what is
unknown are lost, so a decoded text is not the original.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxlm.errors import InputError
from jaxlm.text.tokenizer import Tokenizer, read_file, roles_by_spelling

FILE = "vocab.txt"
UNKNOWN = "[UNK]"
LONGEST_WORD = 200


class WordPieceTokenizer(Tokenizer):
    """A `vocab.txt`: a piece a line, its id the number of the line, from 0."""

    kind = "wordpiece"

    def __init__(self, vocabulary: bytes, name: str = FILE):
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        try:
            lines = vocabulary.decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: byte {error.start} is not UTF-8; a WordPiece vocabulary is UTF-8") from error
        ids = {line.strip(): number for number, line in enumerate(lines)}
        if UNKNOWN not in ids:
            raise InputError(f"{name}: no {UNKNOWN} among its {len(lines)} lines; it is not a WordPiece vocabulary")
        self.lower_case = not any(
            piece != piece.lower() for piece in ids if not (piece.startswith("[") and piece.endswith("]"))
        )
        model = models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD)
        self._library = Library(model)
        self._library.normalizer = normalizers.BertNormalizer(lowercase=self.lower_case)
        self._library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._library.decoder = decoders.WordPiece()
        super().__init__({FILE: vocabulary}, len(lines), roles_by_spelling(ids))

    @classmethod
    def from_file(cls, path: Path) -> "WordPieceTokenizer":
        return cls(read_file(path), str(path))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def _piece(self, i: int) -> str:
        return self._library.id_to_token(i) or f"<{i}>"
