"""The objective of a bidirectional language model: the next word forward, and in another text the next one backward.

Peters, Neumann, Iyyer, Gardner, Clark, Lee and Zettlemoyer, "Deep contextualized word representations", 2018, section
3.1, and the authors' code (allenai/bilm-tf, bilm/training.py:464-526).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import Batch
from jaxlm.models.model import Model
from jaxlm.objectives.language_model import inputs_of, reset_carry
from jaxlm.objectives.objective import Objective, Sums


def bidirectional_language_model(model: Model, *, scale: float, loss_chunks: int = 0) -> Objective:
    """Return the objective of next-word prediction in each direction.

    Terms: `nll`, the loss in nats per word over the words of both directions, times `scale` in the training loss;
    `forward_nll` and `backward_nll`, those of each; `accuracy`, the fraction of targets with the highest score, in
    training among those of the sampled softmax. The carry of rows that begin a stream is set to zero first.
    """

    def weights(batch: Batch) -> Sums:
        forward, backward = jnp.sum(batch.weights), jnp.sum(batch.backward.weights)
        both = forward + backward
        return {"nll": both, "forward_nll": forward, "backward_nll": backward, "accuracy": both}

    def sums(params: Any, batch: Batch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        outputs = model(params, inputs_of(batch), reset_carry(carry, batch), key=key)
        found = []
        for way, (states, read) in enumerate(
            zip(jnp.split(outputs.states, 2, axis=-1), (batch, batch.backward), strict=True)
        ):
            of_way = jax.tree.map(lambda leaf, way=way: leaf[way], outputs.output)
            found.append(model.loss(params, states, of_way, read.targets, read.weights, loss_chunks))
        (forward, hits), (backward, hits_backward) = found
        terms = {"nll": forward + backward, "forward_nll": forward, "backward_nll": backward}
        return terms | {"accuracy": hits + hits_backward}, jax.lax.stop_gradient(outputs.carry)

    return Objective({"nll": scale}, weights, sums)
