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


def judged(
    norms: jax.Array, norm: jax.Array, state: Any, is_finite: jax.Array, factor: Any, skips: Any
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Return two bools (the update is applied, the step counts), the norms with its own, and the metric `spike`.

    norms, norm: of the gradients before and of this one. state: the TrainState before the update. factor: as above;
    skips: True to skip spikes. `spike`: found, True if the update is one; skipped; the median before it.
    """
    norm_kept = jnp.where(is_finite, norm, jnp.inf)
    known = jnp.isfinite(norms)
    median = jnp.nanmedian(jnp.where(known, norms, jnp.nan))
    before = norms[(state.step - 1 - jnp.arange(MOST)) % WINDOW]
    passes = skips & ~jnp.all(jnp.isinf(before))
    above = (jnp.sum(known) >= FEWEST) & (norm_kept > factor * median)
    found = jnp.where(jnp.isfinite(norm_kept), above, passes)
    skipped = found & skips
    applied = is_finite & ~skipped
    counts = is_finite | (skipped & ~state.halted)
    kept = jnp.where(counts, norms.at[state.step % WINDOW].set(norm_kept), norms)  # in place of the oldest one
    return applied, counts, kept, {"spike": {"found": found, "skipped": skipped, "median": median}}
