"""Show a token store, a run or the batch of a step: `python -m jaxlm.show STORE|RUN|CONFIG`.

A token store: its counts and some of its documents, decoded. A run: its progress, results and starts, or with --step N
the batch of that step. A config: the decoded batch of a step. Pretraining configs need the store (`--data.store`),
fine-tuning configs the task (`--task`, and `--tokenizer` or `--start`). Any field can be given, as for training.
"""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxlm.config import command_line, load_config
from jaxlm.data.store import DESCRIPTION, open_store
from jaxlm.errors import InputError, run_command
from jaxlm.finetuning.arguments import TaskArguments
from jaxlm.inference.loaded_run import run_config, split_run
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.remote import is_url
from jaxlm.tasks import read_task
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.training.config import FinetuneConfig, PretrainConfig, one_duration
from jaxlm.training.trained_length import trained_length
from jaxlm.views.batch import finetune_lines, pretrain_lines, run_batch_lines
from jaxlm.views.run import run_lines
from jaxlm.views.store import store_lines


@dataclass(frozen=True)
class Arguments:
    """Show a token store or a run."""

    target: tyro.conf.Positional[str]
    """A token store, a run directory (or RUN@STEP), or a config file or its name."""
    step: int | None = None
    """Show the batch of this step of a run, counted from 0."""
    count: int = 3
    """Documents or rows to show."""


@dataclass(frozen=True)
class PretrainArguments:
    """Show a batch of a pretraining config."""

    config: tyro.conf.Positional[str]
    """A config file, or its name."""
    step: int = 0
    """The step, counted from 0."""
    count: int = 3
    """Rows to show."""
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(TaskArguments):
    """Show a batch of a fine-tuning config."""

    step: int = 0
    """The step, counted from 0."""
    count: int = 3
    """Examples to show."""


def show_config(name: str) -> Iterator[str]:
    """Return the lines for the batch of a config; its fields are flags, as for training."""
    try:
        loaded = load_config(name, object)
    except InputError as error:
        raise InputError(f"{name} must be a token store, a run directory or a working config: {error}") from error
    if isinstance(loaded, PretrainConfig):
        arguments, given = command_line(
            PretrainArguments, PretrainConfig, program="show", description=__doc__, loaded=loaded
        )
        _check_counts(arguments)
        settings = one_duration(arguments.settings, given)
        settings.check()
        return pretrain_lines(settings, arguments.step, arguments.count)
    if not isinstance(loaded, FinetuneConfig):
        raise InputError(
            f"config {name}: config() must return PretrainConfig or FinetuneConfig, got {type(loaded).__name__}"
        )
    arguments, given = command_line(
        FinetuneArguments, FinetuneConfig, program="show", description=__doc__, loaded=loaded
    )
    _check_counts(arguments)
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
    arguments.options.check()
    task, data = read_task(
        arguments.task,
        arguments.task_dir,
        arguments.custom,
        seed=arguments.held_out_seed,
        options=arguments.options,
        strict=arguments.strict,
    )
    return finetune_lines(config, task, data, tokenizer, arguments.step, arguments.count, longest)


def _check_counts(arguments: Any) -> None:
    for name in ("step", "count"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise InputError(f"--{name} must not be negative, got {value}")


def main() -> None:
    """Print a view of the target."""
    target = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    path = Path(target)
    if target and not is_url(target) and not path.is_dir() and ("@" not in target or path.is_file()):
        lines = show_config(target)
    else:
        arguments, _ = command_line(Arguments, program="show", description=__doc__)
        _check_counts(arguments)
        if (path / DESCRIPTION).is_file():
            lines = store_lines(open_store(path), arguments.count)
        else:
            run = RunDirectory(split_run(arguments.target)[0])
            step = arguments.step
            lines = run_lines(run) if step is None else run_batch_lines(run, step, arguments.count)
    for line in lines:
        print(line)


if __name__ == "__main__":
    run_command(main)
