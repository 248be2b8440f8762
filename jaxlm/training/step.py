"""The state of a training run, the training step and the evaluation step: pure functions, jitted by the caller.

An update is a spike if the norm of its gradient, before clipping, exceeds `factor` times the median of the last WINDOW
norms. The norms are part of the training state, so that a resumed run finds the same spikes. Before FEWEST norms are
known, no update is one.

A skipped update leaves the parameters and the optimizer's state as they are. Its step counts, so that the data and the
learning rate of all other steps stay the same, and its norm is kept like any other: if the norm stays at a new
level, the median reaches that level after half a window.

Where spikes are skipped, a loss or gradient that is not finite is a spike too, also before FEWEST norms are known. Its
norm is kept as infinity, which no median contains. After MOST of them in a row, the next one is not skipped and ends
the run. Chowdhery et al. (2022, PaLM, section 5.1) skip batches around a spike by hand.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.distributed.devices import rarely
from jaxlm.distributed.mesh import abstract_leaf, batch_sharding, state_shardings
from jaxlm.nn.dropout_masks import micro_batch
from jaxlm.objectives.objective import Objective, Sums, mean
from jaxlm.training.loss_scale import LossScale, first_scale
from jaxlm.training.optimizer import Optimizer, OptimizerConfig, Schedule, schedule_of, with_untrained_kept
from jaxlm.training.weights import AverageOf, Halving, Iterates, Selection, averaged, no_halving, no_selection

WINDOW = 128  # norms
FEWEST = 10  # norms that a median needs
MOST = 2  # updates in a row that are skipped because they are not finite


@struct.dataclass
class TrainState:
    """The state between two steps. step: int32, the number of updates.

    halted: bool, set for good by a loss or gradient that is not finite and not skipped. seed: uint32, the run's; all
    keys are derived from it and the step. A checkpoint holds neither of the two.
    carry: the model's state after the batch before, leaves (layers, rows, …) in the order of the batch's rows; None for
    models without one. average: the average of the parameters (`jaxlm.training.weights`), or None. iterates: if it is
    the mean of the iterates, their number and the validation losses that decide when it begins. recent_norms: gradient
    norms, by which spikes are found, or None. loss_scale: that of a run in float16, else None. selected: the weights
    with the lowest validation loss so far, or None. selection: the evaluations so far (`jaxlm.training.weights`), or
    None. halving: the factor of the learning rate that evaluations halve, or None. A checkpoint holds those that are
    not None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    seed: jax.Array
    halted: jax.Array
    carry: Any = None
    average: Any = None
    iterates: Iterates | None = None
    recent_norms: Any = None
    loss_scale: LossScale | None = None
    selected: Any = None
    selection: Selection | None = None
    halving: Halving | None = None

    @property
    def weights(self) -> Any:
        """The parameters to evaluate and to use: their average if there is one."""
        return self.params if self.average is None else self.average


# Fields without which a state can be continued.
OPTIONAL = ("average", "iterates", "recent_norms", "loss_scale")
OWN = ("selected", "selection", "halving")  # fields that another run never continues: it evaluates on a text of its own
SAVED = ("step", "params", "opt_state", "carry", *OPTIONAL, *OWN)  # the fields that a checkpoint holds


def no_norms() -> jax.Array:
    """Return the norms before the first update, float32 (WINDOW,): NaN where none is known, infinity if not finite."""
    return jnp.full((WINDOW,), jnp.nan, jnp.float32)


InitParams = Callable[[jax.Array], Any]  # a key -> parameters boxed with their logical axes


def new_state(
    params: Any,
    optimizer: Optimizer,
    seed: jax.Array,
    carry: Any = None,
    *,
    averages: bool = False,
    iterates: Callable[[], Iterates] | None = None,
    finds_spikes: bool = False,
    scales_loss: bool = False,
    keeps_best: bool = False,
    selects: bool = False,
    halves_rate: bool = False,
) -> TrainState:
    """Return the state before the first update. averages: with an average of the parameters.

    iterates: makes `TrainState.iterates`, if the average is the mean of the iterates. finds_spikes, scales_loss,
    keeps_best, selects, halves_rate: with `recent_norms`, `loss_scale`, `selected`, `selection` and `halving`.
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.transformation.init(params),
        seed=jnp.asarray(seed, jnp.uint32),
        halted=jnp.zeros((), jnp.bool_),
        carry=carry,
        average=jax.tree.map(jnp.copy, params) if averages else None,
        iterates=None if iterates is None else iterates(),
        recent_norms=no_norms() if finds_spikes else None,
        loss_scale=first_scale() if scales_loss else None,
        selected=jax.tree.map(jnp.copy, params) if keeps_best else None,
        selection=no_selection() if selects else None,
        halving=no_halving() if halves_rate else None,
    )


def abstract_params(init_params: InitParams) -> Any:
    """Return the boxed shapes and dtypes of the parameters. JAX traces the same function once."""
    return jax.eval_shape(init_params, jax.eval_shape(jax.random.key, 0))


def abstract_state(
    init_params: InitParams, optimizer: Optimizer, mesh: Mesh, carry: Callable[[], Any] = lambda: None, **settings: Any
) -> TrainState:
    """Return shapes, dtypes and shardings of the state for the parameters of `init_params`; nothing is allocated.

    The moments inherit the boxes of their parameters and so their shardings. carry: makes the carry before the first
    batch; its rows are sharded like those of the batch. settings: those of `new_state`. An average is sharded like the
    parameters.
    """

    def make(params: Any) -> TrainState:
        return new_state(params, optimizer, jnp.uint32(0), carry(), **settings)

    boxed = jax.eval_shape(make, abstract_params(init_params))
    shardings = state_shardings(boxed, mesh)
    shardings = shardings.replace(carry=jax.tree.map(lambda _: carry_sharding(mesh), boxed.carry))

    return jax.tree.map(abstract_leaf, nn.unbox(boxed), shardings)


def carry_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a carry, (layers, rows, …): that of the rows of the batch."""
    return NamedSharding(mesh, PartitionSpec(None, *batch_sharding(mesh).spec))


def first_carry(carry: Callable[[int], Any], rows: int, mesh: Mesh) -> Any:
    """Return the carry before the first batch of `rows` rows, on the devices, or None."""
    shapes = jax.eval_shape(lambda: carry(rows))
    return jax.jit(lambda: carry(rows), out_shardings=jax.tree.map(lambda _: carry_sharding(mesh), shapes))()


def make_fresh_state(
    init_params: InitParams, optimizer: Optimizer, abstract: TrainState, carry: Callable[[], Any], **settings: Any
) -> Callable[[jax.Array], TrainState]:
    """Return seed -> the state before the first update, compiled once; each shard is computed on its own device.

    settings: those of `new_state`.
    """

    def make(seed: jax.Array) -> TrainState:
        return nn.unbox(new_state(init_params(jax.random.key(seed)), optimizer, seed, carry(), **settings))

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))


def saved_part(state: TrainState) -> dict[str, Any]:
    """Return the part of a state that a checkpoint holds."""
    return {name: value for name in SAVED if (value := getattr(state, name)) is not None}


def from_saved(saved: dict[str, Any], abstract: TrainState, seed: int) -> TrainState:
    """Return the state from the result of `saved_part`; a halted run starts again."""
    halted = jax.device_put(jnp.zeros((), jnp.bool_), abstract.halted.sharding)
    return state_of(saved, seed=jax.device_put(jnp.uint32(seed), abstract.seed.sharding), halted=halted)


def state_of(saved: dict[str, Any], *, seed: jax.Array, halted: jax.Array) -> TrainState:
    """Return the state from the result of `saved_part`, among other entries, and the rest of its fields."""
    return TrainState(**{name: saved[name] for name in SAVED if name in saved}, seed=seed, halted=halted)


Metrics = dict[str, Any]


class Settings(NamedTuple):
    """Numbers of a run that are data of its compiled step, so that other values need no other program.

    norms_every: int32, the steps between two update norms. ema: float32, the decay of the average of the parameters.
    spike_factor: float32, that of `judged`. skips_spikes: bool, True to skip these updates. stage_steps: int32, the
    steps of a stage of gradual unfreezing.
    """

    schedule: Schedule
    norms_every: Any
    ema: Any
    spike_factor: Any
    skips_spikes: Any
    stage_steps: Any


def settings_of(
    optimizer: OptimizerConfig,
    num_steps: int,
    *,
    norms_every: int = 1,
    ema: float = 0.0,
    spike_factor: float = 0.0,
    on_spike: Literal["report", "skip"] = "report",
    stage_steps: int = 1,
) -> Settings:
    """Return the settings of a run of `num_steps`, NumPy scalars."""
    every = np.int32(min(norms_every, np.iinfo(np.int32).max))
    guard = np.float32(spike_factor), np.bool_(on_spike == "skip")
    return Settings(schedule_of(optimizer, num_steps), every, np.float32(ema), *guard, np.int32(stage_steps))


def make_train_step(
    objectives: Objective,
    optimizer: Optimizer,
    *,
    average_of: AverageOf = "after",
    micro_batches: int = 1,
    stacks: Sequence[str] = (),
) -> Callable[[TrainState, Any, Settings], tuple[TrainState, Metrics]]:
    """Return (state, batch, settings) -> (state, metrics): one update from the gradient over the global batch.

    Dropout keys are derived from (state.seed, state.step), masks number the rows of the global batch, and the weights
    of all loss terms are computed on the whole batch before it is split, so the gradient does not depend on the split.
    The rows of the carry are split
    alike. A loss or gradient norm that is not finite leaves the state unchanged except for `halted`, and turns all
    later steps into no-ops, unless it is skipped as a spike. A skipped spike changes the step, the recent norms and, if
    it is finite, the carry only. An overflow, of a state with a loss scale, changes the step, the scale and, if the
    loss is finite, the carry only. The first step of a stage of gradual unfreezing begins with the optimizer's state
    before the first update. The parameters that the objective of the batch does not train keep their bits, and so does
    their part of the optimizer's state; an average follows all of them.
    objectives: that of the batches, with those of other classes. average_of: see `averaged`.
    stacks: the names of the parameters with a leading axis of layers, for `layer_norms`.
    Metrics: `loss`, each term and metric of the objective, `learning_rate`, `gradient_norm`, `halted`, and
    `update_norm`, per layer and without the decay, in every `settings.norms_every`-th step (else 0: it takes 3 % of
    GPT-1's step on a CPU). `spike`: `found`, `median` and `skipped`, if the state has recent norms. `loss_scale`: that
    of this step, if the state has one.
    """

    def train_step(state: TrainState, batch: Any, settings: Settings) -> tuple[TrainState, Metrics]:
        # Gradient
        objective = objectives.of(batch)
        prepared = objective.prepare(batch)
        num_steps = settings.schedule.num_steps
        loss, means, carry, gradient = _gradient(objective, state, prepared, num_steps, micro_batches)
        stage = optimizer.stage_of(state.step, settings.stage_steps)
        gradient = optimizer.mask_frozen_stage(gradient, stage)
        norm = optax.tree.norm(optimizer.trainable(gradient))
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm) & ~state.halted

        # Update
        rate = optimizer.rate(state.step, settings.schedule)
        if objective.rate_factor is not None:
            rate = rate * objective.rate_factor(prepared)
        if state.halving is not None:
            rate = rate * state.halving.factor
        applied, counts, recent_norms = is_finite, is_finite, None
        overflowed, reads = None, is_finite
        more: Metrics = {}
        if state.loss_scale is not None:
            overflowed = state.loss_scale.overflows(is_finite, state.halted)
            counts, reads = is_finite | overflowed, is_finite | (overflowed & jnp.isfinite(loss))
            more["loss_scale"] = state.loss_scale.scale
        if state.recent_norms is not None:
            guard = settings.spike_factor, settings.skips_spikes
            found = judged(state.recent_norms, norm, state, is_finite, *guard, overflowed)
            applied, counts, recent_norms, spike = found
            more |= spike
        updates, opt_state = optimizer.transformation.update(
            gradient, state.opt_state, state.params, learning_rate=rate, applied=applied, stage=stage, counts=counts
        )
        params, means = objective.update_statistics(jax.tree.map(jnp.add, state.params, updates), means)
        params = jax.tree.map(partial(jnp.where, applied), params, state.params)
        params, opt_state = (
            with_untrained_kept(objective.trains, new, old)
            for new, old in ((params, state.params), (opt_state, state.opt_state))
        )
        average, iterates = state.average, None
        if average is not None:
            params, average, iterates = averaged(params, state, applied, settings.ema, average_of)
        new = replace(
            state,
            step=state.step + counts.astype(jnp.int32),
            params=params,
            opt_state=opt_state,
            halted=~counts,
            carry=jax.tree.map(lambda new, old: jnp.where(reads, new, old), carry, state.carry),
            average=average,
            iterates=iterates,
            recent_norms=recent_norms,
            loss_scale=None if state.loss_scale is None else state.loss_scale.updated(is_finite, counts),
        )

        # Metrics
        metrics = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, "halted": ~counts} | means | more

        def norms(gradient: Any, opt_state: Any, params: Any) -> Metrics:
            direction = optimizer.direction(gradient, opt_state, params)
            direction = with_untrained_kept(objective.trains, direction, jax.tree.map(jnp.zeros_like, direction))
            found = layer_norms(optimizer.mask_frozen_stage(direction, stage), rate, stacks)
            return jax.tree.map(lambda norm: jnp.where(applied, norm, 0.0), found) if more else found

        of = gradient, opt_state, state.params
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(norms, *of))
        metrics["update_norm"] = rarely(new.step % settings.norms_every == 0, norms, of, none)
        return new, metrics

    return train_step


def _gradient(
    objective: Objective, state: TrainState, prepared: Any, num_steps: Any, micro_batches: int
) -> tuple[jax.Array, Metrics, Any, Any]:
    """Return the loss over the whole batch, its terms and metrics, the carry after it, and the gradient.

    The loss whose gradient is computed is multiplied by the scale of `state`, and the gradient divided by it.
    """
    scale = None if state.loss_scale is None else state.loss_scale.scale
    weights = objective.weights(prepared)
    key = jax.random.fold_in(jax.random.key(state.seed, impl="threefry2x32"), state.step)
    key = jax.random.fold_in(key, 0)  # the key of the only micro-batch in earlier versions

    def loss_of(params: Any, part: Any, carry: Any, number: Any) -> tuple[jax.Array, tuple[Any, Sums, Any]]:
        rows = jax.tree.leaves(part)[0].shape[0]
        with micro_batch(number, micro_batches, rows) if micro_batches > 1 else contextlib.nullcontext():
            sums, carry = objective.sums(params, part, carry, key)
        factors = {name: objective.coefficient(name, state.step, num_steps) for name in objective.coefficients}
        terms = [jnp.sum(factor * mean(sums[name], weights[name])) for name, factor in factors.items()]
        loss = jnp.sum(jnp.stack(terms))
        return loss if scale is None else loss * scale, (loss, sums, carry)

    gradient_of = jax.value_and_grad(loss_of, has_aux=True)

    def of_part(number: Any, part: Any, carry: Any) -> tuple[Any, Any]:
        (_, (loss, sums, carry)), gradient = gradient_of(state.params, part, carry, number)
        return (loss, sums, gradient), carry

    if micro_batches == 1:
        (loss, sums, gradient), carry = of_part(0, prepared, state.carry)
    else:
        parts, carries = split_rows(prepared, 0, micro_batches), split_rows(state.carry, 1, micro_batches)
        inputs = (jnp.arange(micro_batches), parts, carries)
        first = jax.tree.map(lambda x: x[0], inputs)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: of_part(*first)[0]))

        def add(total: Any, inputs: Any) -> tuple[Any, Any]:
            found, carry = of_part(*inputs)
            return jax.tree.map(jnp.add, total, found), carry

        (loss, sums, gradient), carries = jax.lax.scan(add, zeros, inputs)
        carry = joined_rows(carries, 1)
    if scale is not None:
        gradient = jax.tree.map(lambda g: g / scale, gradient)
    means = {name: jax.tree.map(lambda total, weight=weights[name]: mean(total, weight), sums[name]) for name in sums}
    return loss, means, carry, gradient


def judged(
    norms: jax.Array,
    norm: jax.Array,
    state: Any,
    is_finite: jax.Array,
    factor: Any,
    skips: Any,
    overflowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Return two bools (the update is applied, the step counts), the norms with its own, and the metric `spike`.

    norms, norm: of the gradients before and of this one. state: the TrainState before the update. factor: as above;
    skips: True to skip spikes. overflowed: True for an update that counts and is neither applied nor a spike, as the
    loss scale was too large; its norm is not known. `spike`: found, True if the update is one; skipped; the median
    before it.
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
    if overflowed is not None:
        found, skipped, counts = found & ~overflowed, skipped & ~overflowed, counts | overflowed
        norm_kept = jnp.where(overflowed, jnp.nan, norm_kept)
    kept = jnp.where(counts, norms.at[state.step % WINDOW].set(norm_kept), norms)  # in place of the oldest one
    return applied, counts, kept, {"spike": {"found": found, "skipped": skipped, "median": median}}


def split_rows(tree: Any, axis: int, parts: int) -> Any:
    """Split the rows of each leaf, on `axis`, into strided parts, stacked on a new first axis.

    Row r is in part r % parts, so that each device keeps the rows that it has.
    """

    def split(x: jax.Array) -> jax.Array:
        shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis + 1, 0)

    return jax.tree.map(split, tree)


def joined_rows(tree: Any, axis: int) -> Any:
    """Undo `split_rows`."""

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return jax.tree.map(join, tree)


def layer_norms(direction: Any, rate: jax.Array, stacks: Sequence[str]) -> Metrics:
    """Return `rate` times the norm of each layer of a tree, and of each other part of the model.

    stacks: the names of the parameters with a leading axis of N layers, whose norms are (N,).
    """
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(direction):
        names = [entry.key for entry in path]
        name = names[1] if names[0] == "backbone" else names[0]
        axes = tuple(range(1, leaf.ndim)) if name in stacks else None
        squares[name] = squares.get(name, 0.0) + jnp.sum(jnp.square(leaf), axis=axes)
    return {name: rate * jnp.sqrt(total) for name, total in squares.items()}


EvalSums = dict[str, tuple[jax.Array, jax.Array]]
EvalStep = Callable[..., tuple[EvalSums, Any]]


def make_eval_step(objective: Objective) -> EvalStep:
    """Return (params, batch, carry) -> for each term and metric its (sum, weight), without dropout, and the carry."""

    def eval_step(params: Any, batch: Any, carry: Any = None) -> tuple[EvalSums, Any]:
        prepared = objective.prepare(batch)
        weights = objective.weights(prepared)
        sums, carry = objective.sums(params, prepared, carry, None)
        return {name: (sums[name], weights[name]) for name in sums}, carry

    return eval_step
