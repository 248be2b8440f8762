"""Make word vectors from plain text by counts and a singular value decomposition, in GloVe's text format.

    python launch/demonstrations/vectors.py --text 'books/train/*.txt' --output vectors.txt --width 100

The matrix is that of Levy and Goldberg (2014, section 3): the positive pointwise mutual information of the words and
the words around them, less log k. The vectors are those of the decomposition U S V^T with half of the singular values,
U sqrt(S) (section 3.3 there). The decomposition is randomized (Halko, Martinsson and Tropp, 2011, algorithm 4.4). Words
and marks of punctuation are told apart, in lower case unless told otherwise. The same command gives the same file.
"""

import argparse
import glob
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import sparse

from jaxlm.errors import InputError, run_command
from jaxlm.files import atomic_output
from jaxlm.progress import Progress
from jaxlm.reading.lines import Lines

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
SPARE = 16  # columns of the random matrix beyond the width
PRODUCTS = 12  # of the matrix with them, each of which separates large singular values from small ones


def words_of(path: str, lower_case: bool) -> Iterator[str]:
    """Yield the words of a file and its marks of punctuation."""
    for _, line in Lines(path, errors="replace", decompress=True):
        yield from _WORD.findall(line.lower() if lower_case else line)


def vocabulary(files: Sequence[str], size: int, minimum_count: int, lower_case: bool) -> list[str]:
    """Return the most frequent words, in this order; equally frequent ones are in the order of their code points."""
    counts: Counter[str] = Counter()
    with Progress("files whose words are counted", len(files)) as progress:
        for number, path in enumerate(files, 1):
            counts.update(words_of(path, lower_case))
            progress.update(number)
    return sorted((word for word in counts if counts[word] >= minimum_count), key=lambda w: (-counts[w], w))[:size]


def pair_counts(files: Sequence[str], words: Sequence[str], window: int, lower_case: bool) -> sparse.csr_array:
    """Return how often two words are at most `window` places apart, (V, V), symmetric. Unknown words have a place."""
    ids = {word: number for number, word in enumerate(words)}
    found = sparse.csr_array((len(words), len(words)), dtype=np.float64)
    with Progress("files whose pairs are counted", len(files)) as progress:
        for number, path in enumerate(files, 1):
            text = np.fromiter((ids.get(word, -1) for word in words_of(path, lower_case)), np.int64)
            for distance in range(1, window + 1):
                pairs = np.stack([text[:-distance], text[distance:]])
                first, second = pairs[:, (pairs >= 0).all(axis=0)]
                found = found + sparse.coo_array((np.ones(len(first)), (first, second)), found.shape).tocsr()
            progress.update(number)
    return (found + found.T).tocsr()


def shifted_ppmi(counts: sparse.csr_array, negatives: float) -> sparse.csr_array:
    """Return max(log(#(w, c) |D| / (#(w) #(c))) - log k, 0) of pairs that occur; all others are 0."""
    of_word, pairs = counts.sum(axis=1), counts.tocoo()
    row, column = pairs.coords
    values = np.log(pairs.data * of_word.sum() / (of_word[row] * of_word[column])) - np.log(negatives)
    found = sparse.csr_array((np.maximum(values, 0.0), (row, column)), counts.shape)
    found.eliminate_zeros()
    return found


def decomposed(matrix: sparse.csr_array, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first left singular vectors (V, width) of a symmetric matrix and its singular values (width,)."""
    columns = min(width + SPARE, matrix.shape[0])
    q = np.random.default_rng(seed).standard_normal((matrix.shape[0], columns))
    with Progress("products of the decomposition", PRODUCTS) as progress:
        for number in range(PRODUCTS):
            q, _ = np.linalg.qr(matrix @ q)
            progress.update(number + 1)
    u, values, _ = np.linalg.svd((matrix @ q).T, full_matrices=False)
    u = (q @ u)[:, :width]
    signs = np.sign(u[np.abs(u).argmax(axis=0), np.arange(width)])  # a decomposition leaves them open
    return u * signs, values[:width]


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", required=True, nargs="+", help="text files, or patterns of them")
    parser.add_argument("--output", type=Path, required=True, help="file of the vectors")
    parser.add_argument("--size", type=int, default=20_000, help="most words (default 20000)")
    parser.add_argument("--width", type=int, default=100, help="numbers of a vector (default 100)")
    parser.add_argument("--window", type=int, default=5, help="words on each side (default 5)")
    parser.add_argument("--negatives", type=float, default=1.0, help="k, whose log is subtracted (default 1)")
    parser.add_argument("--minimum-count", type=int, default=5, help="rarer words have no vector (default 5)")
    parser.add_argument("--keep-case", action="store_true", help="keep the case of words")
    parser.add_argument("--seed", type=int, default=0, help="seed of the decomposition (default 0)")
    found = parser.parse_args()
    for name in ("size", "width", "window", "minimum_count", "negatives"):
        if (value := getattr(found, name)) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value:g}; give a larger one")
    return found


def main() -> None:
    """Run the command."""
    given = arguments()
    files = sorted({path for pattern in given.text for path in glob.glob(pattern)})
    if not files:
        raise InputError(f"--text must be files, got none for {' '.join(given.text)}; give other patterns")
    words = vocabulary(files, given.size, given.minimum_count, not given.keep_case)
    if len(words) < given.width:
        raise InputError(f"--width must be at most {len(words)}, the words of the text, got {given.width}; give less")
    matrix = shifted_ppmi(pair_counts(files, words, given.window, not given.keep_case), given.negatives)
    u, values = decomposed(matrix, given.width, given.seed)
    vectors = u * np.sqrt(values)
    with atomic_output(given.output) as file:
        for word, vector in zip(words, vectors, strict=True):
            file.write(f"{word} {' '.join(f'{number:.6g}' for number in vector)}\n")
    print(f"{given.output}: {len(words):,} words of {len(files):,} files, {given.width} numbers each")


if __name__ == "__main__":
    run_command(main)
