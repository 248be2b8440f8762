"""The case that CoVe's file is tested on: random tensors by the published names, vectors, sentences. NumPy alone."""

import numpy as np

LAYERS, UNITS, WIDTH = 2, 4, 5  # no two axes of a tensor are equal
WORDS = ("the", "cat", "sat", "on", "a", "mat", "naïve", "3.5")
SENTENCES = ("the cat sat on the mat", "naïve", "a mat sat dog 3.5")  # one word has no vector


def make_tensors() -> dict[str, np.ndarray]:
    """Return float32 tensors by the names of torch.nn.LSTM, all of them random."""
    rng, found = np.random.default_rng(7), {}
    for layer in range(LAYERS):
        for suffix in ("", "_reverse"):
            inputs = 2 * UNITS if layer else WIDTH
            shapes = {"weight_ih": (4 * UNITS, inputs), "weight_hh": (4 * UNITS, UNITS)}
            shapes |= {"bias_ih": (4 * UNITS,), "bias_hh": (4 * UNITS,)}
            for name, shape in shapes.items():
                found[f"{name}_l{layer}{suffix}"] = (0.7 * rng.standard_normal(shape)).astype(np.float32)
    return found


def make_vectors() -> dict[str, list[str]]:
    """Return the numbers of each word, as they are written."""
    rng = np.random.default_rng(8)
    return {word: [f"{value:.4f}" for value in rng.standard_normal(WIDTH)] for word in WORDS}


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of the sentences' words (B, L, W), zeros at padding and for unknown words, and the lengths."""
    vectors, sentences = make_vectors(), [text.split() for text in SENTENCES]
    lengths = np.array([len(words) for words in sentences])
    rows = np.zeros((len(sentences), lengths.max(), WIDTH), np.float32)
    for row, words in enumerate(sentences):
        for place, word in enumerate(words):
            if word in vectors:
                rows[row, place] = np.array(vectors[word], np.float32)
    return rows, lengths
