"""Several real processes of one run, joined on this machine."""

import socket
from pathlib import Path
from typing import Any

from toy_runs import Ended, Process


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def joined(port: int, count: int, number: int) -> list[Any]:
    """The flags that make a command one of several processes."""
    coordinator = f"localhost:{port}"
    return f"--distributed.coordinator {coordinator} --distributed.num-processes {count}".split() + [
        "--distributed.process-id",
        number,
    ]


def start_several(
    command: str, *arguments: Any, log: Path, count: int = 2, devices: int | None = None
) -> list[Process]:
    """`count` processes of `devices` devices each (eight in all unless told); their output lies in `log`."""
    log.mkdir()
    port = free_port()
    return [
        Process(command, *arguments, *joined(port, count, number), log=log / str(number), devices=devices or 8 // count)
        for number in range(count)
    ]


def run_several(command: str, *arguments: Any, log: Path, count: int = 2) -> list[Ended]:
    """`count` processes of eight devices in all, to their ends."""
    return [process.ended() for process in start_several(command, *arguments, log=log, count=count)]
