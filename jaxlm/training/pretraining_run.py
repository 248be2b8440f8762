"""A pretraining run, from its plan to its last step.

The same arguments resume a stopped run, and report when the run is complete.
"""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from jaxlm.compiler.memory import check_batch_memory, check_state_memory
from jaxlm.config import field_of_flag, listed, load_config, of_call, with_fields
from jaxlm.data.loader import PhasedRows, batches, describe_rows, phased_rows
from jaxlm.distributed.mesh import host_rows, make_mesh, replicated, to_devices, use_mesh
from jaxlm.distributed.processes import first_process_decides
from jaxlm.errors import InputError, Stopped, as_flags, names_arguments
from jaxlm.models.model import Model
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import MetricsLog
from jaxlm.runs.recorder import Callback, Observer, Recorder
from jaxlm.runs.remote import check_room
from jaxlm.storage import is_url
from jaxlm.text import Tokenizer
from jaxlm.training.config import PretrainArguments, PretrainConfig, check_batches, run_fields
from jaxlm.training.initialization import continue_state, fresh_parts, resume, with_parameters
from jaxlm.training.loop import Profile, ScheduledEvaluation, Session, explain_failure, run_training
from jaxlm.training.pretraining import (
    Plan,
    Pretraining,
    make_pretraining,
    plan,
    reading_of,
    resolved_config,
    steered_by_validation,
)
from jaxlm.training.program import (
    CompiledStep,
    Program,
    abstract_rows,
    empty_row,
    fitted_to_devices,
    make_program,
    run_settings,
)
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


def prepared(planned: Plan) -> _Prepared:
    """Make the rows and programs of a plan. InputError if a batch or a step does not fit the memory."""
    config = planned.config
    mesh = make_mesh(config.mesh)
    eval_batch_size = check_batches(config, mesh)
    tokenizer = planned.tokenizer
    pretraining = make_pretraining(config, tokenizer)
    empty = [empty_row(config, phase.length) for phase in planned.phases]
    longest = max(empty, key=lambda row: row.ids.shape[-1])
    check_batch_memory(longest, config.batch_size)
    check_batch_memory(longest, eval_batch_size, "eval_batch_size" if config.eval_batch_size else "batch_size")
    first = replace(config, micro_batches=1)
    with use_mesh(mesh):  # a model that cannot fit is not compiled
        program = make_program(pretraining, first, mesh)
    check_state_memory(program.abstract, program.abstract.params)
    config = fitted_to_devices(config, lambda choice: make_pretraining(choice, tokenizer), empty, mesh)
    if config != first:
        pretraining = make_pretraining(config, tokenizer)
        with use_mesh(mesh):
            program = make_program(pretraining, config, mesh)
    rows = phased_rows(config.data, reading_of(config, planned.stores), planned.num_steps)
    with use_mesh(mesh):
        settings = replicated(run_settings(config, planned.num_steps), mesh)
        options = config.execution.compiler_options()
    step = CompiledStep("training", program.step, expected_shapes=len(planned.phases), options=options)
    planned = replace(planned, config=config)
    entropy, tokens = None, sum(store.num_tokens for store in planned.stores)
    if planned.source is None:
        entropy = sum(store.unigram_entropy() * store.num_tokens for store in planned.stores) / tokens
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
    # num_steps determines the step at which rows get longer, even if this run does not reach it.
    changes_length = any(0 < fraction < 1 for _, fraction in config.data.lengths(config.length))
    fixed = changes_length or config.objective.depends_on_num_steps()
    steered = steered_by_validation(config)
    free = (*run_fields(config.optimizer, fixed_steps=fixed, fixed_evaluations=steered), "start")
    changed = run.open(resolved, run_fields=free)
    result = {"run": run.name, "step": 0, "num_steps": num_steps, "complete": True}
    with run:
        run.save_tokenizer(planned.tokenizer)
        checkpoints = Checkpoints(run.checkpoints, keep_newest=config.keep_newest, keep_every=config.keep_every)
        with checkpoints, use_mesh(ready.mesh):
            steps = checkpoints.agreed_steps()
            if _is_complete(checkpoints, steps, num_steps):
                end = f"{steps[-1]} of {counted(num_steps, 'step')}"
                observer.say(f"{run.name} is complete: {end}; nothing to do")
                return result | {"step": steps[-1]}
            notes = [f"changed since the last start: {as_flags(change)}" for change in changed]
            notes += filter(None, [room(max(1, config.keep_newest + 1 - len(steps)))])
            try:
                _train(ready, run, checkpoints, arguments.start_with, observer, resolved, evaluations, notes)
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
    start_with: Literal["parameters", "state"],
    observer: Observer,
    resolved: dict[str, Any],
    evaluations: Sequence[Callable[[TrainingContext], ScheduledEvaluation]],
    notes: Sequence[str],
) -> None:
    """Train from the first state to the last step. notes: for the log, on the run's config and the disk."""
    planned, source, resumes = ready.plan, ready.plan.source, bool(checkpoints.agreed_steps())
    config, num_steps = planned.config, planned.num_steps
    if not resumes and source is None:
        ready.compile_ahead(0)  # a resumed or given state is read first: damage is reported before compilation
    state, origin, more = first_state(ready, checkpoints, start_with)
    first_step = int(state.step)
    if first_step >= num_steps:
        raise InputError(f"num_steps must be above {first_step}, the step of {origin}, got {num_steps}; ask for more")
    ready.compile_ahead(first_step)
    started_from = None if origin == "from scratch" else origin
    notes = [*notes, *more, *run.version_notes()]  # before this start is recorded
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
    _note_beginning(recorder, ready, state, origin, notes)
    length, tokenizer = max(phase.length for phase in planned.phases), planned.tokenizer
    parts = (ready.pretraining.model, tokenizer, ready.mesh, ready.eval_batch_size)
    stream_length = length if config.data.carries else None
    context = TrainingContext(run, recorder.metrics, *parts, length, stream_length, config)
    scheduled = []
    if planned.validation:
        validation = Validation(planned, ready.pretraining, ready.mesh, ready.eval_batch_size)
        scheduled.append(scheduled_validation(validation, recorder, ready.program.abstract))
    scheduled += [begin(context) for begin in evaluations]

    def save(number: int, state: TrainState) -> None:
        extra = {"ended_early": True} if ends_early(config, state) else None
        checkpoints.save(number, saved_part(state), config=resolved, extra=extra)

    session = Session(
        recorder,
        checkpoints,
        observer,
        num_steps=num_steps,
        checkpoint_every=config.checkpoint_every,
        save=save,
        evaluations=tuple(scheduled),
        describe_batch=lambda number: describe_rows(ready.rows, number, config.batch_size),
        began=None if resumes else origin if source is None else f"with the {origin}",
        profile=None if planned.profiled is None else Profile(*planned.profiled, run.path / "profile"),
    )
    size, step = config.batch_size, ready.step
    from_host = batches(ready.rows, batch_size=size, host_rows=host_rows(size, ready.mesh), first_step=first_step)
    on_devices = (to_devices(batch, ready.mesh, size) for batch in from_host)
    run_training(state, lambda state, batch: step(state, batch, ready.settings), on_devices, session)


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
        tokenizer = ready.plan.tokenizer if ready.plan.matches_vocabulary else None
        state, notes = with_parameters(fresh, source, allow_fresh=fresh_parts(source, fresh), tokenizer=tokenizer)
        return state, f"parameters of {source.name}", notes
    return fresh, "from scratch", []


def _note_beginning(recorder: Recorder, ready: _Prepared, state: TrainState, origin: str, notes: Sequence[str]) -> None:
    """Log the first lines of a start."""
    config, mesh = ready.plan.config, ready.mesh
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    pairs = zip(ready.rows.phases, ready.rows.rows, strict=True)
    described = [(phase.length, part.description()) for phase, part in pairs]  # of pairs and streams
    for sentence in (
        f"{recorder.run.name}: {origin}; {count:,} parameters, {_length_of(ready.plan)}; "
        f"{mesh.size} {jax.devices()[0].device_kind} ({', '.join(f'{k} {v}' for k, v in mesh.shape.items())}), "
        f"{config.execution.compute_dtype().name}, {config.optimizer.kind}",
        *dropout_notes(ready.plan.source, config.model),
        *([] if (chosen := config.mesh.describe(mesh)) is None else [chosen]),
        *ready.pretraining.notes,
        *config.execution.notes(),
        *(f"{config.data.layout} at length {length}: {said}" for length, said in described if said is not None),
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
