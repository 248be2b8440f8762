"""The loss scale of runs in float16, whose small gradients would be 0 without it (Micikevicius et al., 2018).

The loss is multiplied by the scale before its gradient is computed, and the float32 gradients of the parameters are
divided by it. The rules are those of torch.amp.GradScaler: an update that is not finite halves the scale, and
GROWTH_INTERVAL finite updates in a row double it. Here an update that is not finite counts as an overflow only while
the scale is above SMALLEST, so that a loss that no scale makes finite ends the run. LARGEST, NVIDIA apex's limit, keeps
gradients of zero from raising the scale to infinity.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FIRST = 2.0**15
SMALLEST, LARGEST = 1.0, 2.0**24
GROWTH_INTERVAL = 2000  # finite updates in a row


class LossScale(NamedTuple):
    """A loss scale. scale: float32, a power of two. finite: int32, the finite updates since its last change."""

    scale: jax.Array
    finite: jax.Array

    def overflows(self, is_finite: jax.Array, halted: jax.Array) -> jax.Array:
        """Return True for an update that is not finite and that a smaller scale may make finite.

        halted: True for a run that has ended.
        """
        return ~is_finite & ~halted & (self.scale > SMALLEST)

    def updated(self, is_finite: jax.Array, counts: jax.Array) -> "LossScale":
        """Return the scale for the next update. counts: False for a run that has ended, which keeps its scale."""
        lost = counts & ~is_finite
        finite = jnp.where(lost, 0, self.finite + is_finite.astype(jnp.int32))
        grows = finite == GROWTH_INTERVAL
        factor = jnp.where(lost, 0.5, jnp.where(grows, 2.0, 1.0))
        return LossScale(jnp.clip(self.scale * factor, SMALLEST, LARGEST), jnp.where(grows, 0, finite))


def first_scale() -> LossScale:
    """Return the scale before the first update."""
    return LossScale(jnp.asarray(FIRST, jnp.float32), jnp.zeros((), jnp.int32))
