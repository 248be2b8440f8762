"""Toy models, batches and steps that several tests share. NumPy and jaxlm, nothing random that is not seeded."""

from dataclasses import replace

import jax
import numpy as np
from flax import linen as nn

from jaxlm.data.batch import Batch, ExampleBatch
from jaxlm.models import build
from jaxlm.models.family import Inputs
from jaxlm.models.gpt import GPTConfig
from jaxlm.nn.execution import Execution

# Weights wide enough that attention is far from uniform and every parameter matters.
TOY = GPTConfig(
    vocab_size=64, num_positions=16, num_layers=2, width=32, num_heads=4, feed_forward_width=64, init_std=0.3
)
LENGTH = TOY.num_positions
NO_DROPOUT = {"dropout_rate": 0.0, "embedding_dropout_rate": 0.0, "attention_dropout_rate": 0.0}
STILL = replace(TOY, **NO_DROPOUT)
PLAIN = Execution()


def init_params(config: GPTConfig):
    """A function from a key to a GPT's parameters with their logical axes, as a run has it."""
    return lambda key: {"backbone": build(config).init(key)}


def boxed_shapes(config: GPTConfig):
    """The shapes of a GPT's parameters, boxed with their logical axes."""
    return jax.eval_shape(init_params(config), jax.random.key(0))


def random_params(config: GPTConfig, seed: int = 0):
    """Parameters all of which are random, biases and gains too; made with NumPy, so nothing is compiled."""
    shapes = nn.unbox(boxed_shapes(config))
    rng = np.random.default_rng(seed)

    def fill(path, x):
        name = path[-1].key
        deviation = 0.2 if name == "scale" or name.endswith("bias") else config.init_std
        return np.float32(deviation) * rng.standard_normal(x.shape, np.float32) + np.float32(name == "scale")

    return jax.tree_util.tree_map_with_path(fill, shapes)


def empty_params(config: GPTConfig):
    """Parameters that pass nothing on: kernels, tables and biases 0, gains 1."""
    shapes = nn.unbox(boxed_shapes(config))
    fill = lambda path, x: np.full(x.shape, float(path[-1].key == "scale"), np.float32)  # noqa: E731
    return jax.tree_util.tree_map_with_path(fill, shapes)


def windows(rows: int, *, length: int = LENGTH, vocab_size: int = TOY.vocab_size, seed: int = 0) -> Batch:
    """Rows of one segment."""
    ids = np.random.default_rng(seed).integers(vocab_size, size=(rows, length + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    ones = np.ones((rows, length), np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], positions, ones, ones.astype(np.float32))


def packed(rows: int, *, length: int = LENGTH, vocab_size: int = TOY.vocab_size, seed: int = 0) -> Batch:
    """Rows of two documents and some padding, different in each row; borders and padding weigh 0."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(vocab_size, size=(rows, length)).astype(np.int32)
    targets, positions, segments = np.roll(ids, -1, axis=1), np.zeros_like(ids), np.zeros_like(ids)
    weights = np.zeros(ids.shape, np.float32)
    for row in range(rows):
        used = length - row % 4
        border = int(rng.integers(2, used - 2))
        for number, (start, end) in enumerate([(0, border), (border, used)], start=1):
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            weights[row, start : end - 1] = 1
    return Batch(ids, targets, positions, segments, weights)


def examples(kind: str, seed: int = 0) -> ExampleBatch:
    """Six examples, the last one filler; sequences of different lengths; of choices, one example has one fewer."""
    rng = np.random.default_rng(seed)
    choices = {"classification": 1, "regression": 2, "choice": 3}[kind]
    lengths = rng.integers(3, LENGTH + 1, size=(6, choices)).astype(np.int32)
    if kind == "choice":
        lengths[2, 2] = 0
    lengths[5] = 0
    ids = rng.integers(1, TOY.vocab_size, size=(6, choices, LENGTH)).astype(np.int32)
    ids *= np.arange(LENGTH) < lengths[..., None]
    labels = rng.integers(2, size=6).astype(np.int32) if kind != "regression" else rng.random(6).astype(np.float32)
    weights = np.array([1, 1, 1, 1, 1, 0], np.float32)
    index = np.array([3, 0, 1, 4, 2, -1], np.int32)
    return ExampleBatch(ids, lengths, np.maximum(lengths - 1, 0), lengths, labels, weights, index)


def inputs_of(batch: Batch) -> Inputs:
    """Return the inputs of a model for a batch."""
    return Inputs(batch.ids, batch.positions, batch.segments)


def sums_of(objective, params, batch, key=None):
    """Return the sums of an objective over a whole batch, for a model without a carry."""
    return objective.sums(params, objective.prepare(batch), None, key)[0]


def weights_of(objective, batch):
    """Return the weights of an objective over a whole batch."""
    return objective.weights(objective.prepare(batch))


def states_fn(config: GPTConfig, execution: Execution = PLAIN):
    """Jitted (params, batch, key) -> states (B, L, D); with a key it is a training pass."""

    @jax.jit
    def states(params, batch, key=None):
        return build(config, execution)(params, inputs_of(batch), key=key).states

    return states


def assert_trees_close(found, expected, *, relative: float, absolute: float = 0.0) -> float:
    """Each leaf differs by at most `relative` of its largest entry plus `absolute`; gives the largest share met."""
    worst = 0.0
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        difference, size = np.max(np.abs(x - y)), np.max(np.abs(y))
        assert np.isfinite(difference), path
        assert difference <= relative * size + absolute, f"{jax.tree_util.keystr(path)}: {difference:.3g} of {size:.3g}"
        worst = max(worst, difference / max(size, 1e-30)) if difference > absolute else worst
    return worst


def assert_trees_same(found, expected) -> None:
    """Bit for bit."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)
