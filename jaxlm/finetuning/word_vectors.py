"""The vectors of words from a file with which a run from scratch begins (`jaxlm/text/word_vectors.py`)."""

from collections.abc import Set
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxlm.errors import InputError
from jaxlm.models import family_of
from jaxlm.runs.trees import named_leaves
from jaxlm.text import Tokenizer
from jaxlm.text.word_vectors import WordVectors, vectors_of
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.step import TrainState
from jaxlm.training.weights import first_average


def read_vectors(path: str, config: FinetuneConfig, tokenizer: Tokenizer, given: Set[str]) -> WordVectors:
    """Return the vectors of the vocabulary in a file.

    given: the fields of the command line. InputError for a model without word vectors, and for another width there.
    """
    family = family_of(config.model)
    if family.word_vectors is None:
        raise InputError(f"word_vectors must be left out for {family.title}, got {path}; give a network over words")
    found = vectors_of(path, tokenizer.pieces(range(tokenizer.size)))
    name = f"model.{family.word_vectors.width}"
    if name in given and (asked := getattr(config.model, family.word_vectors.width)) != found.width:
        raise InputError(f"{name} must be {found.width}, the width of {path}, got {asked}; leave it out")
    return found


def with_width_of(vectors: WordVectors | None, config: FinetuneConfig) -> FinetuneConfig:
    """Return the config with the width of the vectors. InputError for fixed vectors of a model that has none."""
    table = family_of(config.model).word_vectors
    if table is not None and vectors is not None:
        config = replace(config, model=replace(config.model, **{table.width: vectors.width}))
    if table is not None and config.freeze_words and not getattr(config.model, table.width):
        raise InputError(
            f"model.{table.width} must be above 0 with freeze_words, got 0; give a width, or --word-vectors"
        )
    return config


def vector_notes(vectors: WordVectors | None, config: FinetuneConfig) -> list[str]:
    """Return a note on the words that have a vector, or none without a file."""
    if vectors is None:
        return []
    known, size = int(vectors.known.sum()), len(vectors.known)
    kept = "fixed" if config.freeze_words or config.frozen or config.freeze_embeddings else "trained with the rest"
    return [
        f"word vectors {vectors.path}: {known:,} of {size:,} words of the vocabulary have one of {vectors.width} "
        f"numbers, {size - known:,} begin at random; all are {kept}"
    ]


def with_vectors(state: TrainState, vectors: WordVectors, model: object) -> TrainState:
    """Return a fresh state with the vectors; words without one keep their values. model: its config."""
    table = family_of(model).word_vectors
    assert table is not None, "read_vectors refuses other models"
    fresh = named_leaves(state.params)[f"backbone/{table.parameter}"]

    def chosen(rows_VD: jax.Array, known_V: jax.Array, fresh_VD: jax.Array) -> jax.Array:
        return jnp.where(known_V[:, None], rows_VD.astype(fresh_VD.dtype), fresh_VD)

    begun = jax.jit(chosen, out_shardings=fresh.sharding)(vectors.rows, vectors.known, fresh)
    params = jax.tree.map(lambda leaf: begun if leaf is fresh else leaf, state.params)
    return replace(state, params=params, average=None if state.average is None else first_average(params))
