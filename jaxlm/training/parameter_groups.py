"""Groups of parameters with a learning rate of their own, frozen layers, and gradual unfreezing.

In gradual unfreezing, training begins at the top of the model and reaches one more layer in each stage (Howard and
Ruder, 2018, ULMFiT, section 3.3). In stage 0 only the parameters above the last layer train, the head among them. In
each later stage one more group of parameters begins, from the last layer to the embeddings. A group that is not
yet unfrozen counts in no norm and keeps its bits. As in the authors' code (courses/dl2/imdb_scripts/train_clas.py), a
new optimizer begins with each stage: the moments of the stage before are dropped. Where their code unfreezes everything
in its third stage, the paper's stages continue to the last group.

A stage is a number of steps, an epoch in fine-tuning. It is data of the compiled step, which computes the gradients of
all parameters in every stage.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm.models.family import Family
from jaxlm.training.optimizer import Optimizer, ParameterGroup, ParameterRule


def layer_groups(
    family: Family,
    num_layers: int,
    *,
    decay: float = 1.0,
    frozen_layers: int = 0,
    freeze_embeddings: bool = False,
    gradual: bool = False,
) -> tuple[ParameterGroup, ...]:
    """Return groups for a learning rate that falls from layer to layer, for frozen layers and for gradual unfreezing.

    The parameters above the last layer, heads among them, have the full learning rate, layer n of N, counted from 1,
    has it times decay^-(N + 1 - n), and the embeddings, the layer 0, times decay^-(N + 1) (Howard and Ruder, 2018,
    section 3.2, with 2.6; Clark et al., 2020, appendix B, with 1 / 0.8). frozen_layers: the number of first layers to
    freeze. gradual: the last layer stages to train in stage 1, the one below in stage 2, and so on, with the embeddings
    after the lowest trained layer (section 3.3 of Howard and Ruder).
    """
    if decay == 1.0 and not frozen_layers and not freeze_embeddings and not gradual:
        return ()
    rates = [decay ** (depth - num_layers - 1) for depth in range(num_layers + 1)]
    rates[1 : frozen_layers + 1] = [0.0] * frozen_layers
    if freeze_embeddings:
        rates[0] = 0.0
    stages = [0] * (num_layers + 1)
    if gradual:
        for stage, depth in enumerate((depth for depth in reversed(range(num_layers + 1)) if rates[depth]), start=1):
            stages[depth] = stage
    embeddings = ParameterGroup(f"backbone/{family.embeddings}/.*", rates[0], stages[0])
    if family.layers is not None:
        return embeddings, ParameterGroup(f"backbone/{family.layers}/.*", tuple(rates[1:]), tuple(stages[1:]))
    names = map(family.layer_name, range(num_layers))
    layers = zip(names, rates[1:], stages[1:], strict=True)
    return embeddings, *(ParameterGroup(f"backbone/{name}/.*", rate, stage) for name, rate, stage in layers)


class Stage(NamedTuple):
    """The stage of an update. number: int32, counted from 0. is_new: bool, True in the first update of a stage."""

    number: jax.Array
    is_new: jax.Array


def unfreeze_gradually(optimizer: Optimizer, rules: Any, last_stage: int) -> Optimizer:
    """Return the optimizer with gradual unfreezing. rules: a tree of ParameterRule.

    stage_of(step, stage_steps): the stage of update `step`, counted from 0. mask_frozen_stage(tree, stage, fill): a
    tree like the parameters, or with empty nodes for frozen ones, with `fill` (0) in place of entries that are not yet
    unfrozen in `stage`; of stacked parameters, of the layers that are not yet unfrozen. The update takes the stage, and
    counts: True if the step is not halted.
    """

    def stage_of(step: Any, stage_steps: Any) -> Stage:
        number = jnp.minimum(step // stage_steps, last_stage)
        return Stage(number, step == number * stage_steps)

    def mask(tree: Any, stage: Stage, fill: float = 0.0) -> Any:
        def of_leaf(rule: ParameterRule, x: jax.Array) -> jax.Array:
            begins = jnp.asarray(rule.unfreeze_stage).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(stage.number >= begins, x, fill)

        def masked(rule: ParameterRule, leaf: Any) -> Any:
            return jax.tree.map(partial(of_leaf, rule), leaf) if np.any(rule.unfreeze_stage) else leaf

        return jax.tree.map(masked, rules, tree)

    def update(gradient: Any, state: Any, params: Any, *, stage: Stage, counts: jax.Array, **more: Any) -> Any:
        initial = optimizer.transformation.init(params)
        state = jax.tree.map(partial(jnp.where, stage.is_new & counts), initial, state)
        updates, state = optimizer.transformation.update(gradient, state, params, **more)
        return mask(updates, stage, -0.0), state  # p + -0.0 has the bits of p

    return optimizer._replace(
        transformation=optax.GradientTransformationExtraArgs(optimizer.transformation.init, update),
        last_stage=last_stage,
        stage_of=stage_of,
        mask_frozen_stage=mask,
    )
