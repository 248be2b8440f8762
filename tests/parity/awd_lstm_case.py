"""The case that AWD-LSTM parity is tested on: sizes, random parameters, dropout masks and windows. NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_STEPS = 10
RATE, WEIGHT_DECAY, CLIP_NORM = 2.0, 1e-3, 0.25
ALPHA, BETA = 2.0, 1.0
BEGIN = 4  # the step after which the iterates are averaged
RATES = {"word": 0.1, "embedding": 0.4, "recurrent": 0.5, "between": 0.25, "output": 0.4}


@dataclass(frozen=True)
class Sizes:
    """N layers, D width, U units, V words, B rows, L nominal positions of a window."""

    num_layers: int = 3
    width: int = 6
    units: int = 10
    vocab_size: int = 23
    rows: int = 3
    length: int = 7

    def units_of(self, layer: int) -> int:
        """Return the units of a layer."""
        return self.width if layer == self.num_layers - 1 else self.units


def make_tree(sizes: Sizes, seed: int) -> dict:
    """Return float32 parameters of the backbone in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.4 * rng.standard_normal(shape)).astype(np.float32)

    tree: dict = {
        "embeddings": {"tokens": normal(sizes.vocab_size, sizes.width), "output_bias": normal(sizes.vocab_size)}
    }
    before = sizes.width
    for number in range(sizes.num_layers):
        units = sizes.units_of(number)
        tree[f"layer_{number}"] = {
            "in_kernel": normal(before, 4 * units),
            "state_kernel": normal(units, 4 * units),
            "in_bias": normal(4 * units),
            "state_bias": normal(4 * units),
        }
        before = units
    return tree


def make_masks(sizes: Sizes, seed: int) -> list[np.ndarray]:
    """Return the masks in the order in which the model draws them, with their scale.

    Of the words (V, 1), of the embedding (B, 1, D), then of each layer: of its recurrent kernel (U, 4 U) and of its
    output (B, 1, U).
    """
    rng = np.random.default_rng(seed)

    def mask(rate: float, *shape: int) -> np.ndarray:
        return ((rng.random(shape) >= rate) / (1 - rate)).astype(np.float32)

    masks = [mask(RATES["word"], sizes.vocab_size, 1), mask(RATES["embedding"], sizes.rows, 1, sizes.width)]
    for number in range(sizes.num_layers):
        units = sizes.units_of(number)
        rate = RATES["output" if number == sizes.num_layers - 1 else "between"]
        masks += [mask(RATES["recurrent"], units, 4 * units), mask(rate, sizes.rows, 1, units)]
    return masks


def make_windows(sizes: Sizes, seed: int) -> list[np.ndarray]:
    """Return NUM_STEPS windows of `rows` streams, each (B, 1 + its inputs): the last id of one begins the next."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, sizes.length + 11, NUM_STEPS)
    streams = rng.integers(sizes.vocab_size, size=(sizes.rows, inputs.sum() + 1)).astype(np.int32)
    ends = np.cumsum(inputs)
    return [streams[:, end - count : end + 1] for count, end in zip(inputs, ends, strict=True)]


def to_flat(tree: dict) -> dict[str, np.ndarray]:
    """Return the leaves by their path, `layer_0/in_bias`."""
    return {f"{part}/{name}": np.asarray(leaf) for part, leaves in tree.items() for name, leaf in leaves.items()}
