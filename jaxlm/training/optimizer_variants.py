"""Parts of an optimizer beyond those of a plain run: scalings, published schedules, rates by layer, and unfreezing.

Adafactor (Shazeer and Stern, 2018) is algorithm 4 without momentum, as T5 uses it. The second moment of a matrix is
stored as the means of its rows and of its columns. optax.adafactor takes the two largest axes of an array as the matrix
and averages over all others. Here one side of the matrix is the model's width, the other all remaining axes: (width,
heads, head_width) is the matrix [768, 768] of T5's code (mesh_tensorflow/optimize.py:208-390). Layers, and the queries,
keys and values of one kernel, are separate matrices, each with its own means, clip and size.

In gradual unfreezing, training begins at the top of the model and reaches one more layer in each stage (Howard and
Ruder, 2018, ULMFiT, section 3.3). In stage 0 only the parameters above the last layer train, the head among them. In
each later stage one more group of parameters begins, from the last layer to the embeddings. A group that is not
yet unfrozen counts in no norm and keeps its bits. As in the authors' code (courses/dl2/imdb_scripts/train_clas.py), a
new optimizer begins with each stage: the moments of the stage before are dropped. Where their code unfreezes everything
in its third stage, the paper's stages continue to the last group.

A stage is a number of steps, an epoch in fine-tuning. It is data of the compiled step, which computes the gradients of
all parameters in every stage.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxlm.models import family_of
from jaxlm.models.family import Family
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import STACKED, WIDTHS, Optimizer, ParameterGroup, ParameterRule, Scaling, Schedule
from jaxlm.training.optimizer_config import OptimizerConfig

PyTree = Any
Axes = tuple[int, ...]

ROOT_DECAY = 0.005  # of one_plus_root (tensorflow/models, cvt_text/base/configure.py:74)

# The paper's proposed hyperparameters, and the smallest matrix that T5's code factors.
DECAY_EXPONENT = 0.8  # of b = 1 - t^-0.8
EPS_SQUARE, EPS_SIZE = 1e-30, 1e-3  # eps1, eps2
CLIP_THRESHOLD = 1.0  # d
SMALLEST_FACTORED = 128  # rows and columns


@dataclass(frozen=True)
class Momentum(Scaling):
    """Heavy-ball momentum (Polyak, 1964) as in torch.optim.SGD: direction b <- momentum b + g; none where it is 0."""

    momentum: float

    @property
    def needs_gradient(self) -> bool:  # type: ignore[override]
        """True if the gradient itself is the direction."""
        return not self.momentum

    def init(self, params: PyTree) -> optax.TraceState | optax.EmptyState:
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params)) if self.momentum else optax.EmptyState()

    def accumulate(self, gradient: PyTree, state: Any) -> optax.TraceState | optax.EmptyState:
        if not self.momentum:
            return state
        return optax.TraceState(jax.tree.map(lambda b, g: self.momentum * b + g, state.trace, gradient))

    def direction(self, gradient: PyTree, state: Any, params: PyTree) -> PyTree:
        return state.trace if self.momentum else gradient


@dataclass(frozen=True)
class Adagrad(Scaling):
    """Adagrad (Duchi, Hazan and Singer, 2011) as in TensorFlow: s <- s + g^2, direction = g / (sqrt(s) + eps).

    The sum begins at `initial_accumulator`. TensorFlow's ApplyAdagrad has eps 0, ApplyAdagradV2 adds it to the root.
    """

    initial_accumulator: float
    eps: float

    def init(self, params: PyTree) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, self.initial_accumulator), params))

    def accumulate(self, gradient: PyTree, state: optax.ScaleByRssState) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, gradient))

    def direction(self, gradient: PyTree, state: optax.ScaleByRssState, params: PyTree) -> PyTree:
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + self.eps), gradient, state.sum_of_squares)


class Layout(NamedTuple):
    """The axes of a parameter; axes in neither field are stacked.

    rows, columns: those of its matrices. Without columns it holds vectors, or matrices that are too small.
    """

    rows: Axes
    columns: Axes

    @property
    def averaged(self) -> tuple[Axes | None, Axes | None, Axes | None]:
        """The axes over which v_row, v_col and v are means; None for a moment that does not exist."""
        return (self.columns, self.rows, None) if self.columns else (None, None, ())


def layout_of(rule: ParameterRule, shape: tuple[int, ...]) -> Layout:
    """Return the layout of an array: a matrix has the model's width as its first axis or its last."""
    own = tuple(axis for axis, name in enumerate(rule.axes) if name not in STACKED)
    wide = [rule.axes[axis] in WIDTHS for axis in own]
    if not any(wide) or len(own) < 2:
        return Layout(own, ())
    split = 1 if wide[0] else len(own) - 1
    rows, columns = own[:split], own[split:]
    factored = all(math.prod(shape[axis] for axis in axes) >= SMALLEST_FACTORED for axes in (rows, columns))
    return Layout(rows, columns) if factored else Layout(own, ())


@dataclass(frozen=True)
class Adafactor(Scaling):
    """Adafactor, from the means R and C of the squares of the rows and columns of g, for update t, counted from 1:

        R <- b R + (1 - b) mean(g^2 + eps1, columns), C alike, b = 1 - t^-0.8, V = R C / mean(R),
        u = g / sqrt(V), direction = max(eps2, RMS(p)) u / max(1, RMS(u) / d)

    For a vector, or a matrix of fewer than 128 rows or columns, V = b V + (1 - b) (g^2 + eps1). The state is that of
    optax: v_row and v_col for matrices, v for the others, with empty nodes elsewhere. rules: a tree of ParameterRule.
    """

    rules: PyTree

    def init(self, params: PyTree) -> optax.FactoredState:

        def moments(which: int) -> PyTree:
            def zeros(rule: ParameterRule, p: Any) -> Any:
                if rule.frozen:
                    return optax.MaskedNode()
                axes = layout_of(rule, nn.unbox(p).shape).averaged[which]
                return optax.MaskedNode() if axes is None else _zeros(p, axes)

            return jax.tree.map(zeros, self.rules, params)

        return optax.FactoredState(jnp.zeros([], jnp.int32), *map(moments, range(3)))

    def accumulate(self, gradient: PyTree, state: optax.FactoredState) -> optax.FactoredState:
        count = state.count + 1
        b = 1.0 - count.astype(jnp.float32) ** -DECAY_EXPONENT

        def moments(which: int, old: PyTree) -> PyTree:
            def mean(rule: ParameterRule, g: Any, v: Any) -> Any:
                if isinstance(v, optax.MaskedNode):
                    return v
                axes = layout_of(rule, g.shape).averaged[which]
                return b * v + (1.0 - b) * jnp.mean(g * g + EPS_SQUARE, axis=axes, keepdims=True)

            return jax.tree.map(mean, self.rules, gradient, old)

        return optax.FactoredState(count, *(moments(which, old) for which, old in enumerate(state[1:])))

    def direction(self, gradient: PyTree, state: optax.FactoredState, params: PyTree) -> PyTree:
        """Return the gradient over the root of its second moment, clipped, times the size of the parameter."""

        def direction(rule: ParameterRule, g: Any, v_row: Any, v_col: Any, v: Any, p: Any) -> Any:
            if rule.frozen:
                return g
            layout = layout_of(rule, g.shape)
            if layout.columns:
                v_row = v_row / jnp.mean(v_row, axis=layout.rows, keepdims=True)
                u = g * jax.lax.rsqrt(v_row) * jax.lax.rsqrt(v_col)
            else:
                u = g * jax.lax.rsqrt(v)
            own = layout.rows + layout.columns
            size = jnp.maximum(EPS_SIZE, _rms(p, own))
            return size * u / jnp.maximum(1.0, _rms(u, own) / CLIP_THRESHOLD)

        return jax.tree.map(direction, self.rules, gradient, state.v_row, state.v_col, state.v, params)


def _rms(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the root of the mean square over these axes, which are kept with length 1."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def _zeros(p: Any, averaged: Axes) -> Any:
    """Return zeros for a mean of a parameter, boxed with its logical axes if the parameter is."""
    value = nn.unbox(p)
    zeros = jnp.zeros([1 if axis in averaged else size for axis, size in enumerate(value.shape)], value.dtype)
    if not isinstance(p, nn.LogicallyPartitioned):
        return zeros
    return p.replace(value=zeros, names=tuple(None if k in averaged else name for k, name in enumerate(p.names)))


def published_rate(config: OptimizerConfig, t: jax.Array, schedule: Schedule) -> jax.Array:
    """Return the learning rate of update t of published schedules, or of the published codes of GPT-1 and BERT.

    slanted_triangular, with every kind of optimizer: the floor in the first update, the peak after the warmup, and the
    floor again in the update after the last. one_plus_root, with every kind: peak min(1, t / w) / (1 + 0.005 sqrt(t)),
    0 in the first update. bert_adamw: peak t / w before step w, and from there on the decay counted from step 0, so
    that the rate falls by a fraction w / T of the peak at the end of the warmup. openai_adam, with x = t / T and w as a
    fraction of the run: peak (x / w or 1) (1 - x) for linear, and for cosine (1 + cos(pi x)) / 2 after the warmup, x
    measured from the start of the run.
    """
    each, warming = 1.0 / schedule.num_steps, t < schedule.warmup
    if config.decay == "one_plus_root":
        rise = jnp.where(warming, t * (1.0 / jnp.maximum(1.0, schedule.warmup)), 1.0)
        return schedule.peak_lr * rise / (1.0 + ROOT_DECAY * jnp.sqrt(t))
    if config.decay == "slanted_triangular":
        rise = t * (1.0 / jnp.maximum(1.0, schedule.warmup))
        p = jnp.where(warming, rise, 1.0 - schedule.after_warmup(t))
        return schedule.peak_lr * schedule.above_floor(p)
    if config.kind == "bert_adamw":
        fall = schedule.remaining(t, config.decay, jnp.clip(t * each, 0.0, 1.0))
        return schedule.peak_lr * jnp.where(warming, t * (1.0 / jnp.maximum(1.0, schedule.warmup)), fall)
    x, fraction = t * each, schedule.warmup_fraction
    warming = (x <= fraction) & (fraction > 0)
    rise = jnp.where(warming, t * (each * (1.0 / jnp.where(fraction > 0, fraction, 1.0))), 1.0)
    fall = schedule.remaining(t, config.decay, x)
    if config.decay == "cosine":
        fall = jnp.where(warming, 1.0, schedule.above_floor(0.5 * (1.0 + jnp.cos(t * (jnp.pi * each)))))
    return schedule.peak_lr * rise * fall


def tuned_groups(config: FinetuneConfig) -> tuple[ParameterGroup, ...]:
    """Return the groups of the backbone that a fine-tuning asks for."""
    return layer_groups(
        family_of(config.model),
        config.model,
        decay=config.optimizer.layer_decay,
        frozen_layers=config.freeze_layers,
        freeze_embeddings=config.freeze_embeddings,
        freeze_words=config.freeze_words,
        gradual=config.unfreeze == "gradual",
    )


def layer_groups(
    family: Family,
    config: Any,
    *,
    decay: float = 1.0,
    frozen_layers: int = 0,
    freeze_embeddings: bool = False,
    freeze_words: bool = False,
    gradual: bool = False,
) -> tuple[ParameterGroup, ...]:
    """Return groups for a learning rate that falls from layer to layer, for frozen layers and for gradual unfreezing.

    config: of the model. The layers of several stacks are counted in order.
    The parameters above the last layer, heads among them, have the full learning rate, layer n of N, counted from 1,
    has it times decay^-(N + 1 - n), and the embeddings, the layer 0, times decay^-(N + 1) (Howard and Ruder, 2018,
    section 3.2, with 2.6; Clark et al., 2020, appendix B, with 1 / 0.8). frozen_layers: the number of first layers to
    freeze. freeze_words: True to freeze the table of word vectors. gradual: the last layer stages to train in stage 1,
    the one below in stage 2, and so on, with the embeddings after the lowest trained layer (section 3.3 of Howard and
    Ruder).
    """
    table = family.word_vectors if freeze_words else None
    words = () if table is None else (ParameterGroup(f"backbone/{table.parameter}", 0.0),)
    if decay == 1.0 and not frozen_layers and not freeze_embeddings and not gradual:
        return words
    num_layers = family.num_layers(config)
    rates = [decay ** (depth - num_layers - 1) for depth in range(num_layers + 1)]
    rates[1 : frozen_layers + 1] = [0.0] * frozen_layers
    if freeze_embeddings:
        rates[0] = 0.0
    stages = [0] * (num_layers + 1)
    if gradual:
        for stage, depth in enumerate((depth for depth in reversed(range(num_layers + 1)) if rates[depth]), start=1):
            stages[depth] = stage
    groups = [*words, ParameterGroup(f"backbone/{family.embeddings}/.*", rates[0], stages[0])]
    if not family.stacks:
        names = map(family.layer_name, range(num_layers))
        layers = zip(names, rates[1:], stages[1:], strict=True)
        return *groups, *(ParameterGroup(f"backbone/{name}/.*", rate, stage) for name, rate, stage in layers)
    first = 1
    for name, field in family.stacks.items():
        end = first + getattr(config, field)
        groups.append(ParameterGroup(f"backbone/{name}/.*", tuple(rates[first:end]), tuple(stages[first:end])))
        first = end
    return tuple(groups)


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
