"""Show a store, runs, the batch of a step or a task: `python -m jaxlm.show STORE|RUN …|CONFIG|--task TASK`.

For a token store it prints the counts and some decoded documents, music as a piano roll; `--document K --output FILE`
writes a document back. For a run it prints the progress, the results and the starts, or with `--step N` the batch of
that step. For several runs it prints the fields that differ, the metrics and the losses. `--plot FILE.png` writes the
curves of one or more runs. For a config it prints the fields, the parameters, the tokens and the learning rates, and
with its data the decoded batch of a step. The data are a store for pretraining (`--data.store`), and a task for
fine-tuning (`--task`, with `--tokenizer` or `--start`). Any field can be given, as for training. For a task without a
config it prints the lengths and labels of the rows, duplicates, overlap with train and empty texts, in tokens too with
`--tokenizer` or `--start`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.config import command_line, is_config, known_configs, load_config
from jaxlm.errors import InputError, run_command
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.views.arguments import (
    ShowArguments,
    ShowFinetuningArguments,
    ShowPretrainingArguments,
    ShowRecipeArguments,
    ShowRowsArguments,
)
from jaxlm.wording import did_you_mean, similar_directory

OF_A_BATCH = ("--task", "--start", "--tokenizer", "--custom", "--step", "--count", "--help", "-h")
ARGUMENTS = (ShowArguments, ShowPretrainingArguments, ShowFinetuningArguments, ShowRowsArguments)


def main() -> None:
    """Print a view of the target."""
    target = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
    path = Path(target)
    if not target and any(word.split("=")[0] == "--task" for word in sys.argv[1:]):
        arguments, given = command_line(ShowRowsArguments, program="show", description=__doc__)
    elif target and "://" not in target and not path.is_dir() and ("@" not in target or path.is_file()):
        arguments, given = _of_config(target)
    else:
        arguments, given = command_line(ShowArguments, program="show", description=__doc__)
    for line in show(arguments, given):
        print(line)


def show(arguments: Any, given: set[str]) -> Iterator[str]:
    """Return the lines for the arguments, by their type. JAX is imported here, after the command line."""
    from jaxlm.views import targets

    match arguments:
        case ShowRowsArguments():
            return targets.rows_of_task(arguments)
        case ShowRecipeArguments():
            return targets.config(arguments.settings, given)
        case ShowPretrainingArguments() if not arguments.settings.data.store and arguments.step is None:
            return targets.config(arguments.settings, given)
        case ShowPretrainingArguments():
            return targets.batch_of_pretraining(arguments, given)
        case ShowFinetuningArguments():
            return targets.batch_of_finetuning(arguments, given)
    return targets.store_or_runs(arguments)


def _of_config(name: str) -> tuple[Any, set[str]]:
    """Return the arguments for the batch of a config, whose fields are flags as for training, and the given fields."""
    if not is_config(name):
        if ":" in name:  # published weights, which other commands read
            from jaxlm.interop.sources import KINDS, check_run_path

            if name.startswith(KINDS):
                check_run_path(Path(name))
        near = (similar_directory(name, "config.json"), similar_directory(name, "description.json"))
        hint = next(filter(None, near), did_you_mean(name, known_configs(), "check the path"))
        raise InputError(
            f"{name} must be a token store, a run directory or a config, and nothing of that name exists; {hint}"
        )
    loaded = load_config(name, object)
    kinds: dict[type, type] = {PretrainConfig: ShowPretrainingArguments, FinetuneConfig: ShowFinetuningArguments}
    if type(loaded) not in kinds:
        raise InputError(
            f"config {name}: config() must return PretrainConfig or FinetuneConfig, got {type(loaded).__name__}"
        )
    kind = kinds[type(loaded)]
    if kind is ShowFinetuningArguments and not any(word.startswith(OF_A_BATCH) for word in sys.argv[2:]):
        kind = ShowRecipeArguments
    return command_line(kind, type(loaded), program="show", description=__doc__, loaded=loaded)


if __name__ == "__main__":
    run_command(main)
