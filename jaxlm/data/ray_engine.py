"""Preparation on the workers of a Ray cluster, on this machine or on many that see the same directories or storage.

Ray core tasks: a task receives a unit's number and slices and returns the counts of its shard; documents never travel
through Ray. The shard file is the sign that a unit is done. The driver is a process of its own: Ray changes signal
handlers and environment variables, prints messages of its nodes, and ends its driver when a cluster is lost.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import multiprocessing
import os
import re
import secrets
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxlm.data.saved_tokenizer import saved_tokenizer
from jaxlm.data.shards import RESUME, Answer, Job, Shard, answer, end_with_parent, find_shard
from jaxlm.data.sources import Slice, Unit
from jaxlm.errors import InputError, RunError, one_line
from jaxlm.storage import Entry, is_url
from jaxlm.text import Tokenizer

EXTRA = "run launch/setup.sh cpu ray, or pip install 'jaxlm[ray]'"
PACKAGES = ("tokenizers", "sentencepiece", "sentencex", "ftfy", "spacy", "symusic")
"""Packages whose version may change the ids or the sentences of a text."""

MOST_DEATHS = 3  # workers that a unit may end
POLL = 0.5  # seconds between two looks at units that are late
PATIENCE = 60.0  # seconds after which a unit is late, at least
UNKNOWN = 600.0  # the same before any unit is done
LATE = 5  # times the median, after which a unit is late
QUEUED = 2  # units per core in flight, so that no worker is idle while this process joins shards
LISTENS = 5.0  # seconds within which a cluster accepts a connection
CONNECTS = 60.0  # seconds within which a cluster lets a driver connect
STARTS = 300.0  # seconds within which a cluster starts on this machine; Ray itself gives up earlier
ENDS = 15.0  # seconds that a cluster on this machine has to end
STORE = 80 << 20  # bytes of Ray's object store on this machine, about its minimum; units and counts are small
SHOWN = 3  # files that a message names

# Ray retries without a limit after deaths for lack of memory unless it is told not to; deaths are counted here. It
# gives a node 30 s to start by default, which are too few on a busy machine.
SETTINGS = {"RAY_task_oom_retries": "0", "RAY_agent_register_timeout_ms": "120000", "RAY_USAGE_STATS_ENABLED": "0"}
# A host that has left the network is noticed after seconds instead of minutes.
SETTINGS |= {"RAY_grpc_client_keepalive_time_ms": "5000", "RAY_grpc_client_keepalive_timeout_ms": "5000"}


def check_engine(engine: str) -> str | None:
    """Return the address of `ray:HOST:PORT`, "" for `ray`, None for `local`. InputError for anything else."""
    if engine == "local":
        return None
    kind, colon, address = engine.partition(":")
    if kind != "ray" or (colon and not re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):[1-9]\d{0,4}", address, re.ASCII)):
        raise InputError(
            f"--engine must be local, ray or ray:HOST:PORT, got {engine}; give ray:HOST:6379 for a cluster that runs"
        )
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--engine must be local without Ray, got {engine}; {EXTRA}")
    if address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LISTENS).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise InputError(
                f"--engine must name a Ray cluster that runs, got {engine} ({reason}); start it, or correct the address"
            ) from None
    return address


@dataclass
class Schedule:
    """Decides which units are given to workers, when a unit is late, and when it has ended too many workers.

    waiting: numbers of the units that no worker has. Times are seconds of any clock.
    """

    waiting: deque[int]
    given: dict[int, float] = dataclasses.field(default_factory=dict)
    due: dict[int, float] = dataclasses.field(default_factory=dict)
    deaths: Counter[int] = dataclasses.field(default_factory=Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Return True when each unit has a shard."""
        return not self.waiting and not self.given

    def patience(self) -> float:
        """Return the seconds after which a unit is late."""
        return max(PATIENCE, LATE * statistics.median(self.seconds)) if self.seconds else UNKNOWN

    def give(self, most: int, now: float) -> list[int]:
        """Return the numbers of the units to give to workers, so that they have at most this many."""
        numbers = [self.waiting.popleft() for _ in range(min(len(self.waiting), max(0, most - len(self.given))))]
        for number in numbers:
            self.given[number], self.due[number] = now, now + self.patience()
        return numbers

    def done(self, number: int, now: float) -> bool:
        """Record that a unit has its shard. Returns False for a unit that was done before."""
        if number not in self.given:
            return False
        self.seconds = [*self.seconds[-99:], now - self.given.pop(number)]
        return self.due.pop(number) > 0

    def died(self, number: int) -> bool:
        """Record that a unit's worker has ended. Returns True if the unit may be given to another one."""
        if number in self.given:
            del self.given[number], self.due[number]
            self.waiting.appendleft(number)
        self.deaths[number] += 1
        return self.deaths[number] < MOST_DEATHS

    def late(self, now: float) -> list[int]:
        """Return the units that are late. Each is late again after twice the time."""
        numbers = [number for number, due in self.due.items() if now >= due]
        for number in numbers:
            self.due[number] = now + 2 * (now - self.given[number])
        return numbers


@dataclass
class RayEngine:
    """A Ray cluster that a process of its own drives. workers: its cores."""

    connection: Connection
    process: Any
    workers: int

    def shards(self, job: Job, units: Sequence[tuple[int, Unit]], tokenizer: Tokenizer) -> Iterator[Shard]:
        """Yield the shards of numbered units, in any order. Raises InputError and RunError of a worker."""
        del tokenizer  # the workers read it from the partial store
        self.connection.send((job, units, os.getcwd()))
        for _ in units:
            kind, value = self.receive()
            assert kind == "shard"
            yield value

    def receive(self) -> Answer:
        """Return the driver's next answer. Raises its InputError or RunError."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(ENDS)
            raise RunError(
                f"Ray's driver ended (exit {self.process.exitcode}): its cluster may be lost, or its memory exhausted; "
                f"{RESUME}"
            ) from None
        if kind in ("input", "failed"):
            raise (InputError if kind == "input" else RunError)(value)
        return kind, value


@contextlib.contextmanager
def ray_engine(address: str, workers: int) -> Iterator[RayEngine]:
    """Connect to the cluster at HOST:PORT, or start one of `workers` on this machine if the address is empty."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    # Ray's sockets have names of at most 107 bytes, so their directory stays near the root.
    directory = tempfile.mkdtemp(prefix="jaxlm-ray-")
    process = context.Process(target=_drive, args=(other, address, workers, directory), daemon=True)
    process.start()
    other.close()
    try:
        engine = RayEngine(connection, process, workers)
        if not connection.poll(limit := CONNECTS if address else STARTS):
            raise RunError(f"{_place(address)} did not answer within {limit:.0f} s; {RESUME}")
        _, engine.workers = engine.receive()
        yield engine
    finally:
        connection.close()
        process.terminate()
        process.join(ENDS)
        process.kill()  # a cluster on this machine ends with it
        process.join()
        shutil.rmtree(directory, ignore_errors=True)


def _place(address: str) -> str:
    return f"--engine ray:{address}" if address else "Ray on this machine"


def _drive(connection: Connection, address: str, workers: int, directory: str) -> None:
    """Run the driver: connect, send the number of workers, receive the units and send their shards."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    threading.Thread(target=end_with_parent, daemon=True).start()
    log = os.open(Path(directory) / "driver.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):  # Ray prints its nodes' messages, whatever it is told
        os.dup2(log, stream)
    try:
        _connect(address, workers, directory)
        connection.send(("ready", _cores()))
        for found in _made(*connection.recv()):
            connection.send(found)
    except (EOFError, BrokenPipeError):
        pass  # the parent needs no more
    except InputError as error:
        connection.send(("input", str(error)))
    except RunError as error:
        connection.send(("failed", str(error)))
    except Exception as error:  # Ray documents none of its own
        kind = "input" if address and isinstance(error, ConnectionError) else "failed"
        connection.send((kind, f"{_place(address)} failed: {one_line(error)}; {RESUME}"))


def _connect(address: str, workers: int, directory: str) -> None:
    """Connect to a cluster, or start one that accepts connections of this user from this machine alone."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not address:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        root = str(Path(__file__).resolve().parents[2])  # workers do not inherit sys.path
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if re.match(r"(127\.|localhost:|\[::1\])", address or "localhost:"):
        # On any system: the node's address is 127.0.0.1, where Ray would otherwise take one that others reach.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    if address:
        ray.init(address, log_to_driver=False)
    else:
        ray.init(
            "local",
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=STORE,
            _temp_dir=directory,
        )


def _cores() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def _made(job: Job, units: Sequence[tuple[int, Unit]], directory: str) -> Iterator[Answer]:
    """Let workers make the shards of numbered units, and yield what they answer."""
    import ray

    versions, work = worker_functions()
    remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(work)
    # Arguments in a list are not read before the function is called, which proves the versions first.
    common, expected = [ray.put((job, directory))], versions(PACKAGES)
    numbered, schedule = dict(units), Schedule(deque(number for number, _ in units))
    flying: dict[Any, int] = {}

    def start(number: int) -> None:
        flying[remote.remote(expected, common, number, dataclasses.astuple(numbered[number]))] = number

    cores, looked = _cores(), time.monotonic()
    while not schedule.is_done:
        for number in schedule.give(QUEUED * max(1, cores), time.monotonic()):
            start(number)
        ready, _ = ray.wait(list(flying), num_returns=1, timeout=POLL)
        for reference in ready:
            number = flying.pop(reference)
            kind, value = _answered(reference, job, number, numbered[number], schedule)
            if kind != "shard" or (value is not None and schedule.done(number, time.monotonic())):
                yield kind, value
        if (now := time.monotonic()) - looked < POLL:
            continue
        cores, looked = _cores(), now  # nodes come and go
        for number in schedule.late(now):
            if (shard := find_shard(job, number)) is None:
                start(number)
            elif schedule.done(number, now):
                yield "shard", shard
    for reference in flying:  # copies of units that are done
        ray.cancel(reference, force=True)


def _answered(reference: Any, job: Job, number: int, unit: Unit, schedule: Schedule) -> Answer:
    """Return a worker's answer; ("shard", None) if the worker has ended and the unit is given to another one."""
    import ray

    try:
        kind, value = ray.get(reference)
        return kind, Shard(**value) if kind == "shard" else value
    except ray.exceptions.RayTaskError as error:
        return "failed", f"{named(number, unit)} failed on a worker: {one_line(error.cause or error)}; {RESUME}"
    except ray.exceptions.RayError as error:
        if (shard := find_shard(job, number)) is not None:
            return "shard", shard
        if schedule.died(number):
            return "shard", None
        return "failed", (
            f"{named(number, unit)} ended its worker {MOST_DEATHS} times, perhaps out of memory "
            f"({type(error).__name__}); correct its files or leave them out, or make --unit-bytes smaller"
        )


def named(number: int, unit: Unit) -> str:
    """Return a unit's number and its first files."""
    files = list(dict.fromkeys(part.path for part in unit.slices if part.path))
    more = [f"{len(files) - SHOWN:,} more"] if len(files) > SHOWN else []
    return f"unit {number} ({', '.join(files[:SHOWN] + more) or 'records of a data set'})"


def worker_functions() -> tuple[Callable[[Collection[str]], dict[str, str]], Callable[..., tuple[str, Any]]]:
    """Return a function that returns the versions of a process, and the one that a worker runs.

    They are nested functions, which Ray sends as code: a worker may have no jaxlm, or another one, and says so.
    """
    proved: list[bool] = []

    def versions(packages: Collection[str]) -> dict[str, str]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import pathlib
        import sys
        import unicodedata

        found = {"Python": ".".join(map(str, sys.version_info[:2])), "Unicode": unicodedata.unidata_version}
        for package in packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "none"
        spec = importlib.util.find_spec("jaxlm")
        digest = hashlib.sha256()
        for root in map(pathlib.Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(root.rglob("*.py")):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
        return found | {"jaxlm": "none" if spec is None else f"with code {digest.hexdigest()[:12]}"}

    def work(expected: dict[str, str], common: list[Any], number: int, unit: tuple[Any, ...]) -> tuple[str, Any]:
        import socket
        import sys

        if not proved:
            own = versions([name for name in expected if name not in ("Python", "Unicode", "jaxlm")])
            for name, value in expected.items():
                if own[name] != value:
                    where = f"the worker on {socket.gethostname()} ({sys.executable})"
                    return "input", f"{where} must have {name} {value} like this process, got {own[name]}; install it"
            proved.append(True)
        from jaxlm.data.ray_engine import encoded

        return encoded(common, number, unit)

    return versions, work


def encoded(common: list[Any], number: int, fields: tuple[Any, ...]) -> tuple[str, Any]:
    """Make the shard of a unit in a worker, and return its counts."""
    import ray

    job, directory = ray.get(common[0])
    host = socket.gethostname()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _end_with_node()
    try:
        if os.path.isdir(directory) or not is_url(job.shards):  # all paths may be URLs
            os.chdir(directory)
        tokenizer = _tokenizer(job.tokenizer)
    except (OSError, InputError) as error:
        return "failed", f"worker on {host}: {one_line(error)}; all machines must see {directory} and {job.tokenizer}"
    source, slices, size, documents = fields
    parts = (Slice(file and Entry(*file), begin, end) for file, begin, end in slices)
    unit = Unit(source, tuple(parts), size, documents)
    kind, value = answer(job, tokenizer, number, unit)
    return kind, vars(value) if isinstance(value, Shard) else value


@functools.cache
def _end_with_node() -> None:
    """Let this worker end with its node, which Ray's workers may survive for a minute."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.lru_cache(1)
def _tokenizer(place: str) -> Tokenizer:
    return saved_tokenizer(place)
