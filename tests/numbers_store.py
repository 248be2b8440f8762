"""Stores whose ids a test chooses: documents are lists of numbers, the text "3 5 7" has the ids 3, 5, 7."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from toy_store import write_store

from jaxlm.data.store import Store
from jaxlm.text import Tokenizer

END = 0
SIZE = 70_000  # over 65,536, so that ids take 32 bits


class Numbers(Tokenizer):
    """The numbers of a text are its ids; id 0 ends documents where `end` is True."""

    kind = "numbers"

    def __init__(self, end: bool):
        super().__init__({}, SIZE, {"end": END} if end else {})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def _piece(self, i: int) -> str:
        return str(i)


def numbers_store(
    path: Path,
    lengths: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    end: bool = True,
    weights: Sequence[float] | None = None,
) -> Store:
    """A store of documents of these many tokens (before the end), by section; no number occurs twice in it.

    Ids count up from 1 through the store, so that an id tells where its token stands.
    """
    sections = lengths if isinstance(lengths, Mapping) else {"numbers": lengths}
    texts, following = {}, 1
    for source, documents in sections.items():
        texts[source] = []
        for count in documents:
            texts[source].append(" ".join(map(str, range(following, following + count))))
            following += count
    assert following <= SIZE
    return write_store(path, texts, Numbers(end), weights)


def documents_of(store: Store) -> np.ndarray:
    """The document that each token of a store belongs to, (num_tokens,)."""
    return np.repeat(np.arange(store.documents), np.diff(store.document_starts))
