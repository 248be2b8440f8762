"""The lines that `jaxlm.show` prints for a token store, for runs, for the batch of a config and for a task."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxlm.data.store import DESCRIPTION, open_store
from jaxlm.errors import InputError
from jaxlm.finetuning.arguments import DEFAULT_LENGTH
from jaxlm.inference.loaded_run import run_config, split_run
from jaxlm.models import family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks import FORMATS
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.training.config import FinetuneConfig, PretrainConfig, one_duration
from jaxlm.training.start import open_source, trained_length
from jaxlm.views.arguments import ShowArguments, ShowFinetuningArguments, ShowPretrainingArguments, ShowRowsArguments
from jaxlm.views.batch import finetune_lines, pretrain_lines, run_batch_lines
from jaxlm.views.config import config_lines
from jaxlm.views.curves import check_plot
from jaxlm.views.run import comparison_lines, plot_runs, run_lines
from jaxlm.views.store import store_lines
from jaxlm.views.task import Reader, task_lines


def rows_of_task(arguments: ShowRowsArguments) -> Iterator[str]:
    """Return the lines for the rows of a task."""
    if arguments.start is not None and arguments.tokenizer is not None:
        raise InputError(f"--tokenizer must be left out with --start, got {arguments.tokenizer}; give one of them")
    reader = _reader(arguments)
    task, data = arguments.read()
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
    task, data = arguments.read()
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
