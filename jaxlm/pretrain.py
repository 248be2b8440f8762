"""Pretrain a language model on a token store: `python -m jaxlm.pretrain CONFIG --run RUN --data.store STORE`.

The same command resumes a stopped run, and reports when the run is complete.
"""

from jaxlm.config import command_line
from jaxlm.distributed.devices import prepare_process
from jaxlm.distributed.processes import start_processes
from jaxlm.distributed.watchdog import watching
from jaxlm.errors import run_command
from jaxlm.training.config import PretrainConfig
from jaxlm.training.loop import explain_failure
from jaxlm.training.pretraining_plan import PretrainArguments
from jaxlm.training.pretraining_run import pretrain


def main() -> None:
    """Run the command."""
    arguments, given = command_line(PretrainArguments, PretrainConfig, program="pretrain", description=__doc__)
    start_processes(arguments.distributed)
    with watching():
        prepare_process()
        try:
            pretrain(arguments, given)
        except Exception as error:
            raise explain_failure(error) from error


if __name__ == "__main__":
    run_command(main)
