"""The language-model objective: predicting the next token from those before it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.models.family import Inputs, Model
from jaxlm.objectives.objective import Objective, Sums


def language_model(model: Model, *, loss_chunks: int = 0) -> Objective:
    """Return the objective of next-token prediction (Radford et al., 2018, equation 1).

    Terms: `nll`, the loss in nats per token; `accuracy`, the fraction of targets with the highest score. The carry of
    rows that begin a stream is set to zero first.
    """

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        return {"nll": total, "accuracy": total}

    def sums(params: Any, batch: Batch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        inputs = Inputs(batch.ids, batch.positions, batch.segments)
        outputs = model(params, inputs, reset_carry(carry, batch), key=key)
        nll, correct = model.loss(params, outputs.states, outputs.output, batch.targets, batch.weights, loss_chunks)
        return {"nll": nll, "accuracy": correct}, jax.lax.stop_gradient(outputs.carry)

    return Objective({"nll": 1.0}, weights, sums)


def reset_carry(carry: Any, batch: Batch) -> Any:
    """Return the carry with zeros for the rows that begin a stream; its leaves are (layers, rows, …)."""
    if carry is None or batch.begins is None:
        return carry

    def reset(leaf: jax.Array) -> jax.Array:
        begins = batch.begins.reshape(1, -1, *[1] * (leaf.ndim - 2))
        return jnp.where(begins, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(reset, carry)
