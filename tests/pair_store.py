"""Stores for pairs of sentences, each token's id telling where it stands: token k of a store has the id SPECIAL + k."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from toy_store import write_store

from jaxlm.data.batch import PairBatch
from jaxlm.data.config import SentencePairs
from jaxlm.data.pairs import empty_pairs
from jaxlm.data.rows import training_rows
from jaxlm.data.store import Store
from jaxlm.data.versions import CURRENT
from jaxlm.text.wordpiece import WordPieceTokenizer

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SPECIAL = 5
PAIRS = SentencePairs()
Documents = Sequence[Sequence[int]]


def word_tokenizer(words: int, specials: Sequence[str] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")):
    """A vocabulary in which the word `w7` has the id SPECIAL + 7."""
    return WordPieceTokenizer("".join(f"{piece}\n" for piece in [*specials, *(f"w{k}" for k in range(words))]).encode())


def pair_store(
    path: Path,
    documents: Documents | Mapping[str, Documents],
    *,
    sentences: str = "lines",
    weights: Sequence[float] | None = None,
    tokenizer=None,
) -> Store:
    """A store of documents given by the lengths of their sentences, by section."""
    sections = documents if isinstance(documents, Mapping) else {"words": documents}
    texts, following = {}, 0
    for source, some in sections.items():
        texts[source] = []
        for lengths in some:
            lines = []
            for count in lengths:
                lines.append(" ".join(f"w{k}" for k in range(following, following + count)))
                following += count
            texts[source].append("\n".join(lines))
    return write_store(path, texts, tokenizer or word_tokenizer(following), weights, sentences)


def with_lengths(store: Store, documents: Documents) -> Store:
    """A store of which lengths alone are meant: documents given by the lengths of their sentences, all tokens id 0.

    store: an open one that gives the rest, its tokenizer for instance; nothing is written.
    """
    sentences = np.array([length for lengths in documents for length in lengths])
    found = copy.copy(store)
    starts = np.append(0, np.cumsum(sentences))
    found.__dict__["sentence_starts"] = starts
    found.__dict__["document_starts"] = starts[np.append(0, np.cumsum([len(lengths) for lengths in documents]))]
    found.__dict__["tokens"] = np.zeros(starts[-1], np.uint16)
    found.documents, found.sentences, found.num_tokens = len(documents), len(sentences), int(starts[-1])
    (section, *_) = store.sections
    found.sections = (dataclasses.replace(section, documents=len(documents), tokens=int(starts[-1])),)
    return found


def random_documents(count: int, seed: int = 0, most: int = 12, longest: int = 40) -> list[list[int]]:
    """Documents of 2 to `most` sentences of 1 to `longest` words."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, longest + 1, size=rng.integers(2, most + 1)).tolist() for _ in range(count)]


def sides(batch: PairBatch, b: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Where in the store the tokens of A and of B of pair k of row b stand; its shape is checked on the way."""
    slots = np.flatnonzero(batch.segments[b] == k + 1)
    assert len(slots) and (np.diff(slots) == 1).all(), "the slots of a pair lie together"
    ids, types = batch.ids[b, slots], batch.types[b, slots]
    assert slots[0] == batch.firsts[b, k] and batch.pair_weights[b, k] == 1
    np.testing.assert_array_equal(batch.positions[b, slots], np.arange(len(slots)))
    (borders,) = np.nonzero(ids == SEP)
    assert ids[0] == CLS and len(borders) == 2 and borders[1] == len(ids) - 1
    np.testing.assert_array_equal(types, np.arange(len(ids)) > borders[0])
    a, other = ids[1 : borders[0]] - SPECIAL, ids[borders[0] + 1 : -1] - SPECIAL
    assert len(a) and len(other) and min(a.min(), other.min()) >= 0
    return a, other


def rows_of(*stores, length=64, seed=0, versions=CURRENT, **changes):
    """Training rows of pairs."""
    return training_rows(stores, dataclasses.replace(PAIRS, **changes), length=length, seed=seed, versions=versions)


def epoch_of(rows, epoch=0):
    """The rows of an epoch of a single section, in the order of the plan, as one batch and their origins."""
    (source,) = rows.sources
    batch = empty_pairs(source.rows, rows.length, rows.pairs_per_row)
    for row in range(source.rows):
        source.fill(row, batch, row, epoch)
    return batch, [source.origin(row, epoch) for row in range(source.rows)]


def same(one, other) -> bool:
    """Whether two batches are the same in every bit."""
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
    )
