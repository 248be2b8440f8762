"""The language-model objective: predicting the next token from those before it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.models.model import Inputs, Model, Outputs
from jaxlm.objectives.objective import Coefficient, Objective, Sums


class FurtherLoss(NamedTuple):
    """A further loss of a language model, from the outputs of the same pass: one or more terms of an `Objective`.

    coefficients: of its terms; with 0 for `nll`, the loss of all positions is only reported. weights(batch): of the
    whole batch. sums(params, outputs, batch): of a part of it. in_evaluation: an evaluation reports the terms too.
    reads_layers: the sums need the states of all layers. init(key): fresh parameters of its own in `params["head"]`.
    """

    coefficients: Mapping[str, Coefficient]
    weights: Callable[[Batch], Sums]
    sums: Callable[[Any, Outputs, Batch], Sums]
    in_evaluation: bool = False
    reads_layers: bool = False
    init: Callable[[jax.Array], dict[str, Any]] = lambda key: {}
    flops_per_token: float = 0.0


def language_model(model: Model, *, loss_chunks: int = 0, further: Sequence[FurtherLoss] = ()) -> Objective:
    """Return the objective of next-token prediction (Radford et al., 2018, equation 1).

    Terms: `nll`, the loss in nats per token; `accuracy`, the fraction of targets with the highest score; and those of
    further losses (`jaxlm.objectives.auxiliary_losses`). The carry of rows that begin a stream is set to zero first.
    """
    coefficients: dict[str, Coefficient] = {"nll": 1.0}
    for loss in further:
        coefficients |= loss.coefficients

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        found = {"nll": total, "accuracy": total}
        for loss in further:
            found |= loss.weights(batch)
        return found

    def sums(params: Any, batch: Batch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        inputs = Inputs(batch.ids, batch.positions, batch.segments)
        used = [loss for loss in further if key is not None and not loss.in_evaluation]  # this order decides the bits
        used += [loss for loss in further if loss.in_evaluation]
        layers = any(loss.reads_layers for loss in used)
        outputs = model(params, inputs, reset_carry(carry, batch), key=key, layers=layers)
        nll, correct = model.loss(params, outputs.states, outputs.output, batch.targets, batch.weights, loss_chunks)
        found = {"nll": nll, "accuracy": correct}
        for loss in used:
            found |= loss.sums(params, outputs, batch)
        return found, jax.lax.stop_gradient(outputs.carry)

    return Objective({name: value for name, value in coefficients.items() if value}, weights, sums)


def with_rate_of_length(objective: Objective, nominal_length: int) -> Objective:
    """Return the objective with a learning rate times the tokens in the longest row, as a fraction of a length."""

    def rate_factor(batch: Batch) -> jax.Array:
        return jnp.max(jnp.sum(segments_of(batch) > 0, axis=1)) / jnp.float32(nominal_length)

    return dataclasses.replace(objective, rate_factor=rate_factor)


def segments_of(batch: Batch) -> jax.Array:
    """Return the segments (B, L), ones for a batch of full rows without."""
    return jnp.ones_like(batch.ids) if batch.segments is None else batch.segments


def reset_carry(carry: Any, batch: Batch) -> Any:
    """Return the carry with zeros for the rows that begin a stream; its leaves are (layers, rows, …)."""
    if carry is None or batch.begins is None:
        return carry

    def reset(leaf: jax.Array) -> jax.Array:
        begins = batch.begins.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(begins, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(reset, carry)
