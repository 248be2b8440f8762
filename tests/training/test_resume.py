"""Resuming: a run that is stopped and killed again and again ends as one that never was, bit for bit.

Fails when anything random, any order or any moment of a save depends on where a process began: a metrics line that
comes twice, a loss or a leaf that differs in its last bit, an exit code that a script cannot rely on.
"""

import fcntl
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from toy_runs import (
    Ended,
    Process,
    assert_one_line,
    checkpoints,
    checksums,
    copy_at,
    flip_bytes,
    make_stores,
    metrics,
    newest_step,
    pretrain_arguments,
    run_here,
    run_process,
    starts,
)

pytestmark = pytest.mark.usefixtures("two_devices")

STEPS = 100
SAVES = ("--num-steps", STEPS, "--checkpoint-every", 5, "--eval-every", 20)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


class Stops:
    """One run of 100 steps that is stopped by SIGTERM and SIGINT and killed twice, and how each start ended."""

    def __init__(self, directory: Path, stores: tuple[Path, Path]) -> None:
        self.directory, self.run = directory, directory / "stopped"
        self.arguments = pretrain_arguments(self.run, stores, *SAVES)
        self.ends: dict[str, Ended] = {}
        self.last: dict[str, int] = {}
        self._stop("terminated", 8, signal.SIGTERM)
        self._stop("interrupted", 24, signal.SIGINT)
        self.at = random.randint(36, 60)  # said by the assertions, as it is different each time
        self._stop("killed", self.at, signal.SIGKILL)
        for turn in range(5):  # the save may be complete when the signal comes: then once more
            self._kill_in_a_save(f"killed-in-a-save-{turn}")
            if self.unfinished:
                break
        self.next_errors = (directory / "killed-in-a-save-0.err").read_text()
        self.ends["finished"] = run_process("pretrain", *self.arguments, log=directory / "finished")
        self.ends["again"] = run_here("pretrain", *self.arguments)

    def _stop(self, name: str, step: int, number: signal.Signals) -> None:
        process = Process("pretrain", *self.arguments, log=self.directory / name)
        process.until(lambda: newest_step(self.run) >= step, f"step {step}")
        self.ends[name] = process.kill(number)
        self.last[name] = newest_step(self.run)

    def _kill_in_a_save(self, name: str) -> None:
        directory, first = self.run / "checkpoints", newest_step(self.run)
        process = Process("pretrain", *self.arguments, log=self.directory / name)

        def saving() -> bool:
            going_on = newest_step(self.run) > first // 5 * 5 + 5
            return going_on and any("tmp" in path.name for path in directory.iterdir())

        process.until(saving, "a save under way")
        self.ends["killed in a save"] = process.kill()
        self.unfinished = [path.name for path in directory.iterdir() if not path.name.isdecimal()]


@pytest.fixture(scope="module")
def stops(tmp_path_factory, stores):
    return Stops(tmp_path_factory.mktemp("stops"), stores)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, stores):
    """The same run, never stopped."""
    directory = tmp_path_factory.mktemp("whole")
    ended = run_process("pretrain", *pretrain_arguments(directory / "run", stores, *SAVES), log=directory / "whole")
    assert ended.code == 0, ended.errors
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["terminated", "interrupted"])
def test_a_signal_finishes_the_step_saves_and_ends_with_75(stops, name):
    ended = stops.ends[name]
    assert ended.code == 75, ended.errors
    line = ended.errors.splitlines()[-1]
    step = stops.last[name]
    assert line == f"stopped at step {step} of {STEPS}, saved; rerun the same command to resume"
    following = starts(stops.run)[["terminated", "interrupted"].index(name) + 1]
    assert following["started_from"] == f"resumed at step {step}"  # no step is lost


@pytest.mark.slow
def test_killed_runs_lose_only_the_steps_since_their_last_save(stops):
    assert stops.ends["killed"].code == stops.ends["killed in a save"].code == -signal.SIGKILL
    assert stops.unfinished, "no save was under way when a signal came"
    origins = [start["started_from"] for start in starts(stops.run)]
    assert len(origins) >= 5 and origins[0] is None
    resumed = int(origins[3].removeprefix("resumed at step "))
    assert stops.last["killed"] - 12 <= resumed <= stops.last["killed"], (stops.at, stops.last, origins)
    dropped = re.search(rf"dropped (\d+) lines? beyond step {resumed}", stops.next_errors)
    # One line a step, and a validation line where one was in between.
    assert 0 <= (int(dropped[1]) if dropped else 0) - (stops.last["killed"] - resumed) <= 1, stops.last


@pytest.mark.slow
def test_stopped_and_killed_or_not_the_run_is_the_same_to_the_bit(stops, whole):
    assert stops.ends["finished"].code == 0, stops.ends["finished"].errors
    assert list(metrics(whole)) == list(range(1, STEPS + 1))
    for name in ("loss", "gradient_norm", "learning_rate", "update_norm/blocks", "validation_loss"):
        assert metrics(stops.run, name) == metrics(whole, name), (name, stops.at, stops.last)
    assert list(metrics(whole, "validation_loss")) == [0, 20, 40, 60, 80, 100]
    assert checkpoints(stops.run) == checkpoints(whole) == [90, 95, 100]
    assert checksums(stops.run) == checksums(whole)
    assert any("opt_state" in name for name in checksums(whole))
    assert list((stops.run / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_a_complete_run_says_so_and_does_nothing(stops):
    ended = stops.ends["again"]
    assert ended.code == 0 and ended.errors == ""
    assert ended.output == f"{stops.run} is complete: {STEPS} of {STEPS} steps; nothing to do\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory, stores):
    """A run of 20 steps with the checkpoints 10, 15 and 20."""
    run = tmp_path_factory.mktemp("base") / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, "--num-steps", 20, "--checkpoint-every", 5))
    assert ended.code == 0, ended.errors
    assert checkpoints(run) == [10, 15, 20]
    return run


def again(run: Path, stores, *more) -> Ended:
    return run_here("pretrain", *pretrain_arguments(run, stores, "--num-steps", 20, "--checkpoint-every", 5, *more))


def test_lines_beyond_the_checkpoint_and_a_torn_one_are_dropped(base, stores, tmp_path):
    run = copy_at(base, 10, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 1')
    ended = again(run, stores)
    assert ended.code == 0
    assert "dropped 11 lines beyond step 10 and 1 incomplete line" in ended.errors  # ten steps and the validation
    assert metrics(run) == metrics(base) and metrics(run, "validation_loss") == metrics(base, "validation_loss")
    assert checksums(run) == checksums(base)


def test_a_damaged_checkpoint_is_moved_aside_and_the_older_one_used(base, stores, tmp_path):
    run = copy_at(base, 15, tmp_path / "run")
    flip_bytes(run / "checkpoints" / "15")
    ended = again(run, stores)
    assert ended.code == 0, ended.errors
    (said,) = [line for line in ended.errors.splitlines() if "damaged-15" in line]
    assert "step 10 is used" in said and "is damaged in" in said
    assert (run / "checkpoints" / "damaged-15").is_dir()
    assert starts(run)[-1]["started_from"] == "resumed at step 10"
    assert checksums(run) == checksums(base) and metrics(run) == metrics(base)


def test_a_truncated_checkpoint_is_no_checkpoint_and_none_sound_is_one_line(base, stores, tmp_path):
    run = copy_at(base, 10, tmp_path / "run")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    for file in (run / "checkpoints" / "10" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-7])
    assert_one_line(again(run, stores), 2, "none of the checkpoints 10 is intact", "start again in another directory")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(base, stores, tmp_path):
    run = copy_at(base, 0, tmp_path / "run")
    ended = again(run, stores)
    assert ended.code == 0, ended.errors
    assert "dropped 22 lines from the start" in ended.errors  # twenty steps, the validation before and after
    assert starts(run)[-1]["started_from"] is None
    assert metrics(run) == metrics(base) and checksums(run) == checksums(base)


@pytest.mark.usefixtures("eight_devices")
def test_mesh_and_micro_batches_may_change_on_resume(base, stores, tmp_path):
    run = copy_at(base, 10, tmp_path / "run")
    ended = again(run, stores, "--mesh.data", 2, "--mesh.fsdp", 2, "--mesh.tensor", 2, "--micro-batches", 2,
                  "--model.dropout-rate", 0.1, "--execution.remat", "dots")  # fmt: skip
    assert ended.code == 0, ended.errors
    assert 'changed since the last start: --mesh.fsdp: "auto" -> 2' in ended.errors
    assert "changed since the last start: --micro-batches: 1 -> 2" in ended.errors
    assert starts(run)[-1]["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    found, expected = metrics(run), metrics(base)
    assert found.keys() == expected.keys()
    # Micro-batches draw other dropout masks, so the losses are near and not equal.
    assert all(found[step] == pytest.approx(expected[step], rel=0.05) for step in range(11, 21))
    assert all(found[step] == expected[step] for step in range(1, 11))


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--seed", 1), "seed: 0 -> 1"),
        (("--optimizer.peak-lr", 1e-3), "--optimizer.peak-lr: 0.003 -> 0.001"),
        (("--batch-size", 16), "--batch-size: 8 -> 16"),
        (("--length", 64), "length: 32 -> 64"),
        (("--model.num-layers", 3), "--model.num-layers: 1 -> 3"),
        (("--data.layout", "packed"), 'data.layout: "windows" -> "packed"'),
        (("--data.order", "blocks"), 'data.order: "rows" -> "blocks"'),
        (("--num-steps", 40), "--num-steps: 20 -> 40"),  # the rate's decay depends on it
    ],
)
def test_a_changed_identity_is_one_line_and_changes_nothing(base, stores, flags, said):
    before = (base / "config.json").read_bytes(), (base / "metrics.jsonl").read_bytes(), len(starts(base))
    line = assert_one_line(again(base, stores, *flags), 2, said, "holds a run with another config")
    assert str(base) in line
    assert before == ((base / "config.json").read_bytes(), (base / "metrics.jsonl").read_bytes(), len(starts(base)))


def test_another_store_is_refused_and_the_same_one_elsewhere_is_not(base, stores, tmp_path):
    shutil.copytree(stores[0], tmp_path / "moved")
    moved = again(base, (tmp_path / "moved", stores[1]))
    assert moved.code == 0 and "is complete" in moved.output
    assert_one_line(again(base, (stores[1], stores[1])), 2, "the token stores hold another text")


def test_a_run_without_decay_goes_on_longer_in_place(stores, tmp_path):
    arguments = [*pretrain_arguments(tmp_path / "run", stores), "--optimizer.decay", "constant"]
    for steps in (6, 9):
        assert run_here("pretrain", *arguments, "--num-steps", steps).code == 0
    assert list(metrics(tmp_path / "run")) == list(range(1, 10))
    assert starts(tmp_path / "run")[-1]["started_from"] == "resumed at step 6"


def test_a_run_in_use_is_refused(base, stores):
    with (base / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert_one_line(again(base, stores), 2, "is in use by")
