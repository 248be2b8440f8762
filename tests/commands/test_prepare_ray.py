"""jaxlm.prepare --engine ray, with Ray's own processes: the bytes of one local process, whatever happens to them.

Workers run a hook that ends or stops them when they open a file of a certain name; the command itself does not.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from toy_store import contents
from toy_text import write_books

from jaxlm.data.preparation import PrepareConfig, prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, the extra [ray]"),
]
ROOT = Path(__file__).resolve().parents[2]
RAY = re.compile("ray::|.*/jaxlm-ray-")  # command lines of a cluster on this machine
HOOK = """
import os, signal, sys, time
def hook(event, arguments):
    path = str(arguments[0]) if event == "open" else ""
    if not path.endswith((".once", ".slow", ".poison")):
        return
    seen = os.path.join(os.path.dirname(path), "..", os.path.basename(path) + "-seen")
    is_first = not os.path.exists(seen)
    os.close(os.open(seen, os.O_CREAT))
    if path.endswith(".slow") and is_first:
        time.sleep(600)
    elif path.endswith(".poison") or is_first:
        os.kill(os.getpid(), signal.SIGKILL)
if any("default_worker" in word for word in sys.orig_argv):
    sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def hooks(tmp_path_factory):
    """Environment of a process whose workers run the hook."""
    directory = tmp_path_factory.mktemp("hooks")
    (directory / "sitecustomize.py").write_text(HOOK)
    return os.environ | {"PYTHONPATH": f"{directory}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}


def corpus_of(*endings: str) -> PrepareConfig:
    """Write books with these endings, some 15 units, and the store that one local process makes of them."""
    write_books(40 + 30 * k for k in range(3))
    for k, ending in enumerate(endings):
        Path(f"books/{k}.txt").rename(f"books/{k}.{ending}")
    config = PrepareConfig(("lines:books/*",), "words:200", "store", workers=1, unit_bytes=1500)
    prepare(replace(config, output="whole"))
    return config


@pytest.fixture(scope="module")
def cluster(hooks, tmp_path_factory):
    """A cluster with a token, and what a driver needs: the engine and its environment."""
    environment = hooks | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # its address is 127.0.0.1
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, other = first.getsockname()[1], second.getsockname()[1]
    words = f"start --head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 2 --include-dashboard false"
    words += f" --ray-client-server-port {other} --object-store-memory 80000000 --disable-usage-stats"
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words.split()],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    wait_for(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None, 300)
    assert head.poll() is None, log.read_text()
    yield f"ray:127.0.0.1:{port}", environment
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)


def start(config: PrepareConfig, engine: str, environment: dict[str, str]) -> subprocess.Popen:
    """Start the command with an engine in a process of its own."""
    words = ["--source", *config.source, "--tokenizer", config.tokenizer, "--output", config.output]
    words += ["--unit-bytes", config.unit_bytes, "--workers", 2, "--engine", engine]
    command = [sys.executable, "-m", "jaxlm.prepare", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(list(map(str, command)), env=environment, text=True, stdout=pipe, stderr=pipe)


def ended(process: subprocess.Popen) -> tuple[int, str, list[str]]:
    """Return exit code, output and the lines of standard error without those of the progress."""
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, [line for line in errors.splitlines() if not line.startswith("kB  ")]


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until_a_worker_sleeps(process: subprocess.Popen) -> None:
    wait_for(lambda: (Path("2.slow-seen").exists() and joined() > 0) or process.poll() is not None, 300)
    assert process.poll() is None, process.communicate()


def joined() -> int:
    """Return the number of units that the unfinished store has."""
    file = Path("store.partial/writer.json")
    return json.loads(file.read_text())["parts"] if file.exists() else 0


def commands() -> dict[int, str]:
    """Return the command line of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def test_a_cluster_on_this_machine(tmp_path, monkeypatch, hooks):
    """Fails if a killed command leaves a process or loses a shard, or a killed worker changes a byte."""
    monkeypatch.chdir(tmp_path)
    config, before = corpus_of("txt", "once", "slow"), set(commands())
    first = start(config, "ray", hooks)
    wait_until_a_worker_sleeps(first)
    first.kill()
    first.communicate()
    # Workers end at once, Ray's own processes after the minute in which they look for their cluster.
    wait_for(lambda: not [pid for pid, line in commands().items() if pid not in before and line[:9] == "ray::work"], 20)
    wait_for(lambda: not [pid for pid, line in commands().items() if pid not in before and RAY.match(line)], 150)
    assert Path("1.once-seen").exists(), "a worker was killed, and its unit made by another one"
    code, output, errors = ended(start(config, "ray", hooks))
    assert code == 0 and not errors, errors
    assert "continuing: " in output
    assert contents(Path("store")) == contents(Path("whole")) and not Path("store.partial").exists()


def test_a_unit_that_ends_each_worker_is_named(tmp_path, monkeypatch, cluster):
    """Fails if Ray repeats such a unit for ever, the message does not say which file, or other units are lost."""
    monkeypatch.chdir(tmp_path)
    config = corpus_of("txt", "poison", "txt")
    code, output, errors = ended(start(config, *cluster))
    assert code == 1 and len(errors) == 1, errors
    assert "(books/1.poison" in errors[0] and ") ended its worker 3 times" in errors[0] and "raylet" not in output
    Path("books/1.poison").rename("books/1.once")  # another plan: the names are part of it
    shutil.rmtree("store.partial")
    code, _, errors = ended(start(config, *cluster))
    assert code == 0 and not errors
    assert contents(Path("store")) == contents(Path("whole"))


def test_a_stopped_command_continues(tmp_path, monkeypatch, cluster):
    """Fails if Ctrl-C leaves a worker running on the cluster, or the same command begins again."""
    monkeypatch.chdir(tmp_path)
    config = corpus_of("txt", "txt", "slow")
    first = start(config, *cluster)
    wait_until_a_worker_sleeps(first)
    first.send_signal(signal.SIGINT)
    code, _, errors = ended(first)
    assert code == 75 and errors == ["stopped; finished shards are kept; rerun the same command to resume"]
    wait_for(lambda: not [line for line in commands().values() if line.startswith("ray::work")], 60)
    code, output, errors = ended(start(config, *cluster))
    assert code == 0 and not errors and "continuing: " in output
    assert contents(Path("store")) == contents(Path("whole"))


def test_workers_with_other_code_and_drivers_without_a_token_are_refused(tmp_path, monkeypatch, cluster):
    """Fails if a worker of another version would encode, or the cluster is open to whoever has no token."""
    monkeypatch.chdir(tmp_path)
    config, (engine, environment) = corpus_of(), cluster
    shutil.copytree(ROOT / "jaxlm", "other/jaxlm", ignore=shutil.ignore_patterns("__pycache__"))
    with Path("other/jaxlm/wording.py").open("a") as file:
        file.write("# A comment.\n")
    code, _, errors = ended(start(config, engine, environment | {"PYTHONPATH": str(tmp_path / "other")}))
    assert code == 2 and len(errors) == 1 and "must have jaxlm with code " in errors[0], errors
    without = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"} | {"HOME": str(tmp_path)}
    code, _, errors = ended(start(config, engine, without))
    assert code == 1 and len(errors) == 1 and "no authentication token was found" in errors[0], errors
