"""Several processes: two of two devices each train the run that one of eight trains, and a run changes hands.

Fails when a process feeds other rows, logs what is process 0's to log, or is left waiting when its neighbour stops.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from paths import REPOSITORY
from toy_processes import free_port, joined, run_several, start_several
from toy_runs import (
    assert_one_line,
    bert_arguments,
    checkpoints,
    copy_at,
    finetune_arguments,
    make_pair_stores,
    make_stores,
    make_task,
    metrics,
    newest_step,
    pretrain_arguments,
    run_here,
    run_process,
    starts,
)
from xla_flags import xla_flags

from jaxlm.runs.metrics_log import read_metrics

pytestmark = pytest.mark.slow
STEPS = ("--num-steps", 12, "--checkpoint-every", 4)
LONG = "--num-epochs 12 --eval-every 30 --checkpoint-every 30".split()  # 60 steps


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def one(tmp_path_factory, stores):
    """One process of eight devices: 12 steps, a checkpoint every 4."""
    run = tmp_path_factory.mktemp("one") / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *STEPS))
    assert ended.code == 0, ended.errors
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory, stores):
    """The same with two processes of two, and how they ended."""
    directory = tmp_path_factory.mktemp("two")
    return directory / "run", run_several(
        "pretrain", *pretrain_arguments(directory / "run", stores, *STEPS), log=directory / "log"
    )


def assert_near(found: dict[int, float], expected: dict[int, float], relative: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for step, value in expected.items():
        assert found[step] == pytest.approx(value, rel=relative, abs=0), step


@pytest.mark.versions
def test_two_processes_train_as_one(one, two):
    run, ends = two
    assert [ended.code for ended in ends] == [0, 0], ends
    assert_near(metrics(run), metrics(one))
    assert_near(metrics(run, "gradient_norm"), metrics(one, "gradient_norm"), 1e-4)
    assert_near(metrics(run, "validation_loss"), metrics(one, "validation_loss"), 1e-6)
    assert metrics(run, "tokens") == metrics(one, "tokens")
    assert checkpoints(run) == [4, 8, 12]


def test_two_processes_train_a_bert_as_one(tmp_path):
    """Fails when a process feeds other pairs, masks of its own, or another share of the held-out ones."""
    stores = make_pair_stores(tmp_path)
    steps = ("--num-steps", 6, "--length", 32)
    assert run_here("pretrain", *bert_arguments(tmp_path / "one", stores, *steps)).code == 0
    ends = run_several("pretrain", *bert_arguments(tmp_path / "two", stores, *steps), log=tmp_path / "log")
    assert [ended.code for ended in ends] == [0, 0], ends
    one, two = tmp_path / "one", tmp_path / "two"
    for name in ("loss", "masked_lm_loss", "next_sentence_loss"):
        assert list(metrics(two, name)) == list(range(1, 7))
        assert_near(metrics(two, name), metrics(one, name))
    for name in ("masked_lm_loss", "next_sentence_loss", "next_sentence_accuracy"):
        found, expected = metrics(two, f"validation_{name}"), metrics(one, f"validation_{name}")
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[6] == pytest.approx(expected[6], rel=1e-5)


def test_only_the_first_process_logs(two):
    run, (first, second) = two
    assert "step 12/12" in first.errors
    # What remains is the library's, whose C++ threads write across one another.
    gloo = r"\[Gloo\]|Rank|is connected to|peer ranks\.?|Expected number of connected|is|[\d\s:]+"
    assert second.errors == "" and re.sub(gloo, "", second.output) == "", (second.output, second.errors)
    assert len(list((run / "tensorboard").glob("events*"))) == 1
    (start,) = starts(run)
    assert start["devices"]["processes"] == 2 and start["devices"]["count"] == 4


def test_one_device_goes_on_with_what_eight_began(one, stores, tmp_path):
    run = copy_at(one, 8, tmp_path / "run")
    ended = run_process("pretrain", *pretrain_arguments(run, stores, *STEPS), log=tmp_path / "log")
    assert ended.code == 0, ended.errors
    assert starts(run)[-1]["devices"]["count"] == 1
    assert_near(metrics(run), metrics(one))


def test_two_processes_select_end_early_and_sample_as_one(stores, tmp_path):
    """Fails if a process keeps other parameters, goes on alone, or waits where the other writes a sample."""
    words = ("--num-steps", 12, "--eval-every", 2, "--checkpoint-every", 4, "--select", "best", "--patience", 1)
    words += ("--optimizer.peak-lr", 3.0, "--sample-every", 2, "--sample-prompt", "the cat")  # the loss soon rises
    runs = [tmp_path / "one", tmp_path / "two"]
    ended = run_here("pretrain", *pretrain_arguments(runs[0], stores, *words))
    assert ended.code == 0, ended.errors
    ends = run_several("pretrain", *pretrain_arguments(runs[1], stores, *words), log=tmp_path / "log")
    assert [ended.code for ended in ends] == [0, 0], ends
    last = [checkpoints(run)[-1] for run in runs]
    assert last[0] == last[1] < 12
    assert_near(metrics(runs[1], "validation_loss"), metrics(runs[0], "validation_loss"), 1e-4)
    samples = [[line for line in read_metrics(run / "metrics.jsonl") if "sample" in line] for run in runs]
    assert samples[0] and [line["step"] for line in samples[0]] == [line["step"] for line in samples[1]]
    again = run_here("pretrain", *pretrain_arguments(runs[1], stores, *words))
    assert again.code == 0 and "is complete" in again.output, again


STALE = """
import runpy, sys
from jaxlm.runs.checkpoints import Checkpoints

if sys.argv[-1] == "1":
    Checkpoints.steps = lambda self: []
runpy.run_module("jaxlm.pretrain", run_name="__main__", alter_sys=True)
"""


def test_a_process_with_a_stale_listing_goes_on_with_the_other(one, stores, tmp_path):
    """Process 1 sees no checkpoint, as a shared file system may show it. Fails if it begins while the other resumes."""
    run = copy_at(one, 8, tmp_path / "run")
    port = free_port()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(2),
        "PYTHONPATH": str(REPOSITORY),
    }
    for turn in ("resumed", "complete"):
        words = [str(word) for word in pretrain_arguments(run, stores, *STEPS)]
        commands = [[sys.executable, "-c", STALE, *words, *map(str, joined(port, 2, number))] for number in range(2)]
        with contextlib.ExitStack() as stack:
            processes = []
            for number, command in enumerate(commands):
                output = stack.enter_context((tmp_path / f"{turn}-{number}").open("w"))
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
                stack.callback(processes[-1].kill)
            assert [process.wait(120) for process in processes] == [0, 0], (tmp_path / f"{turn}-0").read_text()
    assert starts(run)[-1]["started_from"] == "resumed at step 8" and checkpoints(run)[-1] == 12
    assert_near(metrics(run), metrics(one))
    assert "is complete" in (tmp_path / "complete-0").read_text()


@pytest.mark.versions
def test_eight_devices_then_four_then_two_processes_of_four(one, stores, tmp_path):
    """Fails when the order of the rows, dropout or the optimizer's state depend on the devices, or when several
    processes cannot go on with what one began. From data to fsdp x tensor; four steps each."""
    four = copy_at(one, 4, tmp_path / "four")
    mesh = "--mesh.data 1 --mesh.fsdp 2 --mesh.tensor 2".split()
    ended = run_process("pretrain", *pretrain_arguments(four, stores, *STEPS, *mesh), log=tmp_path / "log-4", devices=4)
    assert ended.code == 0, ended.errors
    two = copy_at(four, 8, tmp_path / "two")
    mesh = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2".split()
    ends = run_several("pretrain", *pretrain_arguments(two, stores, *STEPS, *mesh), log=tmp_path / "log", devices=4)
    assert [ended.code for ended in ends] == [0, 0], ends
    for run, start in ((four, 4), (two, 8)):
        assert starts(run)[-1]["started_from"] == f"resumed at step {start}"
        assert_near(metrics(run), metrics(one))
        assert_near(metrics(run, "validation_loss"), metrics(one, "validation_loss"))
    assert starts(two)[-1]["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def tuned(one, tmp_path_factory):
    """The same fine-tuning by one process and by two; 13 and 7 rows are no multiple of eight devices."""
    directory = tmp_path_factory.mktemp("tuned")
    task = make_task(directory / "task")
    runs = [directory / "one", directory / "two"]
    arguments = [finetune_arguments(run, task, "--start", one) for run in runs]
    assert run_here("finetune", *arguments[0]).code == 0
    ends = run_several("finetune", *arguments[1], log=directory / "log")
    assert [ended.code for ended in ends] == [0, 0], ends
    return task, runs


def figures_near(found: Any, expected: Any) -> None:
    """The same JSON, its numbers within 1e-4, without speeds and hashes of what differs in its last bits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"sha256", "predictions_sha256", "tokens_per_second"}:
            figures_near(found[name], expected[name])
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            figures_near(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert found == expected


def test_two_processes_fine_tune_as_one(tuned):
    """Fails when rows are lost, doubled or mixed up where processes share a batch that is not full."""
    _, (one, two) = tuned
    figures_near(json.loads((two / "results.json").read_text()), json.loads((one / "results.json").read_text()))
    assert_near(metrics(two), metrics(one), 1e-4)
    lines = [[json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()] for run in tuned[1]]
    assert len(lines[0]) == 13 + 7
    figures_near(lines[1], lines[0])


@pytest.mark.parametrize("what", ["perplexity", "task", "features"])
def test_two_processes_evaluate_as_one(what, one, tuned, stores, tmp_path):
    task, (run, _) = tuned
    words = {
        "perplexity": ["--run", one, "--input", task / "dev.tsv", "--weights", "raw"],
        "features": ["--run", one, "--input", task / "dev.tsv", "--pooling", "mean"],
        "task": ["--run", run, "--input", task / "dev.tsv"],
    }[what]
    files = [tmp_path / name for name in ("one.json", "two.json")]
    alone = run_here("evaluate", what, *words, "--output", files[0])
    assert alone.code == 0, alone.errors
    first, second = run_several("evaluate", what, *words, "--output", files[1], log=tmp_path / "log")
    assert first.code == second.code == 0, (first, second)
    last = [json.loads(ended.output.splitlines()[-1]) | {"output": ""} for ended in (first, alone)]
    figures_near(*last)
    written = [[json.loads(line) for line in file.read_text().splitlines()] for file in reversed(files)]
    assert len(written[0]) == {"perplexity": 1, "task": 13, "features": 14}[what]
    figures_near(*written)


@pytest.mark.versions
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_sigterm_to_one_process_stops_all_at_the_same_step(stores, tmp_path, count):
    run = tmp_path / "run"
    arguments = pretrain_arguments(run, stores, "--num-steps", 5000, "--checkpoint-every", 1000)
    processes = start_several("pretrain", *arguments, log=tmp_path / "log", count=count)
    processes[0].until(lambda: newest_step(run) >= 5, "step 5")
    processes[-1].process.send_signal(signal.SIGTERM)  # not the coordinator
    ends = [process.ended() for process in processes]
    assert [ended.code for ended in ends] == [75] * count, ends
    (said,) = {ended.errors.splitlines()[-1] for ended in ends}
    stopped = re.fullmatch(r"stopped at step (\d+) of 5000, saved; rerun the same command to resume", said)
    assert stopped and checkpoints(run) == [int(stopped[1])], said
    assert list(metrics(run)) == list(range(1, int(stopped[1]) + 1))


def test_fine_tuning_that_two_processes_began_and_one_ended_is_that_of_one(one, tmp_path):
    """They are stopped in the second seed, by SIGINT to process 0."""
    task = make_task(tmp_path / "task")

    def arguments(run):
        return finetune_arguments(tmp_path / run, task, "--start", one, "--seeds", 2, *LONG)

    assert run_here("finetune", *arguments("one")).code == 0
    processes = start_several("finetune", *arguments("two"), log=tmp_path / "log", devices=1)

    def in_the_second_seed() -> bool:
        file = tmp_path / "two" / "metrics.jsonl"
        return file.exists() and any(line["seed"] == 1 and line["step"] >= 1 for line in read_metrics(file))

    processes[0].until(in_the_second_seed, "the second seed")
    processes[0].process.send_signal(signal.SIGINT)
    ends = [process.ended() for process in processes]
    assert [ended.code for ended in ends] == [75, 75], ends
    assert metrics(tmp_path / "two", seed=1).keys() == set(range(1, max(metrics(tmp_path / "two", seed=1)) + 1))
    assert max(metrics(tmp_path / "two", seed=1)) < 60
    ended = run_here("finetune", *arguments("two"))
    assert ended.code == 0 and "resumed at step" in ended.errors, ended.errors
    lines = [(tmp_path / run / "predictions.jsonl").read_text().splitlines() for run in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 2 * (13 + 7)
    for line, expected in zip(*lines, strict=True):
        found, wanted = json.loads(line), json.loads(expected)
        assert [found[name] for name in ("split", "index", "seed")] == [
            wanted[name] for name in ("split", "index", "seed")
        ]
    for seed in (0, 1):  # 60 steps, so that the signal comes in time; the first twenty are held to the bound
        found, expected = (metrics(tmp_path / run, seed=seed) for run in ("two", "one"))
        assert found.keys() == expected.keys() == set(range(1, 61))
        first = range(1, 21)
        assert_near({step: found[step] for step in first}, {step: expected[step] for step in first}, 1e-4)


def test_an_error_of_one_process_reaches_both(one, stores, tmp_path):
    ends = run_several("pretrain", *pretrain_arguments(one, stores, *STEPS, "--seed", 3), log=tmp_path / "log")
    for ended in ends:
        assert "seed: 0 -> 3" in assert_one_line(ended, 2)


@pytest.mark.parametrize(
    "coordinator, more, said",
    [
        ("localhost:1", (), "must be given together"),
        ("localhost", ("--distributed.num-processes", 2, "--distributed.process-id", 0), "HOST:PORT"),
        (
            "localhost:1",
            ("--distributed.num-processes", 2, "--distributed.process-id", 2),
            "--distributed.process-id must be from 0 to 1 for 2 processes, got 2",
        ),
    ],
)
def test_flags_that_cannot_join_are_one_line(stores, tmp_path, coordinator, more, said):
    arguments = pretrain_arguments(tmp_path / "run", stores, "--distributed.coordinator", coordinator, *more)
    assert_one_line(run_here("pretrain", *arguments), 2, said)


def test_a_port_that_is_taken_is_said(stores, tmp_path):
    """Fails when the runtime's error reaches the user as a traceback; it writes a line of its own as well."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        arguments = pretrain_arguments(tmp_path / "run", stores, *joined(taken.getsockname()[1], 2, 0))
        ended = run_process("pretrain", *arguments, log=tmp_path / "log")
    assert ended.code == 2 and "Traceback" not in ended.errors, ended.errors
    assert "must be a free port of process 0" in ended.errors.splitlines()[-1]


@pytest.mark.parametrize("saves, code", [(True, 0), (False, -signal.SIGTERM)])
def test_sigterm_ends_only_a_process_that_has_nothing_to_save(saves, code):
    """Fails when an evaluation of several processes swallows SIGTERM, or training dies of it instead of being asked."""
    program = f"""
import os, signal, time
from jaxlm.distributed.processes import DistributedConfig, start_processes

start_processes(DistributedConfig("localhost:{free_port()}", 1, 0), saves={saves})
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == code
