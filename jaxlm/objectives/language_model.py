"""The language-model objective: predicting the next token from those before it."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.models.model import Inputs, Model
from jaxlm.objectives.auxiliary_losses import AuxiliaryLosses
from jaxlm.objectives.objective import Coefficient, Objective, Sums


def language_model(
    model: Model,
    *,
    loss_chunks: int = 0,
    activation_regularization: float = 0.0,
    temporal_activation_regularization: float = 0.0,
    nominal_length: int | None = None,
    positions: Literal["all", "last"] = "all",
    auxiliary: AuxiliaryLosses | None = None,
) -> Objective:
    """Return the objective of next-token prediction (Radford et al., 2018, equation 1).

    Terms: `nll`, the loss in nats per token; `accuracy`, the fraction of targets with the highest score; with their
    coefficients above 0, `activation`, the mean over tokens and units of the squared states, and `temporal_activation`,
    that of the squared differences of consecutive states of a row (Merity et al., 2018, in the form of their code,
    main.py:201-203). The carry of rows that begin a stream is set to zero first.
    nominal_length: if given, the learning rate of a step is multiplied by the number of tokens in its longest row, as a
    fraction of this one.
    positions: with `last`, the term `last_nll`, the loss at the last position of each row, is trained instead of `nll`,
    and `auxiliary` has the targets of that position alone.
    auxiliary: losses of intermediate layers and of a second target.
    An evaluation leaves `last_nll` and the auxiliary terms out.
    """
    trains_last = positions == "last"
    coefficients: dict[str, Coefficient] = {
        "nll": 0.0 if trains_last else 1.0,
        "last_nll": 1.0 if trains_last else 0.0,
        "activation": activation_regularization,
        "temporal_activation": temporal_activation_regularization,
    }
    coefficients = {name: value for name, value in coefficients.items() if value}
    losses = AuxiliaryLosses(model, 0.0, 0.0) if auxiliary is None else auxiliary
    coefficients |= losses.coefficients

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        found = {"nll": total, "accuracy": total}
        if trains_last:
            batch = at_last_positions(batch)
            found["last_nll"] = jnp.sum(batch.weights)
        found |= losses.weights(batch)
        if "activation" in coefficients:
            found["activation"] = jnp.sum(_segments(batch) > 0).astype(jnp.float32)
        if "temporal_activation" in coefficients:
            found["temporal_activation"] = jnp.sum(_continues(_segments(batch)))
        return found

    def sums(params: Any, batch: Batch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        inputs = Inputs(batch.ids, batch.positions, batch.segments)
        is_training = key is not None
        outputs = model(params, inputs, reset_carry(carry, batch), key=key, layers=is_training and losses.reads_layers)
        nll, correct = model.loss(params, outputs.states, outputs.output, batch.targets, batch.weights, loss_chunks)
        found = {"nll": nll, "accuracy": correct}
        if is_training:
            trained = batch
            if trains_last:
                trained = at_last_positions(batch)
                last = model.loss(params, outputs.states, outputs.output, trained.targets, trained.weights, loss_chunks)
                found["last_nll"] = last[0]
            found |= losses.sums(params, outputs, trained)
        if "activation" in coefficients:
            squares_BL = jnp.mean(jnp.square(outputs.states.astype(jnp.float32)), axis=-1)
            found["activation"] = jnp.sum(jnp.where(_segments(batch) > 0, squares_BL, 0.0))
        if "temporal_activation" in coefficients:
            states = outputs.states if outputs.undropped is None else outputs.undropped
            steps_BLD = jnp.diff(states.astype(jnp.float32), axis=1)
            found["temporal_activation"] = jnp.sum(
                _continues(_segments(batch)) * jnp.mean(jnp.square(steps_BLD), axis=-1)
            )
        return found, jax.lax.stop_gradient(outputs.carry)

    def rate_factor(batch: Batch) -> jax.Array:
        return jnp.max(jnp.sum(_segments(batch) > 0, axis=1)) / jnp.float32(nominal_length)

    factor = None if nominal_length is None else rate_factor
    return Objective(dict(coefficients), weights, sums, rate_factor=factor)


def at_last_positions(batch: Batch) -> Batch:
    """Return the batch with the weight 0 at all positions but the last of each row that has a weight."""
    after_BL = jnp.cumsum(batch.weights[:, ::-1] > 0, axis=1)[:, ::-1]  # positions with a weight, from here to the end
    return dataclasses.replace(batch, weights=jnp.where(after_BL == 1, batch.weights, 0.0))


def _segments(batch: Batch) -> jax.Array:
    """Return the segments (B, L), ones for a batch of full rows without."""
    return jnp.ones_like(batch.ids) if batch.segments is None else batch.segments


def _continues(segments_BL: jax.Array) -> jax.Array:
    """Return 1.0 for each token but the first of a row that continues the segment of the one before it, (B, L - 1)."""
    return ((segments_BL[:, 1:] > 0) & (segments_BL[:, 1:] == segments_BL[:, :-1])).astype(jnp.float32)


def reset_carry(carry: Any, batch: Batch) -> Any:
    """Return the carry with zeros for the rows that begin a stream; its leaves are (layers, rows, …)."""
    if carry is None or batch.begins is None:
        return carry

    def reset(leaf: jax.Array) -> jax.Array:
        begins = batch.begins.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(begins, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(reset, carry)
