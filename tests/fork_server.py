"""Commands of jaxlm as processes of their own, forked from one that has imported them: their start costs no imports.

`Server().run(...)` from a test; `python tests/fork_server.py` is the other end, which reads a JSON line for each
command and answers with one. A child sees the environment, the limits, the user and the clock that its line names.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOBODY = 65534


@dataclass(frozen=True)
class Request:
    """A command line, where it runs, and what happens to it.

    log: its output goes to `log`.out and `log`.err. seconds: after which it is killed. limit: bytes of a file that it
    may write. nobody: it has the rights of a user who owns nothing. clock: how its clock jumps. stop_at: it gets
    SIGTERM when this file, a metrics.jsonl, has `stop_after` lines.
    """

    words: list[str]
    place: str
    log: str
    seconds: float
    limit: int | None = None
    nobody: bool = False
    clock: str | None = None
    stop_at: str | None = None
    stop_after: int = 0


class Server:
    """The process that forks."""

    def __init__(self, cache: Path):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            "XDG_CACHE_HOME": str(cache),
            "HOME": str(cache),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, request: Request) -> int | None:
        """The exit code of a command; None where it had to be killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _jump(clock: str) -> None:
    """Make time.time go back by a year, ahead by a day, or to and fro."""
    real, calls = time.time, [0]
    jump = {"back": -3e7, "ahead": 1e5}.get(clock)

    def jumping() -> float:
        calls[0] += 1
        return real() + (jump if jump is not None else (-1) ** (calls[0] // 50) * 1e5)

    time.time = jumping


def _child(request: Request, commands: dict[str, Any]) -> None:
    from jaxlm.errors import run_command

    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(request.log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request.place)
    if request.limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request.limit, request.limit))
    if request.nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if request.clock:
        _jump(request.clock)
    sys.argv = request.words
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    run_command(commands[request.words[0]].main)


def _wait(pid: int, request: Request) -> int | None:
    deadline = time.monotonic() + request.seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        if request.stop_at and Path(request.stop_at).exists():
            if len(Path(request.stop_at).read_bytes().splitlines()) >= request.stop_after:
                os.kill(pid, signal.SIGTERM)
                request = Request(**(asdict(request) | {"stop_at": None}))
        time.sleep(0.005 if request.stop_at else 0.05)


def serve() -> None:
    """Fork a child for each line of standard input."""
    from jaxlm import convert, evaluate, finetune, predict, prepare, pretrain, show

    modules = (convert, evaluate, finetune, predict, prepare, pretrain, show)
    commands = {module.__name__.rpartition(".")[2]: module for module in modules}
    for line in sys.stdin:
        request = Request(**json.loads(line))
        pid = os.fork()
        if not pid:
            code = 70
            try:
                _child(request, commands)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:  # as the interpreter does it
                sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(_wait(pid, request)), flush=True)


if __name__ == "__main__":
    serve()
