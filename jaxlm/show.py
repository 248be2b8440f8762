"""Show a store, runs, the batch of a step or a task: `python -m jaxlm.show STORE|RUN …|CONFIG|--task TASK`.

A token store: its counts and some of its documents, decoded. A run: its progress, results and starts, or with --step N
the batch of that step. Several runs: the fields that differ, their metrics and their losses. `--plot FILE.png` writes
the curves of one or more runs. A config: the decoded batch of a step. Pretraining configs need the store
(`--data.store`), fine-tuning configs the task (`--task`, and `--tokenizer` or `--start`). Any field can be given, as
for training. A task without a config: the lengths and labels of its rows, duplicates, overlap with train and empty
texts, in tokens too with `--tokenizer` or `--start`.
"""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxlm.config import command_line, is_config, known_configs, load_config
from jaxlm.data.store import DESCRIPTION, open_store
from jaxlm.errors import InputError, run_command
from jaxlm.finetuning.arguments import DataArguments, TaskArguments
from jaxlm.inference.loaded_run import run_config, split_run
from jaxlm.models import family_of
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.remote import is_url
from jaxlm.tasks import ENCODER_ROLES, ROLES, Task, TaskData, read_task
from jaxlm.text import load_tokenizer, tokenizer_from_spec
from jaxlm.training.config import DEFAULT_LENGTH, FinetuneConfig, PretrainConfig, one_duration
from jaxlm.training.initialization import open_source
from jaxlm.training.trained_length import trained_length
from jaxlm.views.batch import finetune_lines, pretrain_lines, run_batch_lines
from jaxlm.views.comparison import comparison_lines, plot_runs
from jaxlm.views.curves import check_plot
from jaxlm.views.run import run_lines
from jaxlm.views.store import store_lines
from jaxlm.views.task import Reader, task_lines
from jaxlm.wording import did_you_mean, similar_directory


@dataclass(frozen=True)
class Arguments:
    """Show a token store, a run, or several runs side by side."""

    target: tyro.conf.Positional[tuple[str, ...]] = ()
    """A token store, one or more run directories (or RUN@STEP), or a config file or its name."""
    step: int | None = None
    """Show the batch of this step of a run, counted from 0."""
    count: int = 3
    """Documents or rows to show."""
    plot: Path | None = None
    """Write the curves of the runs, of training and validation, to this file: .png, .pdf or .svg."""


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


@dataclass(frozen=True, kw_only=True)
class RowsArguments(DataArguments):
    """Show the rows of a task before anything is trained."""

    start: str | None = None
    """A run or published model to measure tokens for."""
    tokenizer: str | None = None
    """Tokenizer to measure tokens with, without a start. A vocabulary with CLS and SEP is used as a BERT uses it."""
    length: int | None = None
    """Tokens in the longest sequence. Default: the task's, at most those that the start was trained on."""
    count: int = 3
    """Training examples to show."""


def show_rows() -> Iterator[str]:
    """Return the lines for the rows of a task."""
    arguments, _ = command_line(RowsArguments, program="show", description=__doc__)
    _check_counts(arguments, "count")
    if arguments.length is not None and arguments.length < 1:
        raise InputError(f"--length must be positive, got {arguments.length}; give at least 1")
    if arguments.start is not None and arguments.tokenizer is not None:
        raise InputError(f"--tokenizer must be left out with --start, got {arguments.tokenizer}; give one of them")
    reader = _reader(arguments)
    task, data = _read_rows(arguments)
    if reader is not None:
        published = int(task.paper_for(reader.input_format).get("length", reader.length))
        reader = dataclasses.replace(reader, length=arguments.length or min(published, reader.length))
    return task_lines(task, data, reader, arguments.count)


def _reader(arguments: RowsArguments) -> Reader | None:
    """Return the tokenizer, input form and longest sequence to measure rows with; None if nothing is given for it."""
    if arguments.start is not None:
        source = open_source(arguments.start)
        reader = Reader(source.tokenizer, family_of(source.model).input_format, source.trained_length)
    elif arguments.tokenizer is not None:
        tokenizer = tokenizer_from_spec(arguments.tokenizer)
        encoder = all(role in tokenizer.specials for role in ENCODER_ROLES)
        reader = Reader(tokenizer, "bert" if encoder else "gpt1", DEFAULT_LENGTH)
    else:
        return None
    if reader.input_format == "gpt1":
        reader = dataclasses.replace(reader, tokenizer=reader.tokenizer.with_specials(ROLES))
    return reader


def _read_rows(arguments: DataArguments) -> tuple[Task, TaskData]:
    arguments.options.check()
    return read_task(
        arguments.task,
        arguments.task_dir,
        arguments.custom,
        seed=arguments.held_out_seed,
        options=arguments.options,
        strict=arguments.strict,
        sample=arguments.sample,
    )


def show_config(name: str) -> Iterator[str]:
    """Return the lines for the batch of a config; its fields are flags, as for training."""
    if not is_config(name):
        near = (similar_directory(name, "config.json"), similar_directory(name, DESCRIPTION))
        hint = next(filter(None, near), did_you_mean(name, known_configs(), "check the path"))
        raise InputError(
            f"{name} must be a token store, a run directory or a config, and nothing of that name exists; {hint}"
        )
    loaded = load_config(name, object)
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
    task, data = _read_rows(arguments)
    return finetune_lines(config, task, data, tokenizer, arguments.step, arguments.count, longest)


def _check_counts(arguments: Any, *names: str) -> None:
    for name in names or ("step", "count"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise InputError(f"--{name} must not be negative, got {value}")


def main() -> None:
    """Print a view of the target."""
    target = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    path = Path(target)
    if not target and any(word.split("=")[0] == "--task" for word in sys.argv[1:]):
        lines = show_rows()
    elif target and not is_url(target) and not path.is_dir() and ("@" not in target or path.is_file()):
        lines = show_config(target)
    else:
        arguments, _ = command_line(Arguments, program="show", description=__doc__)
        _check_counts(arguments)
        lines = _lines_of(arguments)
    for line in lines:
        print(line)


def _lines_of(arguments: Arguments) -> Iterator[str]:
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


if __name__ == "__main__":
    run_command(main)
