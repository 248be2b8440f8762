"""The case that the BiLSTM over words is tested on: sizes, random parameters, and rows of words. NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_CHARACTERS, CHARACTERS = 50, 261


@dataclass(frozen=True)
class Sizes:
    """Widths of the vectors, filters, units of each layer, width of the states, V words, B rows, L positions."""

    word_width: int = 5
    character_width: int = 3
    filters: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))
    units: tuple[int, ...] = (7, 6)
    width: int = 8
    projected: bool = True
    vocab_size: int = 23
    rows: int = 4
    length: int = 6


def fields_of(sizes: Sizes) -> dict:
    """Return the fields of jaxlm's config of the model."""
    names = ("vocab_size", "word_width", "character_width", "filters", "units", "width", "projected")
    return {name: getattr(sizes, name) for name in names} | {"num_layers": len(sizes.units)}


def make_tree(sizes: Sizes, seed: int) -> dict:
    """Return float32 parameters of the backbone in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)

    characters = {"table": normal(CHARACTERS, sizes.character_width)}
    for number, (width, count) in enumerate(sizes.filters):
        characters[f"filters_{number}_kernel"] = normal(width, sizes.character_width, count)
        characters[f"filters_{number}_bias"] = normal(count)
    tree: dict = {"embeddings": {"tokens": normal(sizes.vocab_size, sizes.word_width), "characters": characters}}
    inputs, states = sizes.word_width + sum(count for _, count in sizes.filters), sizes.width // 2
    for layer, units in enumerate(sizes.units):
        leaves = {}
        for way in ("forward", "backward"):
            leaves[f"layer_0_{way}_in_kernel"] = normal(inputs, 4 * units)
            leaves[f"layer_0_{way}_state_kernel"] = normal(states, 4 * units)
            leaves[f"layer_0_{way}_bias"] = normal(4 * units)
            if sizes.projected:
                leaves[f"layer_0_{way}_out_kernel"] = normal(units, states)
        tree[f"layer_{layer}"] = leaves
        inputs = sizes.width
    return tree


def make_rows(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return ids (B, L), characters (B, L, 50), the length of each row, from 1 to L, and a factor of each state."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[1, sizes.length], rng.integers(1, sizes.length + 1, sizes.rows - 2)])
    shape = (sizes.rows, sizes.length)
    return {
        "ids": rng.integers(sizes.vocab_size, size=shape).astype(np.int32),
        "characters": rng.integers(CHARACTERS, size=(*shape, NUM_CHARACTERS)).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "factors": rng.standard_normal((*shape, sizes.width)).astype(np.float32),
    }


def to_flat(tree: dict, path: str = "") -> dict[str, np.ndarray]:
    """Return the leaves by their path, `layer_0/layer_0_forward_bias`."""
    found = {}
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            found |= to_flat(leaf, f"{path}{name}/")
        else:
            found[path + name] = np.asarray(leaf)
    return found
