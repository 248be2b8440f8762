"""The cases that the biattentive classification network is tested on: sizes, random parameters, rows. NumPy alone."""

from dataclasses import dataclass

import numpy as np

POOL = 4


@dataclass(frozen=True)
class Sizes:
    """Widths of the vectors and of the input layer, units of an LSTM, V words, E rows of C texts of L words, classes.

    reduction: of the width of the pools in the first maxout layer.
    """

    word_width: int = 5
    feed_forward: int = 7
    units: int = 3
    vocab_size: int = 23
    rows: int = 6
    texts: int = 2
    length: int = 7
    classes: int = 5
    reduction: int = 3


PAIRS, SINGLE = Sizes(), Sizes(texts=1, rows=5, reduction=2)


def fields_of(sizes: Sizes) -> dict:
    """Return the fields of jaxlm's config of the model."""
    found = {"vocab_size": sizes.vocab_size, "word_width": sizes.word_width, "character_width": 0, "num_layers": 1}
    found |= {"input_feed_forward_width": sizes.feed_forward, "width": 2 * sizes.units, "units": (sizes.units,)}
    return found | {"projected": False}


def make_tree(sizes: Sizes, seed: int, sides: tuple[str, ...], normed: bool) -> dict:
    """Return float32 parameters in jaxlm's layout, all of them random, with running statistics if `normed`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.6 * rng.standard_normal(shape)).astype(np.float32)

    def bilstm(inputs: int) -> dict[str, np.ndarray]:
        u, found = sizes.units, {}
        for way in ("forward", "backward"):
            found[f"layer_0_{way}_in_kernel"] = normal(inputs, 4 * u)
            found[f"layer_0_{way}_state_kernel"] = normal(u, 4 * u)
            found[f"layer_0_{way}_bias"] = normal(4 * u)
        return found

    d = 2 * sizes.units
    embeddings = {"tokens": normal(sizes.vocab_size, sizes.word_width)}
    embeddings["feed_forward_kernel"] = normal(sizes.word_width, sizes.feed_forward)
    embeddings["feed_forward_bias"] = normal(sizes.feed_forward)
    head: dict = {side: {"integrator": bilstm(3 * d), "pool_kernel": normal(d)} for side in sides}
    head["maxout"], statistics = {}, {}
    for number, (inputs, size) in enumerate(maxout_sizes(sizes, len(sides))):
        head["maxout"][f"kernel_{number}"] = normal(inputs, POOL * size)
        if normed:
            head["maxout"][f"norm_{number}"] = {"scale": 1 + normal(POOL * size), "bias": normal(POOL * size)}
            statistics[f"norm_{number}"] = {"mean": normal(POOL * size), "variance": 1 + normal(POOL * size) ** 2}
        else:
            head["maxout"][f"bias_{number}"] = normal(POOL * size)
    tree = {"backbone": {"embeddings": embeddings, "layer_0": bilstm(sizes.feed_forward)}, "head": head}
    return tree | ({"batch_stats": {"maxout": statistics}} if normed else {})


def maxout_sizes(sizes: Sizes, sides: int) -> list[tuple[int, int]]:
    """Return the inputs and the outputs of each maxout layer."""
    pools = 4 * 2 * sizes.units * sides
    first = pools // sizes.reduction
    return [(pools, first), (first, first // 2), (first // 2, sizes.classes)]


def make_rows(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return ids (E, C, L) from 1 on and 0 at padding, lengths (E, C), labels, and weights; the last row is padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sizes.length + 1, (sizes.rows, sizes.texts)).astype(np.int32)
    lengths[0], lengths[1], lengths[-1] = 1, sizes.length, 0
    ids = rng.integers(1, sizes.vocab_size, (*lengths.shape, sizes.length)).astype(np.int32)
    ids[np.arange(sizes.length) >= lengths[..., None]] = 0
    weights = np.ones(sizes.rows, np.float32)
    weights[-1] = 0
    return {
        "ids": ids,
        "lengths": lengths,
        "labels": rng.integers(sizes.classes, size=sizes.rows).astype(np.int32),
        "weights": weights,
    }


def to_flat(tree: dict, path: str = "") -> dict[str, np.ndarray]:
    """Return the leaves by their path, `head/maxout/kernel_0`."""
    found = {}
    for name, leaf in tree.items():
        found |= to_flat(leaf, f"{path}{name}/") if isinstance(leaf, dict) else {path + name: np.asarray(leaf)}
    return found
