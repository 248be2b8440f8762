"""Outputs of a model for each token of sequences of ids: the states of its layers, and scores over the vocabulary.

Sequences are sorted by length and split into batches that are padded to a bucket, each a compiled program. Neither the
other sequences of a batch nor the batch size change an output beyond rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.mesh import host_rows, to_devices, use_mesh
from jaxlm.errors import InputError
from jaxlm.inference.arguments import Pooling
from jaxlm.inference.decoding import length_bucket
from jaxlm.inference.prediction import default_batch_size
from jaxlm.models.model import Inputs, Model

SMALLEST_BUCKET = 8
_VALUES = 1 << 26  # values of a batch's outputs in memory at a time
_STEPS = 64  # compiled functions that are kept


class TokenRow(NamedTuple):
    """A sequence of ids, and the index at which the second segment of a pair begins; its length if there is none."""

    ids: Sequence[int]
    second: int


@struct.dataclass
class _Rows:
    """ids, positions, types, segments: int32 (B, L)."""

    ids: Any
    positions: Any
    types: Any
    segments: Any

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.ids, self.positions, self.segments, self.types)


Step = Callable[[Any, _Rows], jax.Array]


@functools.lru_cache(_STEPS)
def states_step(model: Model, layers: tuple[int, ...] | None, mesh: Mesh) -> Step:
    """Return a compiled function of parameters and rows that gives float32 states (B, L, layers, D).

    layers: 0 are the embeddings, -1 is the last layer; None: the last layer alone.
    """

    def states(params: Any, rows: _Rows) -> jax.Array:
        outputs = model(params, rows.inputs, layers=layers is not None)
        if layers is None:
            return outputs.states[:, :, None].astype(jnp.float32)
        hidden_NBLD = jnp.asarray(outputs.layers)[np.array(layers)]
        return jnp.moveaxis(hidden_NBLD, 0, 2).astype(jnp.float32)

    return jax.jit(states, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(_STEPS)
def logits_step(model: Model, mesh: Mesh) -> Step:
    """Return a compiled function of parameters and rows that gives float32 scores over the vocabulary (B, L, V)."""

    def logits(params: Any, rows: _Rows) -> jax.Array:
        outputs = model(params, rows.inputs)
        return model.logits(params, outputs.states, outputs.output)[..., : model.config.vocab_size]

    return jax.jit(logits, out_shardings=NamedSharding(mesh, PartitionSpec()))


def check_pooling(pooling: str, model: Model, name: str) -> None:
    """Raise InputError for the first token of a decoder, which sees no other. name: of the model."""
    if pooling == "first" and model.is_causal:
        raise InputError(
            f"pooling must be mean or last for {name}, whose first token sees no other, got 'first'; choose one"
        )


def pooled(states_LD: np.ndarray, pooling: Pooling) -> np.ndarray:
    """Return the vector of a text, float32 (D,), from the states of its tokens: their mean, the first or the last."""
    if pooling == "mean":
        return states_LD.mean(axis=0, dtype=np.float64).astype(np.float32)
    return states_LD[0 if pooling == "first" else -1]


def token_outputs(
    step: Step, params: Any, rows: Sequence[TokenRow], *, mesh: Mesh, batch_size: int, longest: int, values: int
) -> list[np.ndarray]:
    """Return the outputs of each row, in order, float32 (tokens, …).

    step: of `states_step` or `logits_step`. longest: the most tokens of a row. values: the number of values that the
    step gives for a token; batches are smaller where they would need too much memory. Every process must call this with
    the same rows.
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    found: dict[int, np.ndarray] = {}
    while len(found) < len(order):
        bucket = length_bucket(len(rows[order[len(found)]].ids), longest, smallest=min(SMALLEST_BUCKET, longest))
        most = min(batch_size, max(1, _VALUES // (bucket * values)))
        size = default_batch_size(length_bucket(len(rows), most, smallest=1), mesh)
        some = order[len(found) : len(found) + size]
        batch = _padded([rows[number] for number in some], size, bucket, host_rows(size, mesh))
        with use_mesh(mesh):
            outputs = np.asarray(step(params, to_devices(batch, mesh, size)))
        for row, number in enumerate(some):
            found[number] = outputs[row, : len(rows[number].ids)].copy()
    return [found[number] for number in range(len(rows))]


def _padded(rows: Sequence[TokenRow], batch_size: int, length: int, own: np.ndarray) -> _Rows:
    """Return the `own` rows, those of this process, of a padded batch."""
    ids, types, segments = (np.zeros((batch_size, length), np.int32) for _ in range(3))
    for row, (sequence, second) in enumerate(rows):
        ids[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
        types[row, second : len(sequence)] = 1
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape))
    return _Rows(ids[own], positions[own], types[own], segments[own])
