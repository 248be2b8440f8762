"""Pretrain a language model on a token store: `python -m jaxlm.pretrain CONFIG --run RUN --data.store STORE`.

The same command resumes a stopped run, and reports when the run is complete.
"""

from functools import partial

from jaxlm.config import command_line
from jaxlm.errors import run_command
from jaxlm.runs.text_log import copied_output
from jaxlm.training.config import PretrainArguments, PretrainConfig

ARGUMENTS = (PretrainArguments,)


@copied_output()
def main() -> None:
    """Run the command."""
    arguments, given = command_line(PretrainArguments, PretrainConfig, program="pretrain", description=__doc__)
    pretrain(arguments, given)


def pretrain(arguments: PretrainArguments, given: set[str]) -> None:
    """Run the pretraining. JAX is imported here, when the command line is known to be right."""
    from jaxlm.distributed.devices import prepare_process
    from jaxlm.distributed.processes import StopSignal, start_processes
    from jaxlm.distributed.watchdog import watching
    from jaxlm.evaluation import zero_shot
    from jaxlm.inference import generation
    from jaxlm.progress import STANDARD
    from jaxlm.runs.recorder import Observer
    from jaxlm.runs.trackers import tracking
    from jaxlm.training.pretraining_run import run_pretraining

    start_processes(arguments.distributed)
    # A start may have other sizes, and attention, than the config.
    known = arguments.settings.model if arguments.start is None else None
    evaluations = [
        *zero_shot.during_pretraining(arguments.zero_shot, arguments.zero_shot_every),
        *generation.during_pretraining(arguments.sample_prompt, arguments.sample_every, known),
    ]
    with tracking(arguments.tracker, arguments.run) as listeners, watching():
        prepare_process()
        run_pretraining(
            arguments.settings,
            run=arguments.run,
            start=arguments.start,
            start_with=arguments.start_with,
            start_vocabulary=arguments.start_vocabulary,
            profile=arguments.profile,
            verify_stores=arguments.verify_stores,
            given=given,
            observer=Observer(signals=StopSignal(), output=STANDARD, listeners=listeners),
            evaluations=evaluations,
            checks=[partial(generation.check_prompts, arguments.sample_prompt, arguments.sample_every)],
        )


if __name__ == "__main__":
    run_command(main)
