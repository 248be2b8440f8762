"""The cases that T5's parity is tested on: sizes, parameters, rows, and two layouts of the same parameters.

NumPy alone. Parameters are wide so that attention is far from uniform, a swapped kernel or norm shows, and generated
ids vary. `tree` is jaxlm's layout; `flat` has the names and shapes of Hugging Face's T5ForConditionalGeneration.
"""

from dataclasses import dataclass

import numpy as np

NUM_STEPS, SEEDS = 10, {"t5": 24, "t5_1_1": 12}  # seeds with which generated ids vary
LEARNING_RATE = 0.003
PAD, END, FIRST_WORD = 0, 1, 3


@dataclass(frozen=True)
class Sizes:
    """N decoder and M encoder layers, D width, H heads of K, F feed-forward width, V words."""

    num_encoder_layers: int = 3
    num_layers: int = 2
    width: int = 10
    num_heads: int = 2
    head_width: int = 6
    feed_forward_width: int = 16
    feed_forward: str = "relu"
    output: str = "tied"
    scaled_output: bool = True
    num_buckets: int = 12
    max_distance: int = 20
    vocab_size: int = 31


# T5 1.0, and 1.1: a gate, and an output of its own that is not scaled. 1.1 has as many layers on both sides, as the
# reference cannot cache a decoder that is deeper than its encoder.
CASES = {
    "t5": Sizes(),
    "t5_1_1": Sizes(2, 3, feed_forward="geglu", output="untied", scaled_output=False),
}


def make_tree(sizes: Sizes, seed: int) -> dict:
    """float32 parameters, all of them random."""
    rng = np.random.default_rng(seed)
    d, h, k, f = sizes.width, sizes.num_heads, sizes.head_width, sizes.feed_forward_width
    normal = lambda *shape: (0.35 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731

    def block(layers: int, attentions: tuple[str, ...]) -> dict:
        found: dict = {}
        for name in attentions:
            found[name] = {f"{kind}_kernel": normal(layers, d, h, k) for kind in "qkv"}
            found[name]["out_kernel"] = normal(layers, h, k, d)
        gate = {"gate_kernel": normal(layers, d, f)} if sizes.feed_forward == "geglu" else {}
        found["feed_forward"] = gate | {"in_kernel": normal(layers, d, f), "out_kernel": normal(layers, f, d)}
        return found | {f"{name}_norm": {"scale": 1 + normal(layers, d)} for name in (*attentions, "feed_forward")}

    backbone = {
        "embeddings": {"tokens": normal(sizes.vocab_size, d)},
        "encoder_positions": {"biases": 3 * normal(sizes.num_buckets, h)},
        "encoder_blocks": block(sizes.num_encoder_layers, ("attention",)),
        "encoder_norm": {"scale": 1 + normal(d)},
        "decoder_positions": {"biases": 3 * normal(sizes.num_buckets, h)},
        "decoder_blocks": block(sizes.num_layers, ("attention", "source_attention")),
        "decoder_norm": {"scale": 1 + normal(d)},
    }
    head = {"classifier": {"kernel": normal(sizes.vocab_size, d)}} if sizes.output == "untied" else {}
    return {"backbone": backbone} | ({"head": head} if head else {})


def make_rows(sizes: Sizes, seed: int, rows: int = 4) -> dict[str, np.ndarray]:
    """The fields of a jaxlm Batch with one source and one target per row, of other lengths and padded."""
    rng = np.random.default_rng(seed)
    source_length, length = 27, 15
    sources, lengths = rng.integers(9, source_length, size=rows), rng.integers(4, length, size=rows)
    sources[0], lengths[-1] = source_length, length
    source = rng.integers(FIRST_WORD, sizes.vocab_size, size=(rows, source_length))
    targets = rng.integers(FIRST_WORD, sizes.vocab_size, size=(rows, length))
    in_source = np.arange(source_length) < sources[:, None]
    in_target = np.arange(length) < lengths[:, None]
    source[~in_source], targets[~in_target] = PAD, PAD
    source[np.arange(rows), sources - 1], targets[np.arange(rows), lengths - 1] = END, END
    ids = np.concatenate([np.full((rows, 1), PAD), targets[:, :-1]], axis=1)
    found = {
        "ids": ids,
        "targets": targets,
        "positions": np.broadcast_to(np.arange(length), ids.shape),
        "segments": in_target,
        "source": source,
        "source_segments": in_source,
    }
    return {name: np.array(value, np.int32) for name, value in found.items()} | {
        "weights": in_target.astype(np.float32)
    }


def to_flat(tree: dict) -> dict[str, np.ndarray]:
    """Return the parameters by Hugging Face's names; its kernels are (out, in)."""
    backbone, flat = tree["backbone"], {}
    flat["shared.weight"] = backbone["embeddings"]["tokens"]
    for side in ("encoder", "decoder"):
        blocks, theirs = backbone[f"{side}_blocks"], f"{side}.block"
        flat[f"{theirs}.0.layer.0.SelfAttention.relative_attention_bias.weight"] = backbone[f"{side}_positions"][
            "biases"
        ]
        flat[f"{side}.final_layer_norm.weight"] = backbone[f"{side}_norm"]["scale"]
        parts = [("attention", "SelfAttention"), ("source_attention", "EncDecAttention"), ("feed_forward", "")]
        parts = [(ours, name) for ours, name in parts if ours in blocks]
        for layer in range(len(blocks["attention_norm"]["scale"])):
            for place, (ours, name) in enumerate(parts):
                of_layer = {key: value[layer] for key, value in blocks[ours].items()}
                prefix = f"{theirs}.{layer}.layer.{place}"
                flat[f"{prefix}.layer_norm.weight"] = blocks[f"{ours}_norm"]["scale"][layer]
                if ours == "feed_forward":
                    gated = "gate_kernel" in of_layer
                    names = {"gate_kernel": "wi_0", "in_kernel": "wi_1" if gated else "wi", "out_kernel": "wo"}
                    for key, value in of_layer.items():
                        flat[f"{prefix}.DenseReluDense.{names[key]}.weight"] = value.T
                    continue
                d = of_layer["q_kernel"].shape[0]
                for kind in "qkv":
                    flat[f"{prefix}.{name}.{kind}.weight"] = of_layer[f"{kind}_kernel"].reshape(d, -1).T
                flat[f"{prefix}.{name}.o.weight"] = of_layer["out_kernel"].reshape(-1, d).T
    if "head" in tree:
        flat["lm_head.weight"] = tree["head"]["classifier"]["kernel"]
    return flat
