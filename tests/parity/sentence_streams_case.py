"""The case that streams of sentences are compared on: sentences, their orders, and the sizes of a batch. NumPy alone.

The streams of the case end where sentences end, in both orders, because a file of the original has whole sentences.
"""

import numpy as np

ROWS, LENGTH, STEPS, CHARACTERS = 4, 7, 30, 50
VOCABULARY = 30
DOCUMENTS = 3  # that the sentences are divided into

_COMMON = [f"w{k}" for k in range(40)]
_ODD = ["né", "🙂", "<unk>", "é" * 30, "x" + "é" * 30, "y" * 47, "y" * 48, "y" * 49, "Ωmega.", "…"]


def make_sentences(seed: int = 0) -> list[list[str]]:
    """Return the sentences in order, ROWS times as many targets as a stream has: one stream after the other."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(_COMMON) + len(_ODD) + 1)
    found = []
    for _ in range(ROWS):
        left = LENGTH * STEPS
        while left > 1:
            count = left - 1 if left < 18 else int(rng.integers(1, 16))
            found.append(rng.choice([*_COMMON, *_ODD], size=count, p=weights / weights.sum()).tolist())
            left -= count + 1
    return found


def make_order(sentences: list[list[str]], seed: int) -> np.ndarray:
    """Return an order of the sentences in which the streams end with sentences, int64 (sentences,)."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum([len(words) + 1 for words in sentences])
    streams = (ends - 1) // (LENGTH * STEPS)
    return np.concatenate([rng.permutation(np.flatnonzero(streams == stream)) for stream in rng.permutation(ROWS)])


def make_documents(sentences: list[list[str]]) -> list[str]:
    """Return the sentences in documents, one per line."""
    lines = [" ".join(words) for words in sentences]
    edges = [len(lines) * k // DOCUMENTS for k in range(DOCUMENTS + 1)]
    return ["\n".join(lines[first:end]) for first, end in zip(edges[:-1], edges[1:], strict=True)]
