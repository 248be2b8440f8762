"""A stand-in for Cloud TPUs, for tests of launch/tpu_pod.sh: `gcloud`, and `sleep` and `date` by a clock of its own.

It is not a cloud. A worker is a folder that is $HOME for the commands sent to it, a bucket a folder, and a minute
passes when somebody sleeps for it. The programs on the launcher's PATH send their words to a `Cloud`, which lives in
the test: the test reads there what was asked for, and sets what the cloud plays.
"""

import itertools
import os
import re
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORKERS = 2  # of a node
STUB = """#!/usr/bin/env bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' $(($# + 1)) "${{0##*/}}" "$@" >&3
read -r code path <&3
[ ! -s "$path.out" ] || cat "$path.out"
[ ! -s "$path.err" ] || cat "$path.err" >&2
exit "$code"
"""


@dataclass
class Request:
    """A queued resource. `labels` are those of its nodes; the cloud knows whether a launcher of the test made it."""

    name: str
    kind: str
    nodes: list[str]
    labels: dict[str, str]
    multislice: bool = False
    state: str = "ACTIVE"
    foreign: bool = False

    def described(self) -> dict:
        spec: dict = {"node": {"acceleratorType": self.kind, "labels": self.labels}}
        if self.multislice:
            spec["multisliceParams"] = {"nodeCount": len(self.nodes), "nodeIdPrefix": self.nodes[0][:-2]}
        else:
            spec["nodeId"] = self.nodes[0]
        return {"state": {"state": self.state}, "tpu": {"nodeSpec": [spec]}}


@dataclass
class Cloud:
    """What is there, what was asked for, and what is to be played; `close` ends its processes."""

    root: Path
    clock: float = 1_800_000_000.0
    calls: list[list[str]] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)  # their states
    touched: list[str] = field(default_factory=list)  # what was done to somebody else's pod
    refusals: int = 0  # of the next requests
    failing: int = 0  # of the next requests, that many become FAILED
    unanswered: int = 0  # of the next requests, that many are made although gcloud says otherwise
    silent: int = 0  # after a request of which gcloud says otherwise, that many calls do not reach the cloud
    away: dict[str, int] = field(default_factory=dict)  # the next calls of a kind that do not reach the cloud
    dropped: int = 0  # of the next connections to workers
    undeletable: bool = False
    bystanders: set[int] = field(default_factory=set)  # processes that are nobody's job
    broken: dict[str, int] = field(default_factory=dict)  # the next commands to workers that end with 2, by first word
    tracebacks: list[str] = field(default_factory=list)  # of the stand-in itself
    before: Callable[[list[str]], None] = lambda words: None  # called with each call
    at_sleep: Callable[[], None] = lambda: None  # called when the launcher sleeps
    after_removal: Callable[[], None] = lambda: None  # called once, when a request was deleted

    def __post_init__(self):
        self.buckets, self.pods, self.replies = self.root / "buckets", self.root / "pods", self.root / "replies"
        for folder in (self.buckets, self.pods, self.replies, self.root / "programs", self.root / "on-workers"):
            folder.mkdir(parents=True)
        self.server = serve(self)
        for folder, programs in (("programs", ("gcloud", "sleep", "date")), ("on-workers", ("gcloud",))):
            for program in programs:
                stub = self.root / folder / program
                stub.write_text(STUB.format(port=self.server.server_address[1]))
                stub.chmod(0o755)
        # `hostname -I` of a worker, whose home is a folder worker-K.
        name = self.root / "on-workers" / "hostname"
        addresses = f"10.0.0.1 {self.address(0).rpartition('.')[0]}.$((${{HOME##*-}} + 1)) "
        name.write_text(f'#!/usr/bin/env bash\n[ "${{1:-}}" = -I ] && echo "{addresses}" || echo "${{HOME##*/}}"\n')
        name.chmod(0o755)
        # The Python that workers run, so that what they install does not depend on the machine of the test.
        python = self.root / "on-workers" / "python3.13"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)

    def address(self, worker: int) -> str:
        """Return an address of a worker, one of this machine that other clouds do not use."""
        port = self.server.server_address[1]
        return f"127.{port >> 8}.{port & 255}.{worker + 1}"

    def environment(self, programs: str) -> dict[str, str]:
        path = f"{self.root / programs}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "STAND_IN": str(self.root), "HOME": str(self.root)}

    def close(self) -> None:
        for node in self.nodes:
            self.kill(node)
        self.server.shutdown()
        self.server.server_close()

    # What the programs say

    def answer(self, program: str, words: list[str]) -> tuple[int, str, str]:
        """Return the exit code and what is written to standard output and standard error."""
        if program == "sleep":
            self.advance(float(words[0]))
            self.at_sleep()
            return 0, "", ""
        if program == "date":
            return (
                0,
                time.strftime(words[0][1:].replace("%s", str(int(self.clock))), time.gmtime(self.clock)) + "\n",
                "",
            )
        self.calls.append(words)
        if words[:3] == ["storage", "rsync", "--recursive"]:
            shutil.copytree(self.buckets / words[3].removeprefix("gs://"), words[4], dirs_exist_ok=True)
            return 0, "", ""
        if words[0] == "play":  # by the trainer
            getattr(self, words[1])(*words[2:])
            return 0, "", ""
        self.before(words)
        kind, verb = words[2], words[3]
        if self.away.get(kind, 0):
            self.away[kind] -= 1
            return 1, "", "ERROR: gcloud crashed (TransportError): Unable to find the server\n"
        return self.queued_resources(verb, words) if kind == "queued-resources" else self.tpu_vm(verb, words)

    def advance(self, seconds: float) -> None:
        self.clock += seconds
        time.sleep(0.01)  # for the processes, which have another clock

    def queued_resources(self, verb: str, words: list[str]) -> tuple[int, str, str]:
        name = words[4]
        request = self.requests.get(name)
        if verb == "create":
            if request:
                return 1, "", "ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS\n"
            if self.refusals:
                self.refusals -= 1
                return 1, "", "ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: quota\n"
            self.create(request_of(words))
            if self.unanswered:
                self.unanswered -= 1
                self.away["queued-resources"] = self.silent
                return 1, "", "ERROR: gcloud crashed (TransportError): Connection reset\n"
            return 0, "", ""
        if not request:
            return not_found()
        if verb == "describe":
            return 0, formatted(flag(words, "--format"), request.described()), ""
        if request.foreign:
            self.touched.append(f"{verb} {name}")
        if self.undeletable:
            return 1, "", "ERROR: (gcloud.compute.tpus.queued-resources.delete) INTERNAL\n"
        self.remove(name)
        return 0, "", ""

    def tpu_vm(self, verb: str, words: list[str]) -> tuple[int, str, str]:
        node = words[5].partition(":")[0] if verb == "scp" else words[4]
        if node not in self.nodes:
            return not_found()
        if verb == "describe":
            described = {"state": self.nodes[node], "networkEndpoints": [{"ipAddress": self.address(0)}]}
            return 0, formatted(flag(words, "--format"), described), ""
        if any(request.foreign and node in request.nodes for request in self.requests.values()):
            self.touched.append(f"{verb} {node}")
        if self.dropped or self.nodes[node] != "READY":
            self.dropped = max(0, self.dropped - 1)
            return 255, "", "ssh: connect to host: Connection timed out\n"
        homes = self.homes(node, flag(words, "--worker"))
        if verb == "scp":
            for home in homes:
                shutil.copy(words[4], home / words[5].partition(":")[2])
            return 0, "", ""
        return self.send(homes, flag(words, "--command"))

    def send(self, homes: list[Path], command: str) -> tuple[int, str, str]:
        """Run a command on workers, as ssh does."""
        first = command.split()[0]
        if self.broken.get(first, 0):
            self.broken[first] -= 1
            return 2, "", f"{first}: No space left on device\n"
        code, output, errors = 0, "", ""
        for home in homes:
            environment = self.environment("on-workers") | {"HOME": str(home)}
            done = subprocess.run(
                ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, check=False
            )
            code, output, errors = code or done.returncode, output + done.stdout, errors + done.stderr
        return code, output, errors

    # What happens in it

    def create(self, request: Request) -> None:
        request.state = "FAILED" if self.failing and not request.foreign else request.state
        self.requests[request.name] = request
        if request.state == "FAILED":
            self.failing -= 1
        elif request.state == "ACTIVE":
            self.provide(request)

    def provide(self, request: Request) -> None:
        """Make its nodes, with empty workers."""
        request.state = "ACTIVE"
        for node in request.nodes:
            self.nodes[node] = "READY"
            for home in self.homes(node):
                shutil.rmtree(home, ignore_errors=True)
                home.mkdir(parents=True)

    def remove(self, name: str) -> None:
        """Delete a request and its nodes."""
        for node in self.requests.pop(name).nodes:
            self.lose(node)
        act, self.after_removal = self.after_removal, lambda: None
        act()

    def lose(self, node: str) -> None:
        self.kill(node)
        self.nodes.pop(node, None)

    def kill(self, node: str, worker: str = "all") -> None:
        """End the processes of a job as a machine does that is switched off."""
        for pid in filter(None, map(self.trainer, self.homes(node, worker))):
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            self.wait(lambda pid=pid: not alive(pid))
        if (ray := self.root / "ray-pid").exists():  # of the head, in a process group of its own
            os.kill(int(ray.read_text()), signal.SIGKILL)
            ray.unlink()

    def trainer(self, home: Path) -> int | None:
        """Return the process of a worker's job, None where none runs."""
        for file in home.glob("jaxlm-pod/jobs/*/pid"):
            pid = int(file.read_text())
            if pid not in self.bystanders and not (file.parent / "exit").exists() and alive(pid):
                return pid
        return None

    def wait(self, condition: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
        """Wait for something that processes do, while `process` runs."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and (process is None or process.poll() is None)
            time.sleep(0.01)

    def homes(self, node: str, worker: str | None = "all") -> list[Path]:
        return [self.pods / node / f"worker-{k}" for k in range(WORKERS) if worker in ("all", str(k))]

    def preempt(self, name: str = "pod", state: str = "ACTIVE") -> None:
        """Take the nodes of a request away; ACTIVE leaves the request as it was, SUSPENDED removes the nodes."""
        request = self.requests[name]
        request.state = state
        for node in request.nodes:
            self.nodes[node] = "PREEMPTED"
            self.kill(node)
            if state == "SUSPENDED":
                del self.nodes[node]

    def reboot(self, node: str, worker: int, other: int) -> None:
        """Restart a worker: its files stay, its job is gone, and its pid is now the process `other`."""
        self.kill(node, str(worker))
        self.bystanders.add(other)
        for file in self.homes(node, str(worker))[0].glob("jaxlm-pod/jobs/*/pid"):
            file.write_text(f"{other}\n")
            (file.parent / "exit").unlink(missing_ok=True)

    def lose_sight(self) -> None:
        """Let the next calls for nodes not reach the cloud."""
        self.away = {"tpu-vm": 4}

    def verbs(self, *, without: tuple[str, ...] = ("describe",)) -> list[str]:
        """Return the calls in order: `create`, `ssh all start` …"""
        found = []
        for words in self.calls:
            if words[0] in ("storage", "play"):
                found += ["rsync"] * (words[0] == "storage")
                continue
            verb = words[3]
            if verb == "ssh":
                sent = words[words.index("--command") + 1].split()
                what = sent[1] if sent[0].endswith("pod_worker.sh") else sent[0]
                verb = f"ssh {words[4]}/{words[words.index('--worker') + 1]} {what}"
            found.append(verb)
        return [verb for verb in found if verb not in without]


def request_of(words: list[str]) -> Request:
    """Return what the words of `queued-resources create` ask for."""
    count = int(flag(words, "--node-count", "0"))
    nodes = [f"{flag(words, '--node-prefix')}-{k}" for k in range(count)] or [flag(words, "--node-id")]
    labels = dict(pair.split("=") for pair in flag(words, "--labels", "").split(",") if pair)
    return Request(words[4], flag(words, "--accelerator-type"), nodes, labels, multislice=bool(count))


def flag(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def formatted(wanted: str, described: dict) -> str:
    """Return fields of a description as gcloud's format `value` does: `value[separator=","](state.state,name)`."""
    separator, fields = re.fullmatch(r'value(?:\[separator="(.)"\])?\((.*)\)', wanted).groups()
    found = []
    for path in fields.split(","):
        value = described
        for key, index in re.findall(r"(\w+)(?:\[(\d)\])?", path):
            value = (value or {}).get(key)
            value = value[int(index)] if value and index else value
        found.append("" if value is None else str(value))
    return (separator or "\t").join(found) + "\n"


def not_found() -> tuple[int, str, str]:
    return 1, "", "ERROR: (gcloud.compute.tpus) NOT_FOUND: Resource was not found\n"


def alive(pid: int) -> bool:
    """Tell whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def serve(cloud: Cloud) -> socketserver.ThreadingTCPServer:
    """Answer the programs, each call in a thread of its own."""

    numbers = itertools.count()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            words, count = [], None
            rest = b""
            while count is None or len(words) < count:
                received = self.request.recv(65536)
                if not received:
                    return
                *whole, rest = (rest + received).split(b"\0")
                words += [word.decode() for word in whole]
                if count is None and words:
                    count = int(words.pop(0))
            try:
                code, output, errors = cloud.answer(words[0], words[1:])
            except Exception:
                cloud.tracebacks.append(traceback.format_exc())
                code, output, errors = 2, "", ""
            reply = cloud.replies / str(next(numbers))
            reply.with_suffix(".out").write_text(output)
            reply.with_suffix(".err").write_text(errors)
            try:
                self.wfile.write(f"{code} {reply}\n".encode())
            except (BrokenPipeError, ConnectionResetError):
                pass  # of a launcher that was killed

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 64

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server
