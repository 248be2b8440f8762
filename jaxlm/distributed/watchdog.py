"""Watchdog that ends the processes of one run together: when one fails, is killed or loses its machine, all stop.

The runtime alone leaves the others in a barrier for up to 300 s, or aborts them after 100 s without naming the missing
process. So each process, process 0 too, holds a TCP connection to process 0 and reports on it how it ends; process 0
tells all. A connection that closes without a report belongs to a process that was killed, which is noticed at once. A
machine that vanished is noticed after GONE_AFTER seconds in which its kernel did not answer; a kernel answers even if
its programs are busy, so a slow worker is never taken for a dead one. The machines must reach process 0 at the
coordinator's address, on a port that the system chooses.
"""

import contextlib
import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax._src import distributed  # its key-value store has no public name

from jaxlm.errors import EXIT_FAILED, Stopped, one_line, report

log = logging.getLogger(__name__)

GONE_AFTER = 30
"""Seconds without an answer after which a machine is gone."""
OWN_END = 5
"""Seconds that the others get to end by themselves after a failure, as all do if the input is wrong."""
_TO_CONNECT = 60  # seconds; the others may start later
_ADDRESS = "jaxlm/watch"  # key in the store: port and password


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Run the body as one of several joined processes; with a single process, just run it.

    Every process waits at the end for all others. If the body of one raises, its error is reported here and the process
    ends with its exit code; the others, wherever they are, name it and end with EXIT_FAILED within OWN_END + 1 seconds.
    They do so within a second if a process was killed, and within GONE_AFTER + 1 seconds if its machine is gone.
    """
    runtime = distributed.global_state
    if runtime.client is None or runtime.num_processes == 1:
        yield
        return
    watch = _Watch(runtime)
    try:
        yield
    except (Stopped, SystemExit):
        watch.finish()
        raise
    except BaseException as error:  # any error: no process may wait for this one
        watch.fail(error)
    watch.finish()


@dataclass(frozen=True)
class _Failure:
    """The end of the first process; error is None if it was lost without a report. since: by time.monotonic()."""

    worker: str
    error: str | None
    since: float

    def __str__(self) -> str:
        how = "was lost" if self.error is None else "failed"
        why = "killed, or its machine was taken away" if self.error is None else self.error
        ago = time.monotonic() - self.since
        return (
            f"failed: {self.worker} {how} {ago:.0f} s ago: {why}; all processes stop; rerun the same command to resume"
        )


class _Watch:
    """The connection of this process, and in process 0 the hub of all connections."""

    def __init__(self, runtime: Any) -> None:
        number, store = runtime.process_id, runtime.client
        self._heard = threading.Event()
        self._failure: _Failure | None = None
        self._leaving = threading.Lock()
        self._hub = None
        if number == 0:
            self._hub = _Hub(runtime.num_processes)
            store.key_value_set(_ADDRESS, f"{self._hub.port} {self._hub.password}")
            password, self._connection = self._hub.password, self._hub.connect()
        else:
            _delay_abort()
            host = runtime.coordinator_address.rpartition(":")[0].strip("[]")
            port, password = store.blocking_key_value_get(_ADDRESS, 1000 * _TO_CONNECT).split()
            try:
                self._connection = socket.create_connection((host, int(port)), timeout=_TO_CONNECT)
            except OSError as error:
                self._leave(
                    EXIT_FAILED,
                    f"failed: worker {number} cannot reach worker 0 at {host}:{port} ({error}); open all ports between "
                    "the machines of a run",
                )
            self._connection.settimeout(None)
            _notice_silence(self._connection)
        self._say(f"{password} {number} {os.getpid()} {socket.gethostname()}")
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def finish(self) -> None:
        """Wait until every process has called this."""
        self._say("")
        self._heard.wait()
        if self._failure is not None:
            self._leave(EXIT_FAILED, self._failure)

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error, tell the others, and end."""
        if isinstance(error, jax.errors.JaxRuntimeError):  # collectives raise it if another process is gone
            if not self._heard.wait(1):  # a killed one is heard of at once, and then that line is the last
                log.info(
                    "%s: another worker may be lost; this will be known within %d s", one_line(error)[:200], GONE_AFTER
                )
                self._heard.wait(GONE_AFTER)
            if self._failure is not None:
                self._leave(EXIT_FAILED, self._failure)
        code = report(error)
        self._say(f"{type(error).__name__}: {one_line(error)}")
        self._leave(code)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # process 0 is gone, which _listen notices
            self._connection.sendall(f"{line}\n".encode())

    def _listen(self) -> None:
        end: dict[str, Any] = {"worker": "worker 0, the coordinator,", "ago": 0, "error": None}
        try:
            if line := self._connection.makefile(encoding="utf-8").readline():
                end = json.loads(line)
        except OSError:
            end["ago"] = GONE_AFTER
        if end:
            self._failure = _Failure(end["worker"], end["error"], time.monotonic() - end["ago"])
        self._heard.set()
        if end:
            if end["error"] is not None:
                time.sleep(OWN_END)
            self._leave(EXIT_FAILED, self._failure)

    def _leave(self, code: int, said: object = "") -> NoReturn:
        """End without the runtime's barrier; process 0 ends last, as the runtime would abort the others."""
        self._leaving.acquire()  # never released: the first of two threads ends the process
        if said:
            print(said, file=sys.stderr, flush=True)
        if self._hub is not None:
            self._hub.wait_for_others()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


class _Hub:
    """The server in process 0: hears how each process ends and tells all of them in one line.

    The line is JSON: {} when all have finished; else the process that ended first, how many seconds ago, and the error
    or null.
    """

    def __init__(self, count: int) -> None:
        several = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if several else socket.AF_INET,
            dualstack_ipv6=several,
            backlog=count,
        )
        self.port = self._listener.getsockname()[1]
        self.password = secrets.token_hex()  # distinguishes workers from other clients of the port
        self._count = count
        self._change = threading.Condition()
        self._open: dict[int, socket.socket] = {}
        self._finished: set[int] = set()
        self._end: str | None = None
        threading.Thread(target=self._accept, name="watch-accept", daemon=True).start()

    def wait_for_others(self) -> None:
        """Wait until the other processes have left, for a limited time."""
        with self._change:
            self._change.wait_for(lambda: not self._open.keys() - {0}, timeout=2 * OWN_END)

    def connect(self) -> socket.socket:
        """Return a connection to this hub from within the process."""
        end, other = socket.socketpair()
        self._start_hearing(other)
        return end

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with contextlib.suppress(OSError):  # it is already closed
                _notice_silence(connection)
                self._start_hearing(connection)

    def _start_hearing(self, connection: socket.socket) -> None:
        threading.Thread(target=self._hear, args=(connection,), name="watch-hear", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Read all lines of a worker: who it is, then "" when it has finished, or its error."""
        lines, ago = connection.makefile(encoding="utf-8", errors="replace"), 0
        with connection, lines:
            words: list[str] = []
            with contextlib.suppress(OSError):
                words = lines.readline().split()
            if len(words) != 4 or words[0] != self.password:
                return
            number = int(words[1])
            worker = f"worker {number} (process {words[2]} on {words[3]})"
            with self._change:
                self._open[number] = connection
                if self._end is not None:
                    self._tell(connection)
            try:
                for line in lines:
                    if line != "\n":
                        self._decide({"worker": worker, "ago": 0, "error": line.strip()})
                    else:
                        with self._change:
                            self._finished.add(number)
                            all_finished = len(self._finished) == self._count
                        if all_finished:
                            self._decide({})
            except OSError:
                ago = GONE_AFTER
            self._decide({"worker": worker, "ago": ago, "error": None})
            with self._change:
                del self._open[number]
                self._change.notify_all()

    def _decide(self, end: dict[str, Any]) -> None:
        """Tell all how the first process ended; only the first failure is broadcast."""
        with self._change:
            if self._end is None:
                self._end = json.dumps(end)
                for connection in self._open.values():
                    self._tell(connection)

    def _tell(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(f"{self._end}\n".encode())


def _notice_silence(connection: socket.socket) -> None:
    """Make the kernel close the connection when the peer's kernel has not answered for GONE_AFTER seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS has another name
    for option, value in ((idle, GONE_AFTER // 3), ("TCP_KEEPINTVL", GONE_AFTER // 6), ("TCP_KEEPCNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # unacknowledged data suppresses keepalive probes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_AFTER)


def _delay_abort() -> None:
    """Delay the runtime's abort, which follows immediately when the coordinator dies, until the error line is printed.

    The handler is the C library's `sleep`, which gets the signal's number as its argument: it sleeps 6 s, then the
    abort continues.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal.restype = ctypes.c_void_p
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
