"""Fine-tune a pretrained model on a labelled task: `python -m jaxlm.finetune CONFIG --run RUN --start RUN --task TASK`.

The same command resumes a stopped run, and reports when the run is complete.
"""

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.distributed.processes import start_processes
from jaxlm.distributed.watchdog import watching
from jaxlm.errors import run_command
from jaxlm.finetuning.arguments import FinetuneArguments
from jaxlm.finetuning.run import finetune
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.loop import explain_failure


def main() -> None:
    """Run the command."""
    arguments, given = command_line(FinetuneArguments, FinetuneConfig, program="finetune", description=__doc__)
    start_processes(arguments.distributed)
    with watching():
        prepare_process()
        try:
            finetune(arguments, given)
        except Exception as error:
            raise explain_failure(error) from error


if __name__ == "__main__":
    run_command(main)
