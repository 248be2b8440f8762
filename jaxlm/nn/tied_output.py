"""An output layer without parameters of its own: scores are products of states with the token table."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.nn.cross_entropy import loss_pieces, projected_cross_entropy


class TiedOutput:
    """Scores are h E^T, with the table E (V, D) of the embeddings that the pass returns as `Outputs.output`."""

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return no parameters."""
        return {}

    def available(self, params: Mapping[str, Any]) -> bool:
        """Return True: the table is the model's."""
        return True

    def logits(self, params: Any, states: jax.Array, output: jax.Array) -> jax.Array:
        """Return float32 scores (…, V)."""
        return jnp.dot(states, output.T.astype(states.dtype), preferred_element_type=jnp.float32)

    def loss(self, params: Any, states: Any, output: Any, targets: Any, weights: Any, chunks: int = 0):
        """Return the weighted sums of negative log-likelihoods (nats) and of correct predictions."""
        pieces = loss_pieces(chunks, targets.shape[0], targets.shape[1], output)
        return projected_cross_entropy(states, output, targets, weights, pieces)
