"""The cases that BERT's parity is tested on: sizes, parameters, batches, and two layouts of the same parameters.

NumPy alone. Parameters are wide (biases and gains too) so that attention is far from uniform and a swapped bias or norm
shows. `tree` is jaxlm's layout; `flat` has the names and shapes of Hugging Face's PyTorch classes.
"""

from dataclasses import dataclass

import numpy as np

from parity import bert_masks

NUM_STEPS = 10
PEAK_LR, WARMUP_STEPS, BETA1, BETA2, WEIGHT_DECAY, CLIP_NORM = 3e-3, 3, 0.9, 0.999, 0.1, 1.0
# Large, so that where it stands shows in the third digit, and so that Adam does not blow up the rounding noise of
# gradients that are almost 0.
EPS = 1e-4
CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5


@dataclass(frozen=True)
class Sizes:
    """N layers, D width, H heads, F feed-forward width, V words, P positions; which GELU."""

    num_layers: int = 2
    width: int = 16
    num_heads: int = 2
    feed_forward_width: int = 24
    vocab_size: int = 41
    num_positions: int = 20
    activation: str = "gelu_tanh"


def make_tree(sizes: Sizes, seed: int) -> dict:
    """float32 parameters of backbone and pretraining heads, all of them random."""
    rng = np.random.default_rng(seed)
    n, d, h, f = sizes.num_layers, sizes.width, sizes.num_heads, sizes.feed_forward_width
    normal = lambda *shape: (0.4 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    norm = lambda *shape: {"scale": (1 + normal(*shape)).astype(np.float32), "bias": normal(*shape)}  # noqa: E731
    backbone = {
        "embeddings": {
            "tokens": normal(sizes.vocab_size, d),
            "positions": normal(sizes.num_positions, d),
            "types": normal(2, d),
            "norm": norm(d),
        },
        "blocks": {
            "attention": {
                "qkv_kernel": normal(n, d, 3, h, d // h),
                "qkv_bias": normal(n, 3, h, d // h),
                "out_kernel": normal(n, h, d // h, d),
                "out_bias": normal(n, d),
            },
            "attention_norm": norm(n, d),
            "feed_forward": {
                "in_kernel": normal(n, d, f),
                "in_bias": normal(n, f),
                "out_kernel": normal(n, f, d),
                "out_bias": normal(n, d),
            },
            "feed_forward_norm": norm(n, d),
        },
        "pooler": {"kernel": normal(d, d), "bias": normal(d)},
    }
    head = {
        "masked_lm": {
            "kernel": normal(d, d),
            "bias": normal(d),
            "norm": norm(d),
            "output_bias": normal(sizes.vocab_size),
        },
        "next_sentence": {"kernel": normal(d, 2), "bias": normal(2)},
    }
    return {"backbone": backbone, "head": head}


def make_sequences(sizes: Sizes, rng: np.random.Generator, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """CLS A SEP B SEP of each length, padded with 0, and where B begins: ids (…, P) and (…,); length 0 is absent."""
    ids = np.zeros((*lengths.shape, sizes.num_positions), np.int32)
    second = np.zeros(lengths.shape, np.int32)
    for place in np.ndindex(lengths.shape):
        n = int(lengths[place])
        if n:
            border = int(rng.integers(2, n - 2))
            ids[place][:n] = rng.integers(FIRST_WORD, sizes.vocab_size, size=n)
            ids[place][[0, border, n - 1]] = CLS, SEP, SEP
            second[place] = border + 1
    return ids, second


def make_pairs(sizes: Sizes, seed: int, rows: int = 5) -> dict[str, np.ndarray]:
    """The fields of a jaxlm PairBatch with a pair a row, and its masks: seen (B, P), targets (B, P), -100 elsewhere."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, sizes.num_positions + 1, size=rows)
    lengths[0] = sizes.num_positions
    ids, second = make_sequences(sizes, rng, lengths)
    index = np.arange(sizes.num_positions)
    real = index < lengths[:, None]
    batch = {
        "ids": ids,
        "types": (real & (index >= second[:, None])).astype(np.int32),
        "positions": (real * index).astype(np.int32),
        "segments": real.astype(np.int32),
        "firsts": np.zeros((rows, 1), np.int32),
        "next_labels": rng.integers(2, size=(rows, 1)).astype(np.int32),
        "pair_weights": np.ones((rows, 1), np.float32),
        "mask_seeds": rng.integers(2**32, size=(rows, 2), dtype=np.uint32),
    }
    seen, targets = ids.copy(), np.full_like(ids, -100)
    for row, n in enumerate(lengths):
        seeds = (int(batch["mask_seeds"][row, 0]), int(batch["mask_seeds"][row, 1]))
        hidden, chosen = bert_masks.mask_pair(
            ids[row, :n], seeds, 0, specials=(CLS, SEP, MASK), vocab_size=sizes.vocab_size
        )
        seen[row, :n], targets[row, chosen] = hidden, ids[row, chosen]
    return batch | {"seen": seen, "targets": targets}


TASKS = {"classification": 3, "regression": 1, "choice": 1, "span": 2, "tagging": 5}  # and the outputs of their heads


def make_task(sizes: Sizes, kind: str, seed: int, rows: int = 4) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The fields of a jaxlm ExampleBatch and the parameters of its head.

    Windows of spans are full: the original's softmax covers padding, jaxlm's does not.
    """
    rng = np.random.default_rng(seed)
    choices, length = 3 if kind == "choice" else 1, sizes.num_positions
    lengths = rng.integers(8, length + 1, size=(rows, choices)).astype(np.int32)
    if kind == "span":
        lengths[:] = length
    ids, second = make_sequences(sizes, rng, lengths)
    labels = {
        "classification": rng.integers(3, size=rows),
        "regression": 5 * rng.random(rows),
        "choice": rng.integers(3, size=rows),
        "span": rng.integers(length, size=(rows, 2)),
        "tagging": np.where(rng.random((rows, length)) < 0.4, -1, rng.integers(5, size=(rows, length))),
    }[kind]
    if kind == "tagging":
        labels = np.where(np.arange(length) < lengths, labels, -1)
    batch = {
        "ids": ids,
        "lengths": lengths,
        "extract": np.zeros_like(lengths),
        "second": second,
        "labels": labels.astype(np.float32 if kind == "regression" else np.int32),
        "weights": np.ones(rows, np.float32),
        "index": np.arange(rows, dtype=np.int32),
    }
    head = {
        "kernel": rng.standard_normal((sizes.width, TASKS[kind])).astype(np.float32),
        "bias": rng.standard_normal(TASKS[kind]).astype(np.float32),
    }
    return batch, head


def make_lstm(seed: int, *, batch: int = 3, length: int = 7, width: int = 6, units: int = 5, layers: int = 2) -> dict:
    """Inputs (B, L, D), lengths, a cotangent of the outputs, and a jaxlm BiLSTM's parameters, float32."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (0.5 * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    params = {}
    for layer in range(layers):
        d = width if layer == 0 else 2 * units
        for way in ("forward", "backward"):
            name = f"layer_{layer}_{way}"
            params |= {
                f"{name}_in_kernel": normal(d, 4 * units),
                f"{name}_state_kernel": normal(units, 4 * units),
                f"{name}_bias": normal(4 * units),
            }
    lengths = np.array([length, *rng.integers(1, length, size=batch - 1)], np.int32)
    return {
        "params": params,
        "x": normal(batch, length, width),
        "lengths": lengths,
        "cotangent": normal(batch, length, 2 * units),
    }


def to_flat(tree: dict) -> dict[str, np.ndarray]:
    """jaxlm's layout (with pretraining heads or without) to the names of transformers' BertForPreTraining, float64."""
    backbone, blocks = tree["backbone"], tree["backbone"]["blocks"]
    embeddings, d = backbone["embeddings"], np.shape(backbone["pooler"]["bias"])[0]
    flat = {
        "bert.embeddings.word_embeddings.weight": embeddings["tokens"],
        "bert.embeddings.position_embeddings.weight": embeddings["positions"],
        "bert.embeddings.token_type_embeddings.weight": embeddings["types"],
        "bert.embeddings.LayerNorm.weight": embeddings["norm"]["scale"],
        "bert.embeddings.LayerNorm.bias": embeddings["norm"]["bias"],
        "bert.pooler.dense.weight": np.asarray(backbone["pooler"]["kernel"]).T,
        "bert.pooler.dense.bias": backbone["pooler"]["bias"],
    }
    for layer in range(len(blocks["attention"]["out_bias"])):
        get = lambda part, name, layer=layer: np.asarray(blocks[part][name])[layer]  # noqa: E731
        at = f"bert.encoder.layer.{layer}"
        for number, name in enumerate(("query", "key", "value")):
            kernel, bias = get("attention", "qkv_kernel")[:, number], get("attention", "qkv_bias")[number]
            flat[f"{at}.attention.self.{name}.weight"] = kernel.reshape(d, d).T
            flat[f"{at}.attention.self.{name}.bias"] = bias.reshape(d)
        flat[f"{at}.attention.output.dense.weight"] = get("attention", "out_kernel").reshape(d, d).T
        flat[f"{at}.attention.output.dense.bias"] = get("attention", "out_bias")
        for theirs, ours in (("intermediate", "in"), ("output", "out")):
            flat[f"{at}.{theirs}.dense.weight"] = get("feed_forward", f"{ours}_kernel").T
            flat[f"{at}.{theirs}.dense.bias"] = get("feed_forward", f"{ours}_bias")
        for theirs, ours in (("attention.output", "attention_norm"), ("output", "feed_forward_norm")):
            flat[f"{at}.{theirs}.LayerNorm.weight"] = get(ours, "scale")
            flat[f"{at}.{theirs}.LayerNorm.bias"] = get(ours, "bias")
    if "masked_lm" in tree.get("head", {}):
        masked_lm, next_sentence = tree["head"]["masked_lm"], tree["head"]["next_sentence"]
        flat |= {
            "cls.predictions.transform.dense.weight": np.asarray(masked_lm["kernel"]).T,
            "cls.predictions.transform.dense.bias": masked_lm["bias"],
            "cls.predictions.transform.LayerNorm.weight": masked_lm["norm"]["scale"],
            "cls.predictions.transform.LayerNorm.bias": masked_lm["norm"]["bias"],
            "cls.predictions.bias": masked_lm["output_bias"],
            "cls.seq_relationship.weight": np.asarray(next_sentence["kernel"]).T,
            "cls.seq_relationship.bias": next_sentence["bias"],
        }
    return {name: np.array(value, np.float64) for name, value in flat.items()}


def decayed(name: str) -> bool:
    """All but norms and biases (optimization.py:59-65)."""
    return not ("LayerNorm" in name or name.endswith("bias"))


def without_key_biases(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`flat` without the biases of the keys.

    A softmax does not change when all scores of a query shift, so their gradient is rounding noise around 0, which
    Adam then blows up to steps as large as any. They move nothing, and comparing them compares noise.
    """
    return {name: value for name, value in flat.items() if not name.endswith("self.key.bias")}
