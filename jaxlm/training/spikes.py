"""Spikes: updates whose gradient norm is far above that of the updates before them.

An update is a spike if the norm of its gradient, before clipping, exceeds `factor` times the median of the last WINDOW
norms. The norms are part of the training state, so that a resumed run finds the same spikes. Before FEWEST norms are
known, no update is one.

A skipped update leaves the parameters and the optimizer's state as they are. Its step counts, so that the data and the
learning rate of all other steps stay the same, and its norm is kept like any other: a level of the norm that lasts is
the median itself after half a window.

Where spikes are skipped, a loss or gradient that is not finite is a spike too, also before FEWEST norms are known. Its
norm is kept as infinity, which no median contains. MOST of them in a row are no accident: the next one is not skipped,
and ends the run. Chowdhery et al. (2022, PaLM, section 5.1) skip batches around a spike by hand.
"""

from typing import Any

import jax
import jax.numpy as jnp

WINDOW = 128  # norms
FEWEST = 10  # norms that a median needs
MOST = 2  # updates in a row that are skipped because they are not finite


def no_norms() -> jax.Array:
    """Return the norms before the first update, float32 (WINDOW,): NaN where none is known, infinity if not finite."""
    return jnp.full((WINDOW,), jnp.nan, jnp.float32)


def with_norm(norms: jax.Array, norm: Any, step: Any, counts: Any) -> jax.Array:
    """Return the norms with that of update `step`, counted from 0, in place of the oldest one, if the step counts."""
    return jnp.where(counts, norms.at[step % WINDOW].set(norm), norms)


def find_spike(norms: jax.Array, norm: Any, step: Any, factor: Any, skips: Any) -> dict[str, jax.Array]:
    """Return `found`, True if an update of this norm is a spike, `skipped`, and the `median` before it.

    norm: infinity if the update is not finite. step: int32, counted from 0.
    """
    known = jnp.isfinite(norms)
    median = jnp.nanmedian(jnp.where(known, norms, jnp.nan))
    before = norms[(step - 1 - jnp.arange(MOST)) % WINDOW]
    passes = skips & ~jnp.all(jnp.isinf(before))
    above = (jnp.sum(known) >= FEWEST) & (norm > factor * median)
    found = jnp.where(jnp.isfinite(norm), above, passes)
    return {"found": found, "skipped": found & skips, "median": median}
