"""Abstract inputs of a run without its store, for compiling or measuring its step."""

import logging
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxlm.data.batch import mask_seeds
from jaxlm.distributed.mesh import batch_sharding
from jaxlm.models import ModelConfig, family_of
from jaxlm.training.config import PretrainConfig

log = logging.getLogger(__name__)


def with_vocabulary(config: PretrainConfig) -> PretrainConfig:
    """Return the config with the published vocabulary, if it takes its own from a store."""
    if config.model.vocab_size:
        return config
    model = with_published_vocabulary(config.model)
    log.info(
        "the config takes its vocabulary from a store; without one it is the published size, %d ids", model.vocab_size
    )
    return replace(config, model=model)


def with_published_vocabulary(model: ModelConfig) -> ModelConfig:
    """Return a model's sizes with the vocabulary of the published model of these sizes, unless they have one.

    Sizes that were not published get the published vocabulary of their family.
    """
    if model.vocab_size:
        return model
    family = family_of(model)
    same = (size.vocab_size for size in family.sizes.values() if replace(size, vocab_size=0) == model)
    return replace(model, vocab_size=next(same, family.vocab_size))


def abstract_batch(config: PretrainConfig, length: int, mesh: Mesh) -> Any:
    """Return a batch of rows of `length` as jax.ShapeDtypeStruct, its rows sharded over `mesh`."""
    row = config.data.empty(1, config.data.longest_row(length))
    if config.objective.kind == "masked_lm" and row.mask_seeds is None:
        row = replace(row, mask_seeds=mask_seeds(config.seed, [0]))
    return abstract_rows(row, config.batch_size, mesh)


def abstract_rows(row: Any, batch_size: int, mesh: Mesh) -> Any:
    """Return a batch of `batch_size` rows like `row`, a batch of one, as jax.ShapeDtypeStruct, sharded over `mesh`."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype, sharding=sharding), row)
