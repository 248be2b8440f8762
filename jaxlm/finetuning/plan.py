"""Decisions of a fine-tuning run that are made before a device is used: task, start, length and learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxlm.errors import InputError
from jaxlm.finetuning.arguments import FinetuneArguments, filled, kept_value
from jaxlm.models import build, family_of, with_vocabulary
from jaxlm.ranges import SEEDS
from jaxlm.runs.directory import saved_config
from jaxlm.tasks import FORMATS, CustomConfig, Task, TaskData, read_task
from jaxlm.tasks.class_weights import check_smoothing, class_weights, weight_notes
from jaxlm.text import Tokenizer, tokenizer_from_spec
from jaxlm.training.config import FinetuneConfig, check_sizes, one_duration
from jaxlm.training.start import Source, check_trained, limited, model_of_source, source_of


@dataclass(frozen=True)
class Plan:
    """All decisions made before a device is used. length, batch_size: those of the config, with defaults filled in."""

    config: FinetuneConfig
    length: int
    batch_size: int
    task: Task
    data: TaskData
    tokenizer: Tokenizer
    source: Source | None
    rates: tuple[float, ...]
    notes: tuple[str, ...]


def plan(arguments: FinetuneArguments, given: set[str]) -> Plan:
    """Read the task and the start, fill in the config from them, and raise InputError for inconsistent arguments."""
    config = one_duration(arguments.settings, given)
    source = None
    if arguments.start is not None:
        if arguments.tokenizer is not None:
            raise InputError(
                f"--tokenizer must be left out with --start, got {arguments.tokenizer}; the start has its own tokenizer"
            )
        source = source_of(arguments.run, arguments.start)
        tokenizer = source.tokenizer
        config = replace(config, model=model_of_source(source, config.model, given, saved_config(arguments.run)))
    elif arguments.tokenizer is None:
        raise InputError("--tokenizer must be given without --start; give one of them")
    else:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
    of_tokenizer = [f"tokenizer {arguments.tokenizer}: {note}" for note in tokenizer.notes if source is None]
    config.check()
    if source is None and (config.transfer_layers is not None or config.reinit_layers):
        name = "transfer_layers" if config.transfer_layers is not None else "reinit_layers"
        value = getattr(config, name)
        raise InputError(f"{name} must be left out without --start, got {value}; give --start or leave it out")
    SEEDS.check(f"the last of {arguments.seeds} seeds", config.seed + arguments.seeds - 1)
    task, data = read_task(
        arguments.task,
        arguments.task_dir,
        arguments.custom,
        seed=arguments.held_out_seed,
        options=arguments.options,
        strict=arguments.strict,
        sample=arguments.sample,
    )
    task = with_settings(task, data, config, arguments.custom)
    family = family_of(config.model)
    tokenizer = FORMATS[family.input_format].with_special_tokens(tokenizer, config.special_tokens)
    # A published model's table may have more rows than its tokenizer has ids.
    rows = tokenizer.size if source is None else max(tokenizer.size, source.model.vocab_size)
    config = replace(config, model=with_vocabulary(config.model, rows))
    saved = saved_config(arguments.run)
    longest = build(config.model).max_length
    if source is not None and not arguments.beyond_length:
        longest = source.trained_length
        if config.length is not None and (saved is None or config.length != saved.get("length")):
            check_trained("length", config.length, longest, source.name, beyond=False)
    paper = task.papers.get(family.input_format, {})
    config, length, batch_size = filled(kept_value(config, saved, "length"), paper, longest)
    config = kept_value(config, saved, "num_steps", derived_from=("num_epochs", "batch_size"))
    rates = arguments.learning_rates or (config.optimizer.peak_lr or 0.0,)
    if len(set(rates)) < len(rates):
        raise InputError(f"learning_rates must differ from each other, got {' '.join(map(str, rates))}; leave one out")
    check_sizes(length, 1, config.model)
    notes = (*of_tokenizer, *notes_on_length(config, length, source, paper, task), *weight_notes(task))
    return Plan(config, length, batch_size, task, data, tokenizer, source, rates, notes)


def with_settings(task: Task, data: TaskData, config: FinetuneConfig, custom: CustomConfig) -> Task:
    """Return the task with the selecting metric, the class weights and the special tokens of the config.

    InputError if it has no such metric or classes.
    """
    if config.select_by is not None:
        if task.name == "custom" and custom.metric not in ("", config.select_by):
            raise InputError(
                f"--select-by must be left out with --custom.metric {custom.metric}, got {config.select_by}; give one"
            )
        task = task.selected_by(data, config.select_by)
    check_smoothing(task, config.label_smoothing)
    weights = class_weights(config.class_weights, task, data.splits["train"])
    return replace(task, class_weights=weights, special_tokens=config.special_tokens)


def notes_on_length(
    config: FinetuneConfig, length: int, source: Source | None, paper: Mapping[str, float], task: Task
) -> tuple[str, ...]:
    """Return notes on the length: if it is limited to the trained one, and if windows of a text do not overlap."""
    notes, positions = [], build(config.model).max_length
    if source is not None and length == source.trained_length < min(int(paper.get("length", positions)), positions):
        notes.append(f"length {length}: {limited(length, positions, source.name)}")
    room = length - task.options.question_length - 3
    if task.of_windows and room < task.options.stride:
        notes.append(
            f"length {length}: with a question of {task.options.question_length} tokens a window has room for "
            f"{max(room, 1)} of its text, fewer than options.stride {task.options.stride}: windows do not overlap, and "
            "an answer that crosses two of them is in neither; give a smaller --options.stride"
        )
    return tuple(notes)
