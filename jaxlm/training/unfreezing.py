"""Gradual unfreezing: training begins at the top of the model and reaches one more layer in each stage.

Howard and Ruder, 2018 (ULMFiT), section 3.3. In stage 0 only the parameters above the last layer train, the head among
them. In each later stage one more group of parameters begins (`layer_groups`), from the last layer to the embeddings. A
group that has not begun counts in no norm and keeps its bits. As in the authors' code
(courses/dl2/imdb_scripts/train_clas.py), a new optimizer begins with each stage: the moments of the stage before are
dropped. Where their code unfreezes everything in its third stage, the paper's stages go on to the last group.

A stage is a number of steps, an epoch in fine-tuning. It is data of the compiled step, which computes the gradients of
all parameters in every stage.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.training.parameter_groups import ParameterRule


class Stage(NamedTuple):
    """The stage of an update. number: int32, counted from 0. is_new: bool, True in the first update of a stage."""

    number: jax.Array
    is_new: jax.Array


def last_stage(rules: Any) -> int:
    """Return the stage in which the last parameters begin; 0 without gradual unfreezing. rules: a tree of them."""
    return int(max(np.max(rule.begins) for rule in jax.tree.leaves(rules)))


def stage_of(step: Any, steps: Any, last: int) -> Stage:
    """Return the stage of update `step`, counted from 0, for stages of so many `steps`. last: that of `last_stage`."""
    number = jnp.minimum(step // steps, last)
    return Stage(number, step == number * steps)


def begun(rules: Any, tree: Any, stage: Stage, fill: float = 0.0) -> Any:
    """Return a tree like the parameters, or with empty nodes for frozen ones, with `fill` where training has not begun.

    Of stacked parameters, the layers that have not begun are filled.
    """

    def filled(rule: ParameterRule, leaf: Any) -> Any:
        if not np.any(rule.begins):
            return leaf

        def of_leaf(x: jax.Array) -> jax.Array:
            begins = jnp.asarray(rule.begins).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(stage.number >= begins, x, fill)

        return jax.tree.map(of_leaf, leaf)

    return jax.tree.map(filled, rules, tree)
