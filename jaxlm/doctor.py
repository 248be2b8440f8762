"""Check that this machine, or this pod, is ready to train: `python -m jaxlm.doctor [CONFIG [--field value …]]`.

Run it first on a new pod, with the same command on every worker. It checks versions, devices and a sum over all of
them, agreement of the processes, attention against a plain reference in float64, memory, disk, and the compilation
cache. With a config it also checks the batch on this mesh, the memory of the state, and, if the config names stores,
their checksums. No store is needed. It prints a line per check: `ok`, `--` for information, `!!` for a failure with the
fix. The first of several processes prints everything, and every other process prints its own failures. The exit code is
0, or 1 if a check failed on any process.

`--measure DIR` measures this machine instead, on one device: it compares attention and losses with the CPU, kills and
resumes a run, fine-tunes a BERT with random weights, and times training steps. It needs no network. Each part takes
less than five minutes and has its own JSON in DIR; the same command runs those that are missing.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxlm.config import command_line
from jaxlm.distributed.config import DistributedConfig
from jaxlm.errors import run_command
from jaxlm.training.config import PretrainConfig


@dataclass(frozen=True)
class Arguments:
    """Check that this machine is ready to train."""

    measure: Path | None = None
    """Directory for measurements of this machine, which run in place of the checks."""
    measure_size: Literal["full", "debug"] = "full"
    """Sizes of the measured models. full: published ones, for a GPU. debug: toy ones, for any machine."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class ConfigArguments:
    """Check that this machine is ready to train with this config."""

    config: tyro.conf.Positional[str]
    """A config file or its name, for example pretrain/gpt1."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    settings: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)


ARGUMENTS = (Arguments, ConfigArguments)


def main() -> None:
    """Run the command."""
    arguments: Any
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        arguments, _ = command_line(ConfigArguments, PretrainConfig, program="doctor", description=__doc__)
    else:
        arguments, _ = command_line(Arguments, program="doctor", description=__doc__)
    if getattr(arguments, "measure", None) is not None:
        from jaxlm.evaluation.measurements import measure

        sys.exit(0 if measure(arguments.measure, arguments.measure_size) else 1)
    sys.exit(0 if is_ready(arguments) else 1)


def is_ready(arguments: Arguments | ConfigArguments) -> bool:
    """Run the checks. JAX is imported here, when the command line is known to be right."""
    from jaxlm.distributed.processes import start_processes
    from jaxlm.distributed.watchdog import watching
    from jaxlm.views.readiness import report_readiness

    start_processes(arguments.distributed, saves=False)
    with watching():
        return report_readiness(getattr(arguments, "settings", None))


if __name__ == "__main__":
    run_command(main)
