"""The case that GPT parity is tested on: sizes, parameters, packed rows, and two layouts of the same parameters.

NumPy alone. Parameters are wide (deviation 0.4, biases and gains too) so that attention is far from uniform and a
swapped bias or norm shows. `tree` is jaxlm's layout; `flat` is openai/finetune-transformer-lm's: `we`, `wpe`, and for
each layer c_attn, c_proj, ln_1, c_fc, c_proj (mlp), ln_2, with queries, keys and values side by side in c_attn.
"""

from dataclasses import dataclass

import numpy as np

NUM_STEPS = 10
PEAK_LR, WARMUP_STEPS, BETA1, BETA2, WEIGHT_DECAY, CLIP_NORM = 3e-3, 3, 0.9, 0.999, 0.1, 1.0
# Large, so that where it stands (in or out of the root, before or after the correction) shows in the third digit, and
# so that Adam does not blow up the rounding noise of gradients that are almost 0.
EPS = 1e-3


@dataclass(frozen=True)
class Sizes:
    """N layers, D width, H heads, F feed-forward width, V words, P positions."""

    num_layers: int = 2
    width: int = 12
    num_heads: int = 2
    feed_forward_width: int = 24
    vocab_size: int = 29
    num_positions: int = 10


def make_tree(sizes: Sizes, seed: int) -> dict:
    """float32 parameters of the backbone, all of them random."""
    rng = np.random.default_rng(seed)
    n, d, h, f = sizes.num_layers, sizes.width, sizes.num_heads, sizes.feed_forward_width
    normal = lambda *shape: (0.4 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    norm = lambda: {"scale": (1 + normal(n, d)).astype(np.float32), "bias": normal(n, d)}  # noqa: E731
    return {
        "embeddings": {"tokens": normal(sizes.vocab_size, d), "positions": normal(sizes.num_positions, d)},
        "blocks": {
            "attention": {
                "qkv_kernel": normal(n, d, 3, h, d // h),
                "qkv_bias": normal(n, 3, h, d // h),
                "out_kernel": normal(n, h, d // h, d),
                "out_bias": normal(n, d),
            },
            "attention_norm": norm(),
            "feed_forward": {
                "in_kernel": normal(n, d, f),
                "in_bias": normal(n, f),
                "out_kernel": normal(n, f, d),
                "out_bias": normal(n, d),
            },
            "feed_forward_norm": norm(),
        },
    }


def make_rows(sizes: Sizes, seed: int, rows: int = 3) -> dict[str, np.ndarray]:
    """Packed rows (rows, P): random documents, positions that restart, a padded end; the fields of a jaxlm Batch."""
    rng = np.random.default_rng(seed)
    length = sizes.num_positions
    ids = rng.integers(sizes.vocab_size, size=(rows, length)).astype(np.int32)
    targets = rng.integers(sizes.vocab_size, size=(rows, length)).astype(np.int32)
    positions, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(1, rows):
        used = length - row  # the last places are padding
        border = int(rng.integers(2, used - 2))
        for number, (start, end) in enumerate([(0, border), (border, used)], start=1):
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
    segments[0], positions[0] = 1, np.arange(length)  # one document fills the first row
    weights = (segments > 0).astype(np.float32)
    weights[:, 0] = 0.5  # weights need not be whole
    return {"ids": ids, "targets": targets, "positions": positions, "segments": segments, "weights": weights}


_LAYER = {
    "c_attn.w": ("attention", "qkv_kernel", lambda x, d: x.reshape(d, 3 * d)),
    "c_attn.b": ("attention", "qkv_bias", lambda x, d: x.reshape(3 * d)),
    "c_proj.w": ("attention", "out_kernel", lambda x, d: x.reshape(d, d)),
    "c_proj.b": ("attention", "out_bias", lambda x, d: x),
    "ln_1.g": ("attention_norm", "scale", lambda x, d: x),
    "ln_1.b": ("attention_norm", "bias", lambda x, d: x),
    "mlp.c_fc.w": ("feed_forward", "in_kernel", lambda x, d: x),
    "mlp.c_fc.b": ("feed_forward", "in_bias", lambda x, d: x),
    "mlp.c_proj.w": ("feed_forward", "out_kernel", lambda x, d: x),
    "mlp.c_proj.b": ("feed_forward", "out_bias", lambda x, d: x),
    "ln_2.g": ("feed_forward_norm", "scale", lambda x, d: x),
    "ln_2.b": ("feed_forward_norm", "bias", lambda x, d: x),
}


def to_flat(tree: dict) -> dict[str, np.ndarray]:
    """jaxlm's layout to the original's, float64: `we`, `wpe`, `h0.c_attn.w`, …"""
    flat = {"we": tree["embeddings"]["tokens"], "wpe": tree["embeddings"]["positions"]}
    n, d = np.shape(tree["blocks"]["attention"]["out_bias"])
    for layer in range(n):
        for name, (part, leaf, reshape) in _LAYER.items():
            flat[f"h{layer}.{name}"] = reshape(np.asarray(tree["blocks"][part][leaf])[layer], d)
    return {name: np.array(value, np.float64) for name, value in flat.items()}


def free_of_key_biases(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`flat` with the biases of the keys set to 0.

    A softmax does not change when all scores of a query shift, so their gradient is rounding noise around 0, which
    Adam then blows up to steps as large as any. They move nothing, and comparing them compares noise.
    """
    cleared = dict(flat)
    for name, value in flat.items():
        if name.endswith("c_attn.b"):
            d = len(value) // 3
            cleared[name] = np.concatenate([value[:d], np.zeros(d), value[2 * d :]])
    return cleared
