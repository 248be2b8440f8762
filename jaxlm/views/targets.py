"""The lines that `jaxlm.show` prints for a token store, for runs, for a config, for its batch and for a task.

The view of a config without its data has its fields, parameters, tokens of the whole run and learning rates.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax

from jaxlm.config import to_json
from jaxlm.data.phases import phases
from jaxlm.data.store import DESCRIPTION, open_store
from jaxlm.errors import InputError
from jaxlm.finetuning.arguments import DataArguments
from jaxlm.inference.loaded_run import run_config, split_run
from jaxlm.models import build, family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.differences import flat, shown
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import FORMATS, Task, TaskData, read_task
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.training.config import DEFAULT_LENGTH, FinetuneConfig, PretrainConfig, one_duration
from jaxlm.training.optimizer import learning_rate, schedule_of
from jaxlm.training.optimizer_config import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import with_published_vocabulary
from jaxlm.training.start import open_source, trained_length
from jaxlm.views.arguments import ShowArguments, ShowFinetuningArguments, ShowPretrainingArguments, ShowRowsArguments
from jaxlm.views.batch import finetune_lines, pretrain_lines, run_batch_lines
from jaxlm.views.curves import check_plot
from jaxlm.views.data import Reader, store_lines, task_lines
from jaxlm.views.run import comparison_lines, plot_runs, run_lines


def rows_of_task(arguments: ShowRowsArguments) -> Iterator[str]:
    """Return the lines for the rows of a task."""
    if arguments.start is not None and arguments.tokenizer is not None:
        raise InputError(f"--tokenizer must be left out with --start, got {arguments.tokenizer}; give one of them")
    reader = _reader(arguments)
    task, data = _read_rows(arguments)
    if reader is not None:
        published = int(task.papers.get(reader.input_format, {}).get("length", reader.length))
        reader = dataclasses.replace(reader, length=arguments.length or min(published, reader.length))
    return task_lines(task, data, reader, arguments.count)


def config(settings: PretrainConfig | FinetuneConfig, given: set[str]) -> Iterator[str]:
    """Return the lines for a config without data. given: the fields of the command line."""
    return config_lines(one_duration(settings, given))


def batch_of_pretraining(arguments: ShowPretrainingArguments, given: set[str]) -> Iterator[str]:
    """Return the lines for the batch of a pretraining config. given: the fields of the command line."""
    settings = one_duration(arguments.settings, given)
    settings.check()
    return pretrain_lines(settings, arguments.step or 0, arguments.count)


def batch_of_finetuning(arguments: ShowFinetuningArguments, given: set[str]) -> Iterator[str]:
    """Return the lines for the batch of a fine-tuning config. given: the fields of the command line."""
    config, longest = one_duration(arguments.settings, given), None
    if arguments.start is not None:
        path, at = split_run(arguments.start)
        run = RunDirectory(path)
        config = dataclasses.replace(config, model=run_config(run).model)
        longest = trained_length(run, Checkpoints(run.checkpoints, read_only=True).metadata(at).step)
        tokenizer = load_tokenizer(run.tokenizer)
    elif arguments.tokenizer is not None:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
    else:
        raise InputError("--tokenizer or --start must be given, got neither; name a tokenizer or a run")
    config.check()
    task, data = _read_rows(arguments)
    return finetune_lines(config, task, data, tokenizer, arguments.step, arguments.count, longest)


def store_or_runs(arguments: ShowArguments) -> Iterator[str]:
    """Yield the view of a store, a run or several runs."""
    if not arguments.target:
        raise InputError("a token store, a run or a config must be given, got nothing; name one")
    first, step = Path(arguments.target[0]), arguments.step
    if len(arguments.target) == 1 and (first / DESCRIPTION).is_file():
        yield from store_lines(open_store(first), arguments.count)
        return
    runs = [RunDirectory(split_run(target)[0]) for target in arguments.target]
    if step is not None and len(runs) > 1:
        raise InputError(f"--step must be given with one run, got {len(runs)}; leave it out to compare them")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    if len(runs) > 1:
        yield from comparison_lines(runs)
    elif step is not None:
        yield from run_batch_lines(runs[0], step, arguments.count)
    else:
        yield from run_lines(runs[0])
    if arguments.plot is not None:
        yield plot_runs(runs, arguments.plot)


def config_lines(config: PretrainConfig | FinetuneConfig) -> Iterator[str]:
    """Yield every field of a config, then its parameters, its tokens and its learning rates. Nothing is allocated.

    A vocabulary that comes from a store or a start is counted at its published size.
    """
    config.check()
    fields = flat(to_json(config))
    width = max(map(len, fields))
    yield from (f"{name:<{width}}  {shown(fields, name)}" for name in fields)
    yield ""
    sized = replace(config, model=with_published_vocabulary(config.model))
    vocabulary = f"a vocabulary of {sized.model.vocab_size:,} ids"
    if not config.model.vocab_size:
        vocabulary += ", the published size; training takes the store's or the start's"
    yield f"parameters: {_parameters(sized):,} with {vocabulary}"
    yield _duration(config)
    yield _schedule(config.optimizer, config.num_steps)


def _reader(arguments: ShowRowsArguments) -> Reader | None:
    """Return the tokenizer, input form and longest sequence to measure rows with; None if nothing is given for it."""
    if arguments.start is not None:
        source = open_source(arguments.start)
        reader = Reader(source.tokenizer, family_of(source.model).input_format, source.trained_length)
    elif arguments.tokenizer is not None:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
        fits = next(name for name, inputs in FORMATS.items() if set(inputs.needs) <= tokenizer.specials.keys())
        reader = Reader(tokenizer, fits, DEFAULT_LENGTH)
    else:
        return None
    tokenizer = FORMATS[reader.input_format].with_special_tokens(reader.tokenizer)
    return dataclasses.replace(reader, tokenizer=tokenizer)


def _read_rows(arguments: DataArguments) -> tuple[Task, TaskData]:
    return read_task(
        arguments.task,
        arguments.task_dir,
        arguments.custom,
        seed=arguments.held_out_seed,
        options=arguments.options,
        strict=arguments.strict,
        sample=arguments.sample,
    )


def _parameters(config: PretrainConfig | FinetuneConfig) -> int:
    """Return the number of parameters, for fine-tuning without the head, whose size depends on the task."""
    init = (
        make_pretraining(config, None).init_params if isinstance(config, PretrainConfig) else build(config.model).init
    )
    leaves = jax.tree.leaves(jax.eval_shape(lambda: init(jax.random.key(0))))
    return sum(leaf.size for leaf in leaves)


def _duration(config: PretrainConfig | FinetuneConfig) -> str:
    """Return a line about the tokens of the whole run."""
    if config.num_steps is None:
        data = "of the store" if isinstance(config, PretrainConfig) else "of the task's training rows"
        passes = "as many passes as the task's paper" if config.num_epochs is None else f"{config.num_epochs:g} passes"
        return f"tokens of the whole run: {passes} {data}; --num-steps gives a number of steps"
    if isinstance(config, FinetuneConfig):
        return f"steps of the whole run: {config.num_steps:,}; the lengths of their rows depend on the task"
    parts = phases(config.data, length=config.length, num_steps=config.num_steps)
    counts = [(part.end_step - part.first_step, part.length) for part in parts]
    total = sum(steps * length for steps, length in counts) * config.batch_size
    said = " + ".join(f"{steps:,} steps x {config.batch_size} x {length}" for steps, length in counts)
    return f"tokens of the whole run: {total:,} = {said}, padding included"


def _schedule(config: OptimizerConfig, num_steps: int | None) -> str:
    """Return a line about the learning rates."""
    peak = "the task's" if config.peak_lr is None else f"{config.peak_lr:g}"
    if config.peak_lr is None or num_steps is None:
        warmup = f"{config.warmup:.3g} of the steps" if config.warmup < 1 else f"{config.warmup:,g} steps"
        said = f" after a warmup of {warmup}" if config.warmup else ""
        return f"learning rate: peak {peak}{said}, decay {config.decay}"
    top = min(int(config.warmup_steps(num_steps)), num_steps - 1)
    at = sorted({0, top, (top + num_steps) // 2, num_steps - 1})
    schedule = schedule_of(config, num_steps)
    rates = ", ".join(f"{float(learning_rate(config, step, schedule)):.3g} at step {step:,}" for step in at)
    return f"learning rate ({config.decay}): {rates}"
