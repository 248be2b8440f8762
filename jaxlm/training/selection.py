"""Selection of a pretraining run's parameters by the validation loss, and its early end.

The selection is part of the training state: the best parameters stay on the devices and are saved and restored with it.
They therefore always belong to the history that continues, whatever was evaluated between a checkpoint and a stop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.wording import counted


class Selection(NamedTuple):
    """The evaluations of a run so far.

    loss: float32, the lowest validation loss, inf before the first evaluation. step: int32, its step. waited: int32,
    the evaluations since then.
    """

    loss: jax.Array
    step: jax.Array
    waited: jax.Array


def no_selection() -> Selection:
    """Return the selection before the first evaluation."""
    return Selection(jnp.asarray(jnp.inf, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def evaluated(best: Any, selection: Selection, weights: Any, loss: Any, step: Any) -> tuple[Any, Selection]:
    """Return the best parameters and the selection after an evaluation of `weights` at `step`.

    Strictly better ones replace the ones before: the first of equals stays. best: None if no parameters are kept.
    """
    better = loss < selection.loss
    chosen = Selection(
        jnp.where(better, loss, selection.loss),
        jnp.where(better, step, selection.step),
        jnp.where(better, 0, selection.waited + 1),
    )
    return None if best is None else jax.tree.map(lambda old, new: jnp.where(better, new, old), best, weights), chosen


def kept_note(selection: Selection, step: int) -> str:
    """Return a line about the parameters that are kept at the end of training at `step`."""
    return (
        f"step {step}: other commands use the parameters of step {int(selection.step)}, whose validation loss is "
        f"{float(selection.loss):.4f}"
    )


def early_end(selection: Selection, step: int) -> str:
    """Return a line about the end of training at `step`, before its last step."""
    return (
        f"step {step}: training ends early, after {counted(int(selection.waited), 'evaluation')} without a validation "
        f"loss below {float(selection.loss):.4f}, that of step {int(selection.step)}"
    )
