"""The language-model objective: the next token, from those before it."""

import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy
from jaxlm.objectives.objective import Objective, Sums


def language_model(model, *, loss_chunks: int = 0) -> Objective:
    """Next-token prediction: the loss in nats a token, and the share of targets that had the highest logit."""

    def weights(batch: Batch) -> Sums:
        total = jnp.sum(batch.weights)
        return {"nll": total, "accuracy": total}

    def sums(params, batch: Batch, key) -> Sums:
        rngs = None if key is None else {"dropout": key}
        h_BLD, table_VD = model.apply(
            {"params": params["backbone"]},
            batch.ids,
            batch.positions,
            batch.segments,
            train=key is not None,
            rngs=rngs,
        )
        rows, length = batch.ids.shape
        pieces = loss_pieces(loss_chunks, rows, length, table_VD)
        nll, hits = projected_cross_entropy(h_BLD, table_VD, batch.targets, batch.weights, pieces)
        return {"nll": nll, "accuracy": hits}

    return Objective({"nll": 1.0}, weights, sums)
