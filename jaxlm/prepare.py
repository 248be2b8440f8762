"""Make a token store from text: `python -m jaxlm.prepare --source 'text:books/*.txt' --tokenizer … --output DIR`.

Worker processes stream the documents in bounded memory, one shard at a time, into OUTPUT.partial, which is renamed to
OUTPUT when it is complete. If OUTPUT is a URL, shards are objects, from which the store is composed in the bucket. A
process that is killed at any moment loses no finished shard, and the same command continues. The same input gives the
same bytes for any number of workers. --estimate only prints what this would take.
"""

import json
import signal

from jaxlm.config import command_line
from jaxlm.data.preparation import PrepareConfig, prepare_store
from jaxlm.errors import Stopped, run_command
from jaxlm.progress import STANDARD

ARGUMENTS = (PrepareConfig,)
_STOPPED = "stopped; finished shards are kept; rerun the same command to resume"


def main() -> None:
    """Run the command."""
    config, _ = command_line(PrepareConfig, program="prepare", description=__doc__)
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        found = prepare_store(**vars(config), messages=STANDARD)
    except KeyboardInterrupt:
        raise Stopped(_STOPPED) from None
    if config.estimate:
        print(json.dumps(found), flush=True)


def _raise_stopped(*_: object) -> None:
    raise Stopped(_STOPPED)


if __name__ == "__main__":
    run_command(main)
