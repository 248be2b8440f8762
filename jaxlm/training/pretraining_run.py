"""A pretraining run, from its plan to its last step.

The same arguments resume a stopped run, and report when the run is complete.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from jaxlm.compiler.memory import check_batch_memory, check_state_memory
from jaxlm.config import field_of_flag, listed, load_config, of_call, with_fields
from jaxlm.data.loader import PhasedRows, batches, describe_rows, phased_rows
from jaxlm.data.store import Store
from jaxlm.distributed.mesh import host_rows, make_mesh, replicated, to_devices, use_mesh
from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError, Stopped, as_flags, names_arguments
from jaxlm.models.model import Model
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import Callback, Observer, Recorder
from jaxlm.runs.storage import check_room, is_url
from jaxlm.text import Tokenizer
from jaxlm.training.config import PretrainConfig, check_batches, run_fields
from jaxlm.training.initialization import continue_state, fresh_parts, resume, with_parameters
from jaxlm.training.loop import Profile, ScheduledEvaluation, Session, explain_failure, run_training
from jaxlm.training.memory_fit import fitted_to_devices
from jaxlm.training.pretraining import Pretraining, make_pretraining
from jaxlm.training.pretraining_plan import (
    Plan,
    PretrainArguments,
    changes_length,
    plan,
    profiled_steps,
    resolved_config,
    steered_by_validation,
)
from jaxlm.training.program import CompiledStep, Program, abstract_batch, abstract_rows, make_program, run_settings
from jaxlm.training.start import dropout_notes
from jaxlm.training.step import Settings, TrainState, saved_part
from jaxlm.training.validation import Validation, ends_early, scheduled_validation
from jaxlm.wording import counted


@dataclass(frozen=True)
class _Prepared:
    """The rows and programs of a run, before its directory is opened. unigram_entropy: of a run from scratch, nats."""

    plan: Plan
    mesh: jax.sharding.Mesh
    pretraining: Pretraining
    rows: PhasedRows
    program: Program
    settings: Settings
    step: CompiledStep
    eval_batch_size: int
    unigram_entropy: float | None

    def compile_ahead(self, first_step: int) -> None:
        """Compile the step of every phase that a run at `first_step` has before it, without allocating memory.

        Compiling all phases at once keeps a run from failing when a phase begins. InputError if one does not fit.
        """
        with use_mesh(self.mesh):
            for number, phase in enumerate(self.rows.phases):
                if phase.end_step > first_step:
                    batch = abstract_rows(self.rows.empty(number, 1), self.rows.batch_size, self.mesh)
                    try:
                        self.step.prepare(self.program.abstract, batch, self.settings)
                    except jax.errors.JaxRuntimeError as error:
                        raise InputError(str(explain_failure(error))) from error

    def batches(self, first_step: int) -> Iterator[Any]:
        """Yield the batches from a step on, on the devices, without end."""
        size = self.plan.config.batch_size
        own = host_rows(size, self.mesh)
        for batch in batches(self.rows, batch_size=size, host_rows=own, first_step=first_step):
            yield to_devices(batch, self.mesh, size)


def prepared(planned: Plan) -> _Prepared:
    """Make the rows and programs of a plan. InputError if a batch or a step does not fit the memory."""
    config = planned.config
    mesh = make_mesh(config.mesh)
    eval_batch_size = check_batches(config, mesh)
    pretraining = make_pretraining(config, planned.stores[0].tokenizer())
    lengths = [phase.length for phase in planned.phases]
    row = abstract_batch(replace(config, batch_size=1), max(lengths), mesh)
    check_batch_memory(row, config.batch_size)
    check_batch_memory(row, eval_batch_size, "eval_batch_size" if config.eval_batch_size else "batch_size")
    with use_mesh(mesh):  # a model that cannot fit is not compiled
        of_one = make_program(pretraining, replace(config, micro_batches=1), mesh).abstract
    check_state_memory(of_one, of_one.params)
    config = fitted_to_devices(config, pretraining, lengths, mesh)
    rows = phased_rows(
        planned.stores,
        config.data,
        length=config.length,
        seed=config.seed,
        num_steps=planned.num_steps,
        batch_size=config.batch_size,
        masked=config.objective.kind == "masked_lm",
    )
    with use_mesh(mesh):
        program = make_program(pretraining, config, mesh)
        settings = replicated(run_settings(config, planned.num_steps), mesh)
    step = CompiledStep("training", program.step, expected_shapes=len(planned.phases))
    planned = replace(planned, config=config)
    entropy = None if planned.source is not None else _unigram_entropy(planned.stores)
    return _Prepared(planned, mesh, pretraining, rows, program, settings, step, eval_batch_size, entropy)


class TrainingContext(NamedTuple):
    """The training that a further evaluation belongs to.

    length: the tokens in the longest rows that are trained. stream_length: those in a row of a stream, None in other
    layouts.
    """

    run: RunDirectory
    log: MetricsLog
    model: Model
    tokenizer: Tokenizer
    mesh: Mesh
    batch_size: int
    length: int
    stream_length: int | None
    config: PretrainConfig


@names_arguments
def run_pretraining(
    config: str | Path | PretrainConfig,
    *,
    run: str | Path,
    store: str | Path | Sequence[str | Path] | None = None,
    validation: str | Path | Sequence[str | Path] | None = None,
    start: str | Path | None = None,
    start_with: Literal["parameters", "state"] = "parameters",
    start_vocabulary: Literal["same", "matched"] = "same",
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    profile: str | None = None,
    verify_stores: bool = False,
    given: Set[str] = frozenset(),
    observer: Observer | None = None,
    evaluations: Sequence[Callable[[TrainingContext], ScheduledEvaluation]] = (),
    checks: Sequence[Callable[[Plan], None]] = (),
) -> dict[str, Any]:
    """Pretrain a language model on token stores, or resume a run with the same arguments.

    Args:
      config: A config file, its name, for example `pretrain/gpt1`, or a PretrainConfig.
      run: The run directory to create or to resume.
      store: Token stores to train on, of `prepare_store`. Default: the stores of the config.
      validation: Token stores to evaluate on. Default: the stores of the config.
      start: A run, RUN or RUN@STEP, or published weights, hf:DIR, to start from. Default: from scratch.
      start_with: Content to load from `start`: its parameters, or its whole state.
      start_vocabulary: same: the stores have the tokenizer of `start`. matched: each token's row of the table comes
        from the same token of `start`, or is the mean of all rows.
      changes: Other values of the config's fields, by the names of their flags: `{"optimizer.peak_lr": 1e-3}`.
      callbacks: Functions that receive each record of metrics.jsonl as a dictionary. A callback that returns True stops
        the run after the step in progress, with its state saved. The same call continues it.
      profile: START:STOP, the steps to trace for TensorBoard's profiler.
      verify_stores: Check the full hashes of the stores first.
      given: Names of the config's fields that were set on purpose, as flags are, in addition to those in `changes`.
      observer: Replaces `callbacks` in a program that handles signals and prints, as the command does.
      evaluations: Further evaluations during training, each a function of what is trained.
      checks: Further checks of the plan of the run, which raise InputError before anything is compiled.

    Returns:
      A dictionary: `run`, its directory; `step`, the last step that is saved; `num_steps`; `complete`, False if a
      callback stopped the run.

    Raises:
      InputError: An argument, a store or the start is invalid. The message says how to fix it.
      RunError: The run failed: a full disk, exhausted memory, a loss that is not finite.
      Stopped: A signal stopped the run (only with `observer`).

    Example:
      >>> result = jaxlm.run_pretraining(
      ...     "debug/gpt",
      ...     run="runs/new",
      ...     store="stores/books",
      ...     changes={"num_steps": 9, "length": 32, "log_every": 1, "optimizer.warmup": 2},
      ...     callbacks=[lambda record: record["step"] == 2],
      ... )
      >>> result["complete"]
      False
    """
    stores = {"data.store": store, "data.validation": validation}
    changes = dict(changes or {}) | {name: listed(value) for name, value in stores.items() if value is not None}
    settings = load_config(str(config), PretrainConfig) if isinstance(config, str | Path) else config
    settings = with_fields(settings, changes) if changes else settings
    arguments = of_call(PretrainArguments, locals(), config="")
    observer = observer or Observer(callbacks)
    try:
        return _pretrain(arguments, {*given, *map(field_of_flag, changes)}, observer, evaluations, checks)
    except Exception as error:
        raise explain_failure(error) from error


def _pretrain(
    arguments: PretrainArguments,
    given: set[str],
    observer: Observer,
    evaluations: Sequence[Callable[[TrainingContext], ScheduledEvaluation]],
    checks: Sequence[Callable[[Plan], None]],
) -> dict[str, Any]:
    """Start or resume a run and train it until it is complete or stopped; return the result of `run_pretraining`."""
    profiled = profiled_steps(arguments)
    planned = plan(arguments, given)
    for check in checks:
        check(planned)
    ready = prepared(planned)
    planned, source = ready.plan, ready.plan.source
    config, num_steps = planned.config, planned.num_steps
    run = RunDirectory(arguments.run)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved_part(ready.program.abstract)))

    def room(kept: int) -> str | None:
        return first_process_decides(lambda: check_room(run.root, size, kept))

    if source is None and first_process_decides(lambda: _is_creatable(run.name)):
        room(1)  # what does not fit leaves no directory behind
        ready.compile_ahead(0)
    resolved = resolved_config(arguments, planned)
    fixed = changes_length(config) or config.objective.depends_on_num_steps()
    steered = steered_by_validation(config)
    free = (*run_fields(config.optimizer, fixed_steps=fixed, fixed_evaluations=steered), "start")
    changed = run.open(resolved, run_fields=free)
    result = {"run": run.name, "step": 0, "num_steps": num_steps, "complete": True}
    with run:
        run.save_tokenizer(planned.stores[0].tokenizer())
        checkpoints = Checkpoints(run.checkpoints, keep_newest=config.keep_newest, keep_every=config.keep_every)
        with checkpoints, use_mesh(ready.mesh):
            steps = checkpoints.agreed_steps()
            if _is_complete(checkpoints, steps, num_steps):
                end = f"{steps[-1]} of {counted(num_steps, 'step')}"
                observer.say(f"{run.name} is complete: {end}; nothing to do")
                return result | {"step": steps[-1]}
            note = room(max(1, config.keep_newest + 1 - len(steps)))
            if not steps and source is None:
                ready.compile_ahead(0)  # a resumed or given state is read first: damage is reported before compilation
            state, origin, notes = first_state(ready, checkpoints, arguments.start_with)
            beginning = state, origin, [*notes, *filter(None, [note])]
            try:
                _train(ready, run, checkpoints, beginning, changed, observer, resolved, profiled, evaluations)
            except Stopped:
                if not observer.stopped:
                    raise
            saved = checkpoints.agreed_steps()
            complete = _is_complete(checkpoints, saved, num_steps)
    return result | {"step": saved[-1] if saved else 0, "complete": complete}


def _is_complete(checkpoints: Checkpoints, steps: Sequence[int], num_steps: int) -> bool:
    """Return True if the newest of the steps is the last one, or the one at which training ended early."""
    return bool(steps) and (steps[-1] >= num_steps or bool(checkpoints.metadata().extra.get("ended_early")))


def _train(
    ready: _Prepared,
    run: RunDirectory,
    checkpoints: Checkpoints,
    beginning: tuple[TrainState, str, Sequence[str]],
    changed: list[str],
    observer: Observer,
    resolved: dict[str, Any],
    profiled: tuple[int, int] | None,
    evaluations: Sequence[Callable[[TrainingContext], ScheduledEvaluation]],
) -> None:
    """Train from the first state to the last step. beginning: as returned by `first_state`."""
    state, origin, notes = beginning
    planned, source, resumes = ready.plan, ready.plan.source, bool(checkpoints.agreed_steps())
    config, num_steps = planned.config, planned.num_steps
    first_step = int(state.step)
    if first_step >= num_steps:
        raise InputError(f"num_steps must be above {first_step}, the step of {origin}, got {num_steps}; ask for more")
    ready.compile_ahead(first_step)
    started_from = None if origin == "from scratch" else origin
    notes = [*notes, *filter(None, [run.version_note()])]
    run.record_start(started_from=started_from, backend=jax.default_backend(), mesh=dict(ready.mesh.shape))
    recorder = Recorder(
        run,
        MetricsLog(run.path, first_step if resumes else None, on_record=observer.record),
        start=first_step,
        total=num_steps,
        work=ready.pretraining.work(ready.rows),
        log_every=config.log_every,
        unigram_entropy=ready.unigram_entropy,
        gate_metric=ready.pretraining.language_loss,
        output=observer.output,
    )
    ready.step.on_compile = partial(recorder.meter.pause, "compilation")
    _note_beginning(recorder, ready, state, origin, changed, notes)
    length = max(phase.length for phase in planned.phases)
    tokenizer = planned.stores[0].tokenizer()
    context = TrainingContext(
        run,
        recorder.metrics,
        ready.pretraining.model,
        tokenizer,
        ready.mesh,
        ready.eval_batch_size,
        length,
        stream_length=length if config.data.carries else None,
        config=config,
    )
    scheduled = []
    if planned.validation:
        validation = Validation(planned, ready.pretraining, ready.mesh, ready.eval_batch_size)
        scheduled.append(scheduled_validation(validation, recorder, ready.program.abstract))
    scheduled += [begin(context) for begin in evaluations]
    session = Session(
        recorder,
        checkpoints,
        observer,
        num_steps=num_steps,
        checkpoint_every=config.checkpoint_every,
        save=lambda number, state: checkpoints.save(
            number,
            saved_part(state),
            config=resolved,
            extra={"ended_early": True} if ends_early(config, state) else None,
        ),
        evaluations=tuple(scheduled),
        describe_batch=lambda number: describe_rows(ready.rows, number, config.batch_size),
        began=None if resumes else origin if source is None else f"with the {origin}",
        profile=None if profiled is None else Profile(*profiled, run.path / "profile"),
    )
    step = ready.step
    run_training(state, lambda state, batch: step(state, batch, ready.settings), ready.batches(first_step), session)


def first_state(
    ready: _Prepared, checkpoints: Checkpoints, start_with: Literal["parameters", "state"]
) -> tuple[TrainState, str, Sequence[str]]:
    """Return the first state, its origin, and notes.

    The origin is this run's newest checkpoint, else the state or the parameters of another run, else from scratch.
    """
    config, source, program = ready.plan.config, ready.plan.source, ready.program
    if checkpoints.agreed_steps():
        state, notes = resume(checkpoints, program.abstract, config.seed)
        return state, f"resumed at step {int(state.step)}", notes
    if source is not None and start_with == "state":
        state, notes = continue_state(source, program.abstract, config.seed, program.optional_state.get("iterates"))
        return state, f"state of {source.name}", notes
    fresh = program.fresh_state(config.seed)
    if source is not None:
        tokenizer = ready.plan.stores[0].tokenizer() if ready.plan.matches_vocabulary else None
        state, notes = with_parameters(fresh, source, allow_fresh=fresh_parts(source, fresh), tokenizer=tokenizer)
        return state, f"parameters of {source.name}", notes
    return fresh, "from scratch", []


def _note_beginning(
    recorder: Recorder, ready: _Prepared, state: TrainState, origin: str, changed: list[str], notes: Sequence[str]
) -> None:
    """Log the first lines of a start."""
    config, mesh = ready.plan.config, ready.mesh
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    for sentence in (
        f"{recorder.run.name}: {origin}; {count:,} parameters, {_length_of(ready.plan)}; "
        f"{mesh.size} {jax.devices()[0].device_kind} ({', '.join(f'{k} {v}' for k, v in mesh.shape.items())}), "
        f"{config.execution.compute_dtype().name}, {config.optimizer.kind}",
        *dropout_notes(ready.plan.source, config.model),
        *([] if (chosen := config.mesh.describe(mesh)) is None else [chosen]),
        *ready.pretraining.notes,
        *config.execution.reproducibility_notes(),
        *_described(ready.rows, config.data.layout),
        *(f"changed since the last start: {as_flags(change)}" for change in changed),
        *notes,
    ):
        recorder.note(sentence)
    if (warning := config.optimizer.warmup_note(ready.plan.num_steps)) is not None:
        recorder.warn(warning)
    if config.average_iterates == "non_monotone" and not ready.plan.validation:
        recorder.warn(
            "--average-iterates non_monotone needs validation losses: without --data.validation no average begins"
        )


def _is_creatable(run: str) -> bool:
    """Return True if a run's directory is on this machine, does not exist, and can be created."""
    if is_url(run) or Path(run).exists():
        return False
    existing = next(parent for parent in Path(run).absolute().parents if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _length_of(planned: Plan) -> str:
    """Return the length of the run in steps, tokens and epochs, as a sentence."""
    config, several = planned.config, len(planned.phases) > 1
    parts = []
    for phase, rows in zip(planned.phases, planned.rows_per_epoch, strict=True):
        steps = phase.end_step - phase.first_step
        size = f"{f'{steps:,}' if several else counted(steps, 'step')} of {config.batch_size} x {phase.length} tokens"
        parts.append(f"{size}, {counted(steps * config.batch_size / rows, 'epoch')}")
    return f"{planned.num_steps:,} steps: {' and '.join(parts)}" if several else parts[0]


def _described(rows: PhasedRows, layout: str) -> list[str]:
    """Return a sentence on the pairs or the streams in the rows of each phase, or none for other layouts."""
    found = [(phase.length, part.description()) for phase, part in zip(rows.phases, rows.rows, strict=True)]
    return [f"{layout} at length {length}: {said}" for length, said in found if said is not None]


def _unigram_entropy(stores: tuple[Store, ...]) -> float:
    tokens = sum(store.num_tokens for store in stores)
    return sum(store.unigram_entropy() * store.num_tokens for store in stores) / tokens
