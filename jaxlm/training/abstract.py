"""The shapes of a run's batches, without a store: for who compiles a step and runs none."""

from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.data.pairs import chunk_options, empty_pairs
from jaxlm.data.rows import empty_batch
from jaxlm.sharding import batch_sharding
from jaxlm.training.config import PretrainConfig


def abstract_batch(config: PretrainConfig, length: int, mesh: Mesh) -> Any:
    """A batch of rows of `length` as jax.ShapeDtypeStruct, its rows sharded over `mesh`."""
    row: Any = empty_batch(1, length)
    if config.data.layout == "pairs":
        row = empty_pairs(1, length, chunk_options(config.data, length).pairs_per_row)
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((config.batch_size, *x.shape[1:]), x.dtype, sharding=sharding), row
    )
