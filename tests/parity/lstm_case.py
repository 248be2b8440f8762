"""The case that LSTM parity is tested on: sizes, random parameters, and stretches of streams. NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_STEPS = 10
RATE, BETA1, BETA2, EPS, WEIGHT_DECAY = 3e-3, 0.9, 0.999, 1e-4, 0.1


@dataclass(frozen=True)
class Sizes:
    """N layers, D width, U units, V words, B rows, L positions of a stretch."""

    num_layers: int = 2
    width: int = 6
    units: int = 10
    vocab_size: int = 23
    rows: int = 3
    length: int = 7


def make_tree(sizes: Sizes, seed: int) -> dict:
    """Return float32 parameters of the backbone in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)
    d, u = sizes.width, sizes.units

    def normal(*shape: int) -> np.ndarray:
        return (0.4 * rng.standard_normal(shape)).astype(np.float32)

    tree: dict = {"embeddings": {"tokens": normal(sizes.vocab_size, d)}}
    for number in range(sizes.num_layers):
        tree[f"layer_{number}"] = {
            "in_kernel": normal(d, 4 * u),
            "state_kernel": normal(u, 4 * u),
            "bias": normal(4 * u),
            "out_kernel": normal(u, d),
            "out_bias": normal(d),
        }
    return tree


def make_stretches(sizes: Sizes, seed: int) -> np.ndarray:
    """Return NUM_STEPS stretches of `rows` streams, (NUM_STEPS, B, L + 1): the last id of one begins the next."""
    rng = np.random.default_rng(seed)
    streams = rng.integers(sizes.vocab_size, size=(sizes.rows, NUM_STEPS * sizes.length + 1))
    starts = range(0, NUM_STEPS * sizes.length, sizes.length)
    return np.stack([streams[:, start : start + sizes.length + 1] for start in starts]).astype(np.int32)


def to_flat(tree: dict) -> dict[str, np.ndarray]:
    """Return the leaves by their path, `layer_0/bias`."""
    return {f"{part}/{name}": np.asarray(leaf) for part, leaves in tree.items() for name, leaf in leaves.items()}
