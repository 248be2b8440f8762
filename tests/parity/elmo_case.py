"""The case that ELMo parity is tested on: sizes, tensors by bilm-tf's names, sentences, a sample. NumPy alone."""

from dataclasses import dataclass

import numpy as np

WORDS = (
    "a",
    "ELMo",
    "naïve",
    "\u00fc" * 30,
    "x" * 60,
    "日本語" * 8,
    "</S>",
    "<S>",
    "<UNK>",
    "don't",
    ".",
    "",
    "e\u0301",
)


@dataclass(frozen=True)
class Sizes:
    """Odd sizes: N layers, P projection, U units, filters, width K of characters, C characters of a token, highways."""

    num_layers: int = 3
    projection: int = 5
    units: int = 7
    filters: tuple[tuple[int, int], ...] = ((1, 3), (3, 4), (2, 2))
    character_width: int = 3
    num_characters: int = 11
    num_highways: int = 2
    cell_clip: float = 0.7
    projection_clip: float = 0.6


def make_tensors(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Return float32 tensors by their names in bilm-tf's HDF5 files, all of them random."""
    rng = np.random.default_rng(seed)
    p, u, k, features = sizes.projection, sizes.units, sizes.character_width, sum(n for _, n in sizes.filters)

    def normal(*shape: int) -> np.ndarray:
        return (0.6 * rng.standard_normal(shape)).astype(np.float32)

    found = {"char_embed": normal(261, k)}
    for number, (width, count) in enumerate(sizes.filters):
        found |= {f"CNN/W_cnn_{number}": normal(1, width, k, count), f"CNN/b_cnn_{number}": normal(count)}
    for number in range(sizes.num_highways):
        for gate in ("carry", "transform"):
            found[f"CNN_high_{number}/W_{gate}"] = normal(features, features)
            found[f"CNN_high_{number}/b_{gate}"] = normal(features)
    found |= {"CNN_proj/W_proj": normal(features, p), "CNN_proj/b_proj": normal(p)}
    for way in range(2):
        for number in range(sizes.num_layers):
            cell = f"RNN_{way}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            found |= {f"{cell}/W_0": normal(2 * p, 4 * u), f"{cell}/B": normal(4 * u), f"{cell}/W_P_0": normal(u, p)}
    return found


def options(sizes: Sizes) -> dict:
    """Return the values of options.json."""
    return {
        "lstm": {
            "use_skip_connections": True,
            "projection_dim": sizes.projection,
            "cell_clip": sizes.cell_clip,
            "proj_clip": sizes.projection_clip,
            "dim": sizes.units,
            "n_layers": sizes.num_layers,
        },
        "char_cnn": {
            "activation": "relu",
            "filters": [list(pair) for pair in sizes.filters],
            "n_highway": sizes.num_highways,
            "embedding": {"dim": sizes.character_width},
            "n_characters": 262,
            "max_characters_per_token": sizes.num_characters,
        },
    }


def to_tree(tensors: dict[str, np.ndarray], sizes: Sizes) -> dict:
    """Return the parameters of jaxlm's backbone: gates i, f, g, o instead of i, g, f, o, and kernels apart."""
    p, encoder = sizes.projection, {"table": tensors["char_embed"]}
    for number in range(len(sizes.filters)):
        encoder[f"filters_{number}_kernel"] = tensors[f"CNN/W_cnn_{number}"][0]
        encoder[f"filters_{number}_bias"] = tensors[f"CNN/b_cnn_{number}"]
    for number in range(sizes.num_highways):
        for gate in ("carry", "transform"):
            encoder[f"highway_{number}_{gate}_kernel"] = tensors[f"CNN_high_{number}/W_{gate}"]
            encoder[f"highway_{number}_{gate}_bias"] = tensors[f"CNN_high_{number}/b_{gate}"]
    encoder |= {"projection_kernel": tensors["CNN_proj/W_proj"], "projection_bias": tensors["CNN_proj/b_proj"]}
    tree: dict = {"embeddings": encoder}
    for number in range(sizes.num_layers):
        layer = tree[f"layer_{number}"] = {}
        for way, name in enumerate(("forward", "backward")):
            cell = f"RNN_{way}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            kernel, bias = _ifgo(tensors[f"{cell}/W_0"]), _ifgo(tensors[f"{cell}/B"])
            layer[name] = {"in_kernel": kernel[:p], "state_kernel": kernel[p:], "bias": bias}
            layer[name]["out_kernel"] = tensors[f"{cell}/W_P_0"]
    return tree


def _ifgo(values: np.ndarray) -> np.ndarray:
    i, g, f, o = np.split(values, 4, axis=-1)
    return np.concatenate([i, f, g, o], axis=-1)


def make_batches(sizes: Sizes, seed: int) -> list[list[np.ndarray]]:
    """Return batches of sentences, each the characters of its words (length, C); the second batch has fewer rows."""
    rng = np.random.default_rng(seed)
    c = sizes.num_characters

    def word() -> np.ndarray:
        inner = rng.integers(0, 256, rng.integers(0, c - 1))
        return np.r_[258, inner, 259, np.full(c - 2 - len(inner), 260)]

    return [[np.stack([word() for _ in range(n)]).astype(np.int32) for n in lengths] for lengths in ((4, 1, 6), (2, 5))]


def make_weights(sizes: Sizes, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the weights of a loss, a sum over all states."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_marks(sentence: np.ndarray) -> np.ndarray:
    """Return a sentence between the characters of <S> and of </S>."""
    c = sentence.shape[1]
    marks = [np.r_[258, mark, 259, np.full(c - 3, 260)] for mark in (256, 257)]
    return np.concatenate([marks[:1], sentence, marks[1:]]).astype(np.int32)


@dataclass(frozen=True)
class Softmax:
    """A softmax of V ids with D wide states, B x L of them, and the K sampled ids with the time until they arrived."""

    vocab_size: int = 40
    width: int = 6
    rows: int = 2
    length: int = 5
    ids: tuple[int, ...] = (0, 3, 4, 9, 17, 30)
    time: float = 9.5


def make_softmax(sizes: Softmax, seed: int) -> dict[str, np.ndarray]:
    """Return the table, the bias, states, and targets of which one is sampled too."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    targets = rng.integers(sizes.vocab_size, size=(sizes.rows, sizes.length)).astype(np.int32)
    targets[0, :3] = (3, 17, 39)
    return {
        "table": normal(sizes.vocab_size, sizes.width),
        "bias": normal(sizes.vocab_size),
        "states": normal(sizes.rows, sizes.length, sizes.width),
        "targets": targets,
    }


def expected_count(ids: np.ndarray, sizes: Softmax) -> np.ndarray:
    """Return the probability that an id arrives within `time` if id i arrives at the log-uniform rate."""
    rate = (np.log(np.float64(ids) + 2) - np.log(np.float64(ids) + 1)) / np.log(sizes.vocab_size + 1)
    return 1 - np.exp(-rate * sizes.time)


@dataclass(frozen=True)
class Training:
    """Steps of training: B rows of L words of each direction, of a vocabulary of V, on `sizes` without clips."""

    vocab_size: int = 11
    rows: int = 3
    length: int = 4
    steps: int = 10
    learning_rate: float = 0.2
    clip_norm: float = 10.0
    scale: float = 20.0  # of the loss
    sizes: Sizes = Sizes(num_layers=2, num_highways=1, cell_clip=0.0, projection_clip=0.0)


def make_softmax_layer(training: Training, seed: int) -> dict[str, np.ndarray]:
    """Return the table (V, P) and the bias (V,) of the output layer."""
    rng, p = np.random.default_rng(seed), training.sizes.projection
    return {
        "kernel": (0.5 * rng.standard_normal((training.vocab_size, p))).astype(np.float32),
        "bias": rng.standard_normal(training.vocab_size).astype(np.float32),
    }


def make_training_batches(training: Training, seed: int) -> list[dict[str, np.ndarray]]:
    """Return for each step what both directions read, `forward` and `backward`, characters (B, L, C), and the targets.

    A word's characters follow from its id, so that there is something to learn.
    """
    rng, c = np.random.default_rng(seed), training.sizes.num_characters
    spelling = rng.integers(0, 256, (training.vocab_size, c))
    spelling[:, 0], spelling[:, -1] = 258, 259
    batches = []
    for _ in range(training.steps):
        batch = {}
        for way in ("forward", "backward"):
            ids = np.cumsum(rng.integers(1, 3, (training.rows, training.length + 1)), axis=1) % training.vocab_size
            batch[way], batch[f"{way}_targets"] = spelling[ids[:, :-1]].astype(np.int32), ids[:, 1:].astype(np.int32)
        batches.append(batch)
    return batches


def training_leaves(training: Training) -> dict[str, np.ndarray]:
    """Return the parameters before the first step by their paths in jaxlm's backbone, and those of the output layer."""

    def flat(tree: dict, path: str = "") -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, leaf in tree.items():
            found |= flat(leaf, f"{path}{name}/") if isinstance(leaf, dict) else {path + name: leaf}
        return found

    tree = to_tree(make_tensors(training.sizes, seed=5), training.sizes)
    return flat(tree | {"classifier": make_softmax_layer(training, seed=7)})
