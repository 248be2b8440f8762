"""One of several processes ends, and the others: they name it and stop in time, whatever they are waiting for.

Fails when a process waits in a barrier for one that is gone, ends without saying which it is, or takes one that is only
slow for dead.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import REPOSITORY
from toy_processes import free_port, joined, run_several, start_several
from toy_runs import (
    Ended,
    Process,
    assert_one_line,
    checkpoints,
    make_stores,
    metrics,
    newest_step,
    pretrain_arguments,
    run_here,
    starts,
)

from jaxlm.distributed.watchdog import GONE_AFTER, OWN_END

pytestmark = [pytest.mark.slow, pytest.mark.versions]
LOST = r"failed: worker {} was lost (\d+) s ago: killed, or its machine was taken away; all processes stop; .*"

PROGRAM = """
import os, signal, sys, time
import numpy as np
import jaxlm
from jax.experimental import multihost_utils
from jaxlm.errors import RunError, run_command
from jaxlm.distributed import watchdog
from jaxlm.distributed.processes import DistributedConfig, start_processes

port, number, what, silence = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
watchdog.GONE_AFTER = silence

def main():
    start_processes(DistributedConfig(f"localhost:{port}", 2, number))
    with watchdog.watching():
        multihost_utils.sync_global_devices("joined")
        open(f"joined-{number}", "w").close()
        exec(what)
    print("finished", flush=True)

run_command(main)
"""


@dataclass(frozen=True)
class Pair:
    """How two joined processes of one device each ended that ran PROGRAM, and seconds from their start to their end."""

    ends: list[Ended]
    seconds: list[float]


def run_pair(
    directory: Path, what: str, *, silence: int = GONE_AFTER, before: str = "", inside: Sequence[str] = ()
) -> Pair:
    """Run PROGRAM twice with a statement in it. before: what their shell does first; inside: what the shell runs in."""
    one = f'\'{sys.executable}\' -c "$PROGRAM" {free_port()} $n "$WHAT" {silence} >out-$n 2>err-$n; echo $? >code-$n'
    script = f"{before}\nfor n in 0 1; do ({one}) & done; wait"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": str(REPOSITORY),
        "PROGRAM": PROGRAM,
        "WHAT": what,
    }
    subprocess.run([*inside, "bash", "-c", script], cwd=directory, env=environment, check=True, timeout=120)
    read = lambda name: (directory / name).read_text()  # noqa: E731
    ends = [Ended(int(read(f"code-{n}")), read(f"out-{n}"), read(f"err-{n}")) for n in range(2)]
    changed = lambda name: (directory / name).stat().st_mtime  # noqa: E731
    return Pair(ends, [changed(f"code-{n}") - changed(f"joined-{n}") for n in range(2)])


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


def assert_ends(process, within: float, line: str) -> re.Match:
    """It ends with 1 within so many seconds from now, and a line on standard error says why."""
    began = time.monotonic()
    ended = process.ended()
    took = time.monotonic() - began
    assert ended.code == 1, ended
    found = re.search(rf"^{line}$", ended.errors, re.MULTILINE)
    assert found, ended.errors
    assert took < within, (took, ended.errors)
    return found


def test_a_killed_worker_is_named_at_once(stores, tmp_path):
    run = tmp_path / "run"
    first, second = start_several(
        "pretrain", *pretrain_arguments(run, stores, "--num-steps", 5000), log=tmp_path / "log"
    )
    first.until(lambda: newest_step(run) >= 5, "step 5")
    second.kill()
    worker = rf"1 \(process {second.process.pid} on \S+\)"
    assert int(assert_ends(first, 10, LOST.format(worker))[1]) <= 1
    assert "Check failure stack trace" not in first.errors.read_text()


@pytest.mark.campaign  # the loss of a coordinator and other numbers of processes have tests of their own
def test_four_workers_lose_the_coordinator_and_two_go_on(stores, tmp_path):
    """Fails when the runtime's abort comes first, or when what four had saved is not what two go on with."""
    steps = ("--num-steps", 30, "--checkpoint-every", 5)
    assert run_here("pretrain", *pretrain_arguments(tmp_path / "whole", stores, *steps)).code == 0
    run = tmp_path / "run"
    processes = start_several("pretrain", *pretrain_arguments(run, stores, *steps), log=tmp_path / "log", count=4)
    processes[0].until(lambda: checkpoints(run), "a checkpoint")
    processes[0].kill()
    for process in processes[1:]:
        assert_ends(process, 10, LOST.format("0, the coordinator,"))
    ends = run_several("pretrain", *pretrain_arguments(run, stores, *steps), log=tmp_path / "again")
    assert [ended.code for ended in ends] == [0, 0], ends
    assert starts(run)[-1]["started_from"].startswith("resumed at step ")
    found, expected = metrics(run), metrics(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(expected[step], rel=1e-5) for step in expected)


@pytest.mark.parametrize("number", [0, 1])
def test_a_process_whose_neighbour_never_comes_says_so(number):
    """Fails when the runtime's abort, a signal and pages of C++, is all that a user sees."""
    program = f"""
from jaxlm.distributed import processes
processes.JOIN_WITHIN = 3
processes.start_processes(processes.DistributedConfig("localhost:{free_port()}", 2, {number}))"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert_one_line(
        Ended(ended.returncode, ended.stdout, ended.stderr),
        1,
        "failed: not all 2 processes joined at localhost:",
        "3 s",
    )


def test_a_store_that_one_machine_lacks_is_told_by_all(stores, tmp_path):
    """Fails when an input error of one leaves the others waiting in the runtime's barrier."""
    port, processes = free_port(), []
    for number, store in enumerate((stores[0], tmp_path / "nowhere")):
        arguments = [*pretrain_arguments(tmp_path / "run", (store, stores[1])), *joined(port, 2, number)]
        processes.append(Process("pretrain", *arguments, log=tmp_path / str(number)))
    second = processes[1].ended()
    assert_one_line(second, 2, "error: ", str(tmp_path / "nowhere"))
    worker = rf"worker 1 \(process {processes[1].process.pid} on \S+\)"
    assert_ends(processes[0], 10, rf"failed: {worker} failed \d s ago: InputError: .*nowhere.*; all processes stop; .*")


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_ends_both(tmp_path, number):
    """Fails when the other, in a collective, is not told, or is aborted by the end of the coordinator."""
    what = f"""
if number == {number}: raise ValueError("a ball")
time.sleep(100)"""
    pair = run_pair(tmp_path, what)
    failed, other = pair.ends[number], pair.ends[1 - number]
    assert failed.code == other.code == 1, pair
    assert failed.errors.endswith("ValueError: a ball\n") and "Traceback" in failed.errors
    said = other.errors.splitlines()[-1]
    assert re.fullmatch(
        rf"failed: worker {number} \(.*\) failed {OWN_END} s ago: ValueError: a ball; all processes stop; .*", said
    )
    assert max(pair.seconds) < OWN_END + 5, pair


def test_a_collective_that_breaks_is_not_taken_for_the_cause(tmp_path):
    """Fails when the survivor of a kill reports its own broken collective."""
    what = """
if number == 1:
    while not os.path.exists("joined-0"): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
multihost_utils.process_allgather(np.ones(3))"""
    survivor = run_pair(tmp_path, what).ends[0]
    assert survivor.code == 1 and re.search(f"^{LOST.format(r'1 .*')}$", survivor.errors.splitlines()[-1]), survivor


def test_what_all_raise_each_says(tmp_path):
    pair = run_pair(tmp_path, "time.sleep(number); raise RunError('the loss is not finite')")
    for ended in pair.ends:
        assert ended.code == 1 and ended.errors == "failed: the loss is not finite\n", pair


def test_a_worker_that_is_slow_is_not_dead(tmp_path):
    """Fails when life is told by the program and not by its kernel: one is stopped for longer than GONE_AFTER."""
    what = """
pids = multihost_utils.process_allgather(np.int32(os.getpid()))
if number == 1: os.kill(os.getpid(), signal.SIGSTOP)
else: time.sleep(9); os.kill(int(pids[1]), signal.SIGCONT)
multihost_utils.process_allgather(np.ones(3))"""
    pair = run_pair(tmp_path, what, silence=6)
    assert [ended.code for ended in pair.ends] == [0, 0] and min(pair.seconds) > 8.5, pair
    assert all("finished" in ended.output for ended in pair.ends), pair


def test_a_machine_that_vanishes_is_noticed(tmp_path):
    """Their network is taken away, so that no connection ends."""
    inside = ["unshare", "--map-root-user", "--net"]
    try:
        if subprocess.run([*inside, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=20).returncode:
            pytest.skip("no right to a network of one's own here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    before = """ip link set lo up
(until [ -e joined-0 ] && [ -e joined-1 ]; do sleep 0.1; done; ip link set lo down) &"""
    pair = run_pair(tmp_path, "time.sleep(100)", silence=6, before=before, inside=inside)
    for ended, worker in zip(pair.ends, (r"1 \(process \d+ on \S+\)", "0, the coordinator,"), strict=True):
        line = ended.errors.splitlines()[-1]
        found = re.fullmatch(LOST.format(worker), line)
        assert ended.code == 1 and found and found[1] == "6", pair
    assert max(pair.seconds) < 6 + 4, pair
