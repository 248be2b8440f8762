"""The case that the character Transformer's parity is tested on: sizes, random parameters and rows. NumPy alone."""

from dataclasses import dataclass

import numpy as np

NUM_STEPS = 10
RATE, MOMENTUM = 0.02, 0.9
INTERMEDIATE, SECOND = 0.7, 0.5  # the coefficients of the losses


@dataclass(frozen=True)
class Sizes:
    """N layers, H heads of width K, F hidden units, V symbols, P positions, B rows, L positions of a row."""

    num_layers: int = 3
    heads: int = 2
    head_width: int = 3
    hidden: int = 11
    vocab_size: int = 13
    positions: int = 10
    rows: int = 3
    length: int = 9

    @property
    def width(self) -> int:
        """The width of the states."""
        return self.heads * self.head_width


def make_tree(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return float32 parameters by their path in jaxlm, all of them random; norms are near 1."""
    rng = np.random.default_rng(seed)
    n, h, k, f, v, d = (
        sizes.num_layers,
        sizes.heads,
        sizes.head_width,
        sizes.hidden,
        sizes.vocab_size,
        sizes.heads * sizes.head_width,
    )
    norms = {"attention_norm": n, "feed_forward_norm": n}
    shapes: dict[str, tuple[int, ...]] = {
        "backbone/embeddings/tokens": (v, d),
        "backbone/blocks/positions": (n, sizes.positions, d),
        "backbone/blocks/attention/qkv_kernel": (n, d, 3, h, k),
        "backbone/blocks/attention/qkv_bias": (n, 3, h, k),
        "backbone/blocks/attention/out_kernel": (n, h, k, d),
        "backbone/blocks/attention/out_bias": (n, d),
        "backbone/blocks/feed_forward/in_kernel": (n, d, f),
        "backbone/blocks/feed_forward/in_bias": (n, f),
        "backbone/blocks/feed_forward/out_kernel": (n, f, d),
        "backbone/blocks/feed_forward/out_bias": (n, d),
        **{f"backbone/blocks/{norm}/{part}": (n, d) for norm in norms for part in ("scale", "bias")},
        **{f"backbone/final_norm/{part}": (d,) for part in ("scale", "bias")},
        "head/classifier/kernel": (v, d),
        "head/auxiliary/layer_nll/kernel": (n - 1, v, d),
        "head/auxiliary/second_nll/kernel": (v, d),
        "head/auxiliary/layer_second_nll/kernel": (n - 1, v, d),
        **{f"head/auxiliary/norm/{part}": (n - 1, d) for part in ("scale", "bias")},
    }
    found = {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: np.float32(value + name.endswith("scale")) for name, value in found.items()}


def make_batches(sizes: Sizes, seed: int) -> list[dict[str, np.ndarray]]:
    """Return NUM_STEPS batches of rows with two segments each and padding, as the fields of a `Batch`."""
    rng = np.random.default_rng(seed)
    shape, batches = (sizes.rows, sizes.length), []
    for _ in range(NUM_STEPS):
        ids = rng.integers(sizes.vocab_size, size=shape).astype(np.int32)
        targets = rng.integers(sizes.vocab_size, size=shape).astype(np.int32)
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        for row in range(sizes.rows):
            used = sizes.length - row % 3
            border = int(rng.integers(1, used))
            for number, (start, end) in enumerate([(0, border), (border, used)], start=1):
                segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
                targets[row, start : end - 1] = ids[row, start + 1 : end]
                weights[row, start : end - 1] = 1
        weights[0, 0] = 1  # there is a target, whatever the borders are
        batches.append({"ids": ids, "targets": targets, "positions": positions, "segments": segments})
        batches[-1]["weights"] = weights
    return batches


def nested(flat: dict[str, np.ndarray]) -> dict:
    """Return parameters by path as a tree."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
