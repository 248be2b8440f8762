"""Spikes: updates whose gradient norm is far above that of the updates before them.

An update is a spike if the norm of its gradient, before clipping, exceeds `factor` times the median of the last WINDOW
norms. The norms are part of the training state, so that a resumed run finds the same spikes. Before FEWEST norms are
known, no update is one.

A skipped update leaves the parameters and the optimizer's state as they are. Its step counts, so that the data and the
learning rate of all other steps stay the same, and its norm is kept like any other: a level of the norm that lasts is
the median itself after half a window. Chowdhery et al. (2022, PaLM, section 5.1) skip batches around a spike by hand.
"""

from typing import Any

import jax
import jax.numpy as jnp

WINDOW = 128  # norms
FEWEST = 10  # norms that a median needs


def no_norms() -> jax.Array:
    """Return the norms before the first update, float32 (WINDOW,): NaN where none is known."""
    return jnp.full((WINDOW,), jnp.nan, jnp.float32)


def with_norm(norms: jax.Array, norm: Any, step: Any, is_finite: Any) -> jax.Array:
    """Return the norms with that of update `step`, counted from 0, in place of the oldest one, if it is finite."""
    return jnp.where(is_finite, norms.at[step % WINDOW].set(norm), norms)


def find_spike(norms: jax.Array, norm: Any, factor: Any, skips: Any) -> dict[str, jax.Array]:
    """Return `found`, True if an update of this finite norm is a spike, `skipped`, and the `median` before it."""
    median = jnp.nanmedian(norms)
    found = (jnp.sum(~jnp.isnan(norms)) >= FEWEST) & (norm > factor * median)
    return {"found": found, "skipped": found & skips, "median": median}
