"""SentencePiece models (Kudo and Richardson, 2018): those trained here, and published ones.

A model trained here keeps every text exactly: identity normalisation, no white space removed or added, and what has no
piece is spelt in bytes, so that nothing is unknown. The one exception is U+2581, with which the library writes blanks:
it comes back as a blank. A published model keeps its own normalisation.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxlm.errors import InputError
from jaxlm.text.tokenizer import ROLES, SPELLINGS, Tokenizer, cut_before_white_space, read_file, roles_by_spelling

MODEL_FILE = "sentencepiece.model"
BYTES = 256

# Longer sentences are dropped by the trainer, so they are split before (the library's own default is 4192).
SENTENCE_BYTES = 4000

# Pieces for characters never take more than this share of what the special tokens and bytes leave: rare characters
# are spelt in bytes. Without a limit a small vocabulary over a large script would have no room for words, or fail.
CHARACTER_SHARE = 0.5
CHARACTER_COVERAGE = 0.9995

# Unigram's pieces depend on the number of threads, and either kind records it in the model's bytes.
TRAINING_THREADS = 1

_BLANK = "\u2581"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, BPE or unigram."""

    kind = "sentencepiece"
    whole_bytes = 25
    opening = _BLANK

    def __init__(self, model: bytes, name: str = "the model"):
        import sentencepiece

        try:
            if not model:  # the library takes this for no model given
                raise RuntimeError("it is empty")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = self._processor.get_piece_size()
            for i in range(size):  # UnicodeDecodeError, a ValueError, for a piece that is not UTF-8
                self._processor.id_to_piece(i)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{name} is not a SentencePiece model ({error})") from error
        super().__init__({MODEL_FILE: model}, size, _specials(self._processor))
        self.cuts = _cuts(self._processor)

    @classmethod
    def from_file(cls, path: Path) -> "SentencePieceTokenizer":
        return cls(read_file(path), str(path))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        if not hasattr(self._processor, "encode_as_proto"):
            raise InputError(
                "places of SentencePiece's pieces need its version 0.2.3: pip install 'sentencepiece>=0.2.3'"
            )
        return [_with_offsets(self._processor.encode_as_proto(text), text) for text in texts]

    def cut(self, text: str, limit: int) -> int:
        return cut_before_white_space(text, limit) if self.cuts else 0

    def cuts_at(self, text: str, place: int) -> bool:
        # No piece holds a line break, so that one can be cut off whatever stands before it.
        return super().cuts_at(text, place) or (self.cuts and 0 < place < len(text) and text[place] == "\n")

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids) if ids else ""

    def _piece(self, i: int) -> str:
        return self._processor.id_to_piece(i)


def _with_offsets(encoded, text: str) -> tuple[list[int], np.ndarray]:
    """Ids and places in code points; the library counts bytes, and of a character spelt in several pieces the last has
    them all, so that the ones before it get the same place."""
    places = np.array([(piece.begin, piece.end) for piece in encoded.pieces], np.int64).reshape(-1, 2)
    for k in reversed(range(len(places) - 1)):
        if places[k, 0] == places[k, 1] == places[k + 1, 0]:
            places[k, 1] = places[k + 1, 1]
    if not text.isascii():
        sizes = np.array([len(character.encode()) for character in text])
        places = np.searchsorted(np.concatenate([[0], np.cumsum(sizes)]), places)
    return [piece.id for piece in encoded.pieces], places


def train_sentencepiece(
    sentences: Iterable[str], size: int, model_type: Literal["bpe", "unigram"] = "bpe"
) -> SentencePieceTokenizer:
    """Train a vocabulary of exactly `size` ids: special tokens (all ROLES), 256 bytes, characters, pieces.

    The same sentences in the same order give the same bytes, on any number of cores. Lines are split at line breaks,
    long ones at blanks too, so none is lost. Raises InputError where there is no text, where `size` leaves no room, and
    where the text cannot fill the vocabulary (the largest size possible is named).
    """
    reserved = len(ROLES) + BYTES
    if size <= reserved + 1:
        raise InputError(
            f"a SentencePiece vocabulary of {size} is too small: {len(ROLES)} special tokens and {BYTES} bytes "
            f"come first; ask for {reserved + 64} or more"
        )
    lines = [line for sentence in sentences for line in split_sentence(sentence)]
    if not lines:
        raise InputError("no text to train a tokenizer on: the sources hold only blanks")
    room = max(1, int(CHARACTER_SHARE * (size - reserved)))
    while True:
        chosen, coverage = _with_characters(lines, room)
        try:
            return SentencePieceTokenizer(_train(chosen, size, model_type, coverage))
        except RuntimeError as error:
            largest = re.search(r"too high.*<= *(\d+)", str(error))
            if largest is None or chosen is lines:
                raise _training_error(error, size) from error
            # Too little is left to merge where characters are kept out: let in as many as pieces are wanting.
            room += size - int(largest.group(1))


def _train(lines: list[str], size: int, model_type: str, coverage: float) -> bytes:
    import sentencepiece

    names = {role: SPELLINGS[role][0] for role in ROLES}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=size,
        model_type=model_type,
        character_coverage=coverage,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=ROLES.index("pad"),
        unk_id=ROLES.index("unknown"),
        bos_id=ROLES.index("start"),
        eos_id=ROLES.index("end"),
        pad_piece=names["pad"],
        unk_piece=names["unknown"],
        bos_piece=names["start"],
        eos_piece=names["end"],
        control_symbols=[names[role] for role in ROLES[4:]],
        max_sentence_length=2 * SENTENCE_BYTES,
        num_threads=TRAINING_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def split_sentence(text: str) -> Iterator[str]:
    """Lines of `text` of at most SENTENCE_BYTES bytes each, cut at blanks where there are any; nothing is dropped.

    NUL characters part lines too: the trainer refuses them, and in texts they are spelt in bytes.
    """
    for line in text.replace("\0", "\n").split("\n"):
        line = line.rstrip("\r")
        while len(line.encode()) > SENTENCE_BYTES:
            # The longest beginning that fits, then back to a blank if one is near enough to matter.
            fits = len(line.encode()[:SENTENCE_BYTES].decode(errors="ignore"))
            place = line.rfind(" ", fits // 2, fits)
            place = place if place > 0 else fits
            yield line[:place]
            line = line[place:]
        if line and not line.isspace():
            yield line


def _with_characters(lines: list[str], room: int) -> tuple[list[str], float]:
    """Lines to train on and the share of their characters that get a piece of their own.

    That is the default share, or less where more than `room` characters would be among them.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    counts.pop(" ", None)
    total = sum(counts.values())
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = 0
    for rank, character in enumerate(ranked):
        if covered >= CHARACTER_COVERAGE * total:
            break
        if rank == room:
            # The trainer takes no share below 0.98, so lines are parted at the rare ones instead.
            rare = str.maketrans(dict.fromkeys(ranked[rank:], "\n"))
            return [part for line in lines for part in line.translate(rare).split("\n") if part], 1.0
        covered += counts[character]
    return lines, CHARACTER_COVERAGE


def _training_error(error: RuntimeError, size: int) -> InputError:
    message = str(error)
    if match := re.search(r"too high.*<= *(\d+)", message):
        return InputError(
            f"the text cannot fill a vocabulary of {size}: {match.group(1)} is the largest size possible; "
            "ask for that or less, or give more text"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return InputError(
            f"a vocabulary of {size} has no room for the characters of this text; ask for {match.group(1)} or more"
        )
    return InputError(f"SentencePiece could not train a vocabulary of {size}: {message}")


def _specials(processor) -> dict[str, int]:
    """role -> id, of the model's own special ids and of the control symbols with a known spelling."""
    control = {processor.id_to_piece(i): i for i in range(processor.get_piece_size()) if processor.is_control(i)}
    specials = roles_by_spelling(control)
    own = {
        "pad": processor.pad_id(),
        "unknown": processor.unk_id(),
        "start": processor.bos_id(),
        "end": processor.eos_id(),
    }
    specials.update({role: i for role, i in own.items() if i >= 0})
    return {role: specials[role] for role in ROLES if role in specials}


def _cuts(processor) -> bool:
    """Whether a cut before white space never changes the ids.

    So it is in a BPE model where no text gets a prefix, white space is neither removed nor changed, a blank only begins
    a piece and no piece holds a line break. (Unigram compares sums over the whole text, so that a cut can tip a tie.)
    """
    probe = "  a  b \n c"
    if processor.decode(processor.encode(probe)) != probe or processor.encode(" a") == processor.encode("a"):
        return False
    for i in range(processor.get_piece_size()):
        piece = processor.id_to_piece(i)
        # Scores of BPE are ranks, those of unigram log-probabilities.
        if _BLANK in piece[1:] or "\n" in piece or not processor.get_score(i).is_integer():
            return False
    return True
