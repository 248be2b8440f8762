"""Cross-view training: on unlabelled sentences, modules that see a part of a sentence learn from one that sees it all.

Clark et al., 2018, sections 2 and 3, and the authors' code (tensorflow/models, cvt_text/model/multitask_model.py). The
targets of a step are the probabilities of the primary module with the weights before the step, without dropout. No
gradient flows into them, and no label is smoothed. The sum of the views' losses, each a mean over words, trains the
model and the modules of the views. Labelled batches train the model and the primary module as without this objective.
Where a batch has masked words, the views read these sentences, and the primary module the whole ones.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import UnlabelledBatch
from jaxlm.models import build, with_dropout
from jaxlm.models.heads.head import Head
from jaxlm.models.model import Model
from jaxlm.models.views import PRIMARY
from jaxlm.objectives.objective import Objective, Sums
from jaxlm.objectives.task import counted_tags, task_outputs


def with_unlabelled(labelled: Objective, model: Model, head: Head, dropout_rate: float) -> Objective:
    """Return the objective of labelled batches, with that of `UnlabelledBatch` beside it.

    head: with a module for each of its views (`Head.auxiliary`). dropout_rate: every one of the model, on unlabelled
    batches. Terms: `VIEW_loss`, cross-entropies in nats over the words that have the neighbour whose tag is predicted.
    """
    noisy = build(with_dropout(model.config, dropout_rate), model.execution)

    def weights(batch: UnlabelledBatch) -> Sums:
        real_BL = counted_tags(batch)
        return {_term(view): jnp.sum(real_BL * shifted(real_BL, shift)) for view, shift in head.auxiliary.items()}

    def sums(params: Any, batch: UnlabelledBatch, carry: Any, key: jax.Array | None) -> tuple[Sums, Any]:
        scores, _ = task_outputs(model, head, jax.lax.stop_gradient(params), batch)
        targets_BLT, real_BL = jax.nn.softmax(scores), counted_tags(batch)
        seen = batch if batch.masked is None else dataclasses.replace(batch, ids=batch.masked)
        read = head.read(noisy, params, seen, head.model_outputs(noisy, params, seen, key))
        of_views: Any = head.apply({"params": params["head"]}, *read, method="of_views")
        found: Sums = {}
        for view, shift in head.auxiliary.items():
            each_BL = -jnp.sum(shifted(targets_BLT, shift) * jax.nn.log_softmax(of_views[view]), axis=-1)
            found[_term(view)] = jnp.sum(real_BL * shifted(real_BL, shift) * each_BL)
        return found, carry

    terms = {_term(view): 1.0 for view in head.auxiliary}
    unlabelled = Objective(dict(terms), weights, sums, trains=_all_but([PRIMARY]))
    return dataclasses.replace(labelled, trains=_all_but(head.auxiliary), others={UnlabelledBatch: unlabelled})


def shifted(x: jax.Array, shift: int) -> jax.Array:
    """Return (B, L, …) with the value `shift` words further on, -1, 0 or 1, at each place, zeros if there is none."""
    if not shift:
        return x
    more = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1), *more)) if shift > 0 else jnp.pad(x[:, :-1], ((0, 0), (1, 0), *more))


def _term(view: str) -> str:
    return f"{view}_loss"


def _all_but(modules: Iterable[str]) -> str:
    """Return the pattern of all parameters without those of some modules of the head."""
    return f"(?!head/(?:{'|'.join(modules)})/).*"
