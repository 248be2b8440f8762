"""Word vectors by counts and a decomposition, launch/demonstrations/vectors.py, against enumeration and dense SVD."""

import importlib.util
import sys

import numpy as np
import pytest
from paths import REPOSITORY
from scipy import sparse

from jaxlm.errors import InputError
from jaxlm.text.word_vectors import read_vectors

_spec = importlib.util.spec_from_file_location("vectors", REPOSITORY / "launch" / "demonstrations" / "vectors.py")
vectors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(vectors)
TEXT = "The cat's hat, the hat of a cat.\nA cat of the hat; no hat at all."


@pytest.fixture
def texts(tmp_path):
    for name, text in (("a", TEXT), ("b", "Of all the cats, a cat.")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vectors.py", *map(str, arguments)])
    vectors.main()


@pytest.mark.parametrize("window", [1, 3, 40])
def test_pairs_are_those_of_enumeration(texts, window):
    """Fails when a pair is counted in one order alone, across files, or at a distance without the unknown words."""
    files = [str(texts / "a.txt"), str(texts / "b.txt")]
    words = ["the", "cat", "hat", "of", "all", ",", "cat's"]
    counts = np.zeros((len(words), len(words)))
    for file in files:
        text = list(vectors.words_of(file, True))
        assert "." in text and "The" not in text
        for i, one in enumerate(text):
            for j, other in enumerate(text):
                if 0 < abs(i - j) <= window and one in words and other in words:
                    counts[words.index(one), words.index(other)] += 1
    found = vectors.pair_counts(files, words, window, True)
    np.testing.assert_array_equal(found.toarray(), counts)
    total, of_word = counts.sum(), counts.sum(axis=1)
    for k in (1.0, 2.0):
        wanted = np.zeros_like(counts)
        for i, j in np.argwhere(counts):
            wanted[i, j] = max(np.log(counts[i, j] * total / (of_word[i] * of_word[j])) - np.log(k), 0)
        np.testing.assert_allclose(vectors.shifted_ppmi(found, k).toarray(), wanted, atol=1e-12)


def test_the_decomposition_is_numpys():
    """Fails when singular vectors or values are others than those of the whole matrix."""
    rng = np.random.default_rng(0)
    dense = np.maximum(rng.standard_normal((60, 60)), 0) * np.exp(-np.arange(60) / 9)
    dense = dense + dense.T
    u, values = vectors.decomposed(sparse.csr_array(dense), 8, seed=1)
    wanted_u, wanted, _ = np.linalg.svd(dense)
    np.testing.assert_allclose(values, wanted[:8], rtol=1e-6)
    np.testing.assert_allclose(np.abs(np.sum(u * wanted_u[:, :8], axis=0)), 1, atol=1e-6)


def test_the_file_is_the_same_each_time_and_can_be_read(texts, monkeypatch):
    """Fails when words are not sorted by frequency, or chance decides on a number."""
    for name in ("one", "two"):
        given = ("--text", texts / "*.txt", "--output", texts / name, "--width", 3, "--minimum-count", 2)
        run(monkeypatch, *given)
    assert (texts / "one").read_text() == (texts / "two").read_text()
    found = dict(read_vectors(str(texts / "one")))
    assert list(found)[:4] == ["hat", "the", ".", "a"] and {len(vector) for vector in found.values()} == {3}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--text", "none*"), "--text must be files, got none for none*"),
        (("--width", 50), "--width must be at most"),
        (("--window", 0), "--window must be at least 1, got 0"),
    ],
)
def test_wrong_usage_is_refused(texts, monkeypatch, more, said):
    with pytest.raises(InputError, match=said.replace("*", "\\*")):
        run(monkeypatch, "--text", texts / "a.txt", "--output", texts / "out", *more)
