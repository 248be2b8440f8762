"""The characters of words, as ELMo's language model reads them (allenai/bilm-tf, bilm/data.py:98-190).

They are the bytes of a word's UTF-8 between two marks:

    0 to 255 bytes    256 <S>, 257 </S>    258 begins a word, 259 ends it    260 padding

bilm-tf adds 1 to these ids at inference, where 0 is padding; here the ids are always the same.
"""

from collections.abc import Iterable

import numpy as np

NUM_CHARACTERS = 50  # of a token, its marks and padding included
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = range(256, 261)
SENTENCE_MARKS = {"<S>": BEGIN_SENTENCE, "</S>": END_SENTENCE}


def character_ids(words: Iterable[str], size: int = NUM_CHARACTERS) -> np.ndarray:
    """Return the ids of the characters of words, int32 (number of words, `size`).

    A word of more than size - 2 bytes is truncated to them, within a character if necessary, and still has its end.
    "<S>" and "</S>", the beginning and end of a sentence, have one character each.
    """
    return np.array([_ids(word, size) for word in words], np.int32).reshape(-1, size)


def _ids(word: str, size: int) -> list[int]:
    mark = SENTENCE_MARKS.get(word)
    content = list(word.encode("utf-8", "ignore")[: size - 2]) if mark is None else [mark]
    ids = [BEGIN_WORD, *content, END_WORD]
    return ids + [PADDING] * (size - len(ids))
