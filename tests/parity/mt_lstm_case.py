"""The cases that the MT-LSTM is tested on: sizes, random parameters, and rows of ids. NumPy alone."""

from dataclasses import dataclass

import numpy as np

PAD = 0  # as in OpenNMT-py/onmt/Constants.py; no real token has this id
STEPS, LEARNING_RATE, CLIP_NORM = 6, 1.0, 0.5
PERPLEXITIES = (90.0, 40.0, 41.0, 43.0, 43.0, 30.0, 31.0, 30.5)


@dataclass(frozen=True)
class Sizes:
    """Fields of the config, and B rows with sources of S and targets of L slots."""

    num_layers: int
    width: int
    word_width: int
    vocab_size: int
    rows: int
    source: int
    target: int


CASES = {"two": Sizes(2, 6, 5, 23, 4, 7, 6), "three": Sizes(3, 10, 3, 17, 3, 5, 9)}
SEEDS = {"two": 1, "three": 2}


def make_tree(sizes: Sizes, seed: int) -> dict:
    """Return float32 parameters in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)

    def lstm(inputs: int, units: int) -> dict[str, np.ndarray]:
        shapes = {"in_kernel": (inputs, 4 * units), "state_kernel": (units, 4 * units), "bias": (4 * units,)}
        return {name: normal(*shape) for name, shape in shapes.items()}

    d, w, v = sizes.width, sizes.word_width, sizes.vocab_size
    backbone: dict = {
        "embeddings": {name: normal(v, w) for name in ("source_tokens", "target_tokens")},
        "attention": {"in_kernel": normal(d, d), "out_kernel": normal(2 * d, d)},
    }
    for number in range(sizes.num_layers):
        inputs = d if number else w
        backbone[f"layer_{number}"] = {
            "forward": lstm(inputs, d // 2),
            "backward": lstm(inputs, d // 2),
            "decoder": lstm(d if number else w + d, d),
        }
    return {"backbone": backbone, "head": {"classifier": {"kernel": normal(v, d), "bias": normal(v)}}}


def make_rows(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return source (B, S) and target (B, L + 1), padded, their real lengths, and the source's, which fall."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(np.concatenate([[1, sizes.source], rng.integers(2, sizes.source, sizes.rows - 2)]))[::-1]
    found = {"source_lengths": lengths.astype(np.int32)}
    found["target_lengths"] = rng.integers(2, sizes.target + 2, sizes.rows).astype(np.int32)
    found["target_lengths"][-1] = sizes.target + 1
    for name, size in (("source", sizes.source), ("target", sizes.target + 1)):
        ids = rng.integers(PAD + 1, sizes.vocab_size, size=(sizes.rows, size)).astype(np.int32)
        found[name] = np.where(np.arange(size) < found[f"{name}_lengths"][:, None], ids, PAD).astype(np.int32)
    return found


def to_flat(tree: dict, path: str = "") -> dict[str, np.ndarray]:
    """Return the leaves by their path, `backbone/layer_0/forward/bias`."""
    found = {}
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            found |= to_flat(leaf, f"{path}{name}/")
        else:
            found[path + name] = np.asarray(leaf)
    return found
