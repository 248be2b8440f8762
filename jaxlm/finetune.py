"""Fine-tune a pretrained model on a labelled task: `python -m jaxlm.finetune CONFIG --run RUN --start RUN --task TASK`.

The same command resumes a stopped run, and reports when the run is complete.
"""

import dataclasses

from jaxlm.config import command_line
from jaxlm.errors import run_command
from jaxlm.finetuning.arguments import FinetuneArguments
from jaxlm.runs.text_log import copied_output
from jaxlm.training.config import FinetuneConfig

ARGUMENTS = (FinetuneArguments,)
# Fields of the command alone; all others are arguments of run_finetuning.
OWN = ("config", "settings", "distributed", "tracker")


@copied_output()
def main() -> None:
    """Run the command."""
    arguments, given = command_line(FinetuneArguments, FinetuneConfig, program="finetune", description=__doc__)
    finetune(arguments, given)


def finetune(arguments: FinetuneArguments, given: set[str]) -> None:
    """Run the fine-tuning. JAX is imported here, when the command line is known to be right."""
    from jaxlm.distributed.devices import prepare_process
    from jaxlm.distributed.processes import StopSignal, start_processes
    from jaxlm.distributed.watchdog import watching
    from jaxlm.finetuning.run import run_finetuning
    from jaxlm.progress import STANDARD
    from jaxlm.runs.recorder import Observer
    from jaxlm.runs.trackers import tracking

    start_processes(arguments.distributed)
    with tracking(arguments.tracker, arguments.run) as listeners, watching():
        prepare_process()
        names = [field.name for field in dataclasses.fields(arguments) if field.name not in OWN]
        run_finetuning(
            arguments.settings,
            **{name: getattr(arguments, name) for name in names},
            given=given,
            observer=Observer(signals=StopSignal(), output=STANDARD, listeners=listeners),
        )


if __name__ == "__main__":
    run_command(main)
