"""Make a token store from text: `python -m jaxlm.prepare --source 'text:books/*.txt' --tokenizer … --output DIR`.

Worker processes stream the documents in bounded memory, one shard at a time, into OUTPUT.partial, which is renamed to
OUTPUT when it is complete. A process that is killed at any moment loses no finished shard, and the same command
continues. The same input gives the same bytes for any number of workers.
"""

import signal

import tyro

from jaxlm.data.preparation import PrepareConfig, prepare
from jaxlm.errors import RunError, Stopped, run_command

_STOPPED = "stopped; finished shards are kept, and the same command continues"


def main() -> None:
    """Run the command."""
    config = tyro.cli(PrepareConfig, prog="python -m jaxlm.prepare", description=__doc__)
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        prepare(config)
    except KeyboardInterrupt:
        raise Stopped(_STOPPED) from None
    except OSError as error:
        raise RunError(
            f"{error.filename or config.output}: {error.strerror or error}; the same command continues"
        ) from error


def _raise_stopped(*_: object) -> None:
    raise Stopped(_STOPPED)


if __name__ == "__main__":
    run_command(main)
