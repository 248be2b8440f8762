"""The case that Transformer-XL parity is tested on: sizes, variants, random parameters and rows. NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_STEPS = 10
RATE, CLIP_NORM = 1e-2, 0.25
EPS = 1e-3  # of Adam, so that no rounding of a small gradient becomes an update of full size
BATCHES = 3  # rows before and at the one whose states and gradient are compared

# norm, attention_biases, clamp_length, same_length
VARIANTS = {
    "post": ("post", "shared", 0, False),
    "same_length": ("post", "per_layer", 4, True),
    "pre": ("pre", "per_layer", 0, False),
}


@dataclass(frozen=True)
class Sizes:
    """N layers, H heads of K, F feed-forward, V words, B rows, L tokens of a row, M slots of memory."""

    num_layers: int = 3
    num_heads: int = 2
    head_width: int = 3
    feed_forward_width: int = 11
    vocab_size: int = 23
    rows: int = 3
    length: int = 5
    memory: int = 7

    @property
    def width(self) -> int:
        """The width of the model."""
        return self.num_heads * self.head_width


def make_tree(sizes: Sizes, variant: str, seed: int) -> dict:
    """Return float32 parameters of the backbone in jaxlm's layout, all of them random."""
    rng = np.random.default_rng(seed)
    n, h, k, d, f = sizes.num_layers, sizes.num_heads, sizes.head_width, sizes.width, sizes.feed_forward_width

    def normal(*shape: int) -> np.ndarray:
        return (0.4 * rng.standard_normal(shape)).astype(np.float32)

    def norm() -> dict:
        return {"scale": 1 + normal(n, d), "bias": normal(n, d)}

    attention = {
        "qkv_kernel": normal(n, d, 3, h, k),
        "relative_kernel": normal(n, d, h, k),
        "out_kernel": normal(n, h, k, d),
    }
    tree: dict = {"embeddings": {"tokens": normal(sizes.vocab_size, d), "output_bias": normal(sizes.vocab_size)}}
    if VARIANTS[variant][1] == "shared":
        tree["attention_biases"] = normal(2, h, k)
    else:
        attention["attention_biases"] = normal(n, 2, h, k)
    tree["blocks"] = {
        "attention": attention,
        "attention_norm": norm(),
        "feed_forward": {
            "in_kernel": normal(n, d, f),
            "in_bias": normal(n, f),
            "out_kernel": normal(n, f, d),
            "out_bias": normal(n, d),
        },
        "feed_forward_norm": norm(),
    }
    return tree


def make_rows(sizes: Sizes, seed: int) -> list[np.ndarray]:
    """Return NUM_STEPS rows of `rows` streams, each (B, 1 + L): the last id of one begins the next."""
    rng = np.random.default_rng(seed)
    streams = rng.integers(sizes.vocab_size, size=(sizes.rows, NUM_STEPS * sizes.length + 1)).astype(np.int32)
    return [streams[:, at : at + sizes.length + 1] for at in range(0, NUM_STEPS * sizes.length, sizes.length)]


def to_flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the leaves by their path, `blocks/attention/out_kernel`."""
    found = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found |= to_flat(value, f"{path}/") if isinstance(value, dict) else {path: np.asarray(value)}
    return found
