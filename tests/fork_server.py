"""Commands of jaxlm as processes of their own, forked from one that has imported them: their start costs no imports.

`Server().run(...)` from a test; `python tests/fork_server.py` is the other end, which reads a JSON line for each
command and answers with one. A child sees the environment, the limits, the user and the clock that its line names.
"""

import contextlib
import ctypes
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


@dataclass(frozen=True)
class Request:
    """A command line, where it runs, and what happens to it.

    log: its output goes to `log`.out and `log`.err. seconds: after which it is killed. limit: bytes of a file that it
    may write. bound: rights of files hold for it, as they do not for root. clock: how its clock jumps. stop_at: it gets
    SIGTERM when this file, a metrics.jsonl, has `stop_after` lines.
    """

    words: list[str]
    place: str
    log: str
    seconds: float
    limit: int | None = None
    bound: bool = False
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


def _give_up_rights() -> None:
    """Drop the capabilities by which root reads and writes what the rights of a file do not allow."""
    library = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, data) == 0:
        for number in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            data[0] &= ~(1 << number)  # effective; permitted and inheritable follow
            data[1] &= ~(1 << number)
        library.capset(header, data)


def _child(request: Request, commands: dict[str, Any]) -> None:
    from jaxlm.errors import run_command

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request.place)
    if request.limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request.limit, request.limit))
    if request.bound:
        _give_up_rights()
    if request.clock:
        _jump(request.clock)
    sys.argv = request.words
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    run_command(commands[request.words[0]].main)


def _drain(pipes: dict[int, Any]) -> None:
    """Write what came by the pipes to their files."""
    for pipe, file in pipes.items():
        with contextlib.suppress(BlockingIOError):
            while content := os.read(pipe, 1 << 16):
                file.write(content)


def _wait(pid: int, request: Request, pipes: dict[int, Any]) -> int | None:
    deadline = time.monotonic() + request.seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        _drain(pipes)
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
        pipes = [os.pipe(), os.pipe()]  # not files: these have a limit
        pid = os.fork()
        if not pid:
            code = 70
            for number, (_, end) in enumerate(pipes, 1):
                os.dup2(end, number)
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
        for reading, writing in pipes:
            os.close(writing)
            os.set_blocking(reading, False)
        with open(request.log + ".out", "wb") as output, open(request.log + ".err", "wb") as errors:
            code = _wait(pid, request, {pipes[0][0]: output, pipes[1][0]: errors})
        for reading, _ in pipes:
            os.close(reading)
        print(json.dumps(code), flush=True)


if __name__ == "__main__":
    serve()
