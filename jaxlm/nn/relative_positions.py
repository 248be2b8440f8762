"""Relative positions: sinusoids of distances, and scores by distance as scores by key.

Dai, Yang, Yang, Carbonell, Le and Salakhutdinov, "Transformer-XL", 2019, section 3.3 and appendix B.
"""

import jax
import jax.numpy as jnp
import numpy as np


def sinusoids(num_keys: int, width: int, clamp_length: int = 0) -> np.ndarray:
    """Return the encodings of the distances num_keys - 1 down to 0, float32 (S, D): all sines, then all cosines.

    The frequencies are 10000^(-2 i / D). The two halves are concatenated, where Vaswani et al. (2017) interleave them.
    clamp_length: the largest distance; larger ones have its encoding. 0: no limit.
    """
    distance_S = np.arange(num_keys - 1, -1, -1, dtype=np.float64)
    if clamp_length:
        distance_S = np.minimum(distance_S, clamp_length)
    angles = distance_S[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)[:, :width]


def by_key(scores_BHLS: jax.Array) -> jax.Array:
    """Return scores by key of scores by distance: column s of query l is moved from column s + L - 1 - l.

    scores: column c is for the distance S - 1 - c. Query l is at key S - L + l. The values of the keys after a query's
    own are those of other queries: a causal mask must remove them. All shapes are static, and no element is gathered:
    after a column of padding, the rows are read again with one element more or less each.
    """
    b, h, length, num_keys = scores_BHLS.shape
    padded = jnp.pad(scores_BHLS, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return padded.reshape(b, h, num_keys + 1, length)[:, :, 1:].reshape(b, h, length, num_keys)
