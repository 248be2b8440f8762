"""log.txt: what a command says, from its first line to its error, for each start; redrawn lines once."""

import io
import logging
import os
import sys

import pytest
from toy_runs import make_stores, metrics, pretrain_arguments, run_here

from jaxlm.errors import LOGGERS, RunError, run_command
from jaxlm.progress import LiveLine, Progress
from jaxlm.runs import text_log
from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.text_log import TextLog, copied_output

pytestmark = pytest.mark.usefixtures("two_devices")

CONFIG = {"seed": 0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(directory):
    return (directory / "log.txt").read_text(encoding="utf-8").splitlines()


def test_lines_before_the_start_and_the_error_are_in_the_log(tmp_path, capsys):
    """Fails when what is said before the run is opened, by a logger, or at the end is missing, or written twice."""

    @copied_output()
    def command():
        print("a notice")
        logging.getLogger("jaxlm").warning("a %s", "warning")
        with RunDirectory(tmp_path / "run") as run:
            run.open(CONFIG)
            run.record_start(started_from=None)
            print("step 1", file=sys.stderr)
            raise RunError("the disk is full; free some space")

    handlers = {name: logging.getLogger(name).handlers for name in LOGGERS}
    try:
        with pytest.raises(SystemExit, match="1"):
            run_command(command)
        with pytest.raises(SystemExit):
            run_command(command)
    finally:
        for name, before in handlers.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = before, True
        logging.captureWarnings(False)
    found = lines_of(tmp_path / "run")
    assert [line[:3] for line in found].count("== ") == 2 and len(found) == 10
    said = ["a notice", "warning: a warning", "step 1", "failed: the disk is full; free some space"]
    assert found[1:5] == found[6:] == said and sys.orig_argv[0] in found[0]
    printed = capsys.readouterr()  # the streams themselves are unchanged
    assert printed.out.splitlines() == said[:1] * 2 and printed.err.splitlines() == said[1:] * 2


def test_without_a_start_nothing_is_written(tmp_path):
    """Fails when a refused command, or a run opened from Python, leaves a log."""
    with copied_output():
        print("refused")
    with RunDirectory(tmp_path / "run") as run:
        run.open(CONFIG)
        run.record_start(started_from=None)
        print("from Python")
    assert not (tmp_path / "run" / "log.txt").exists()


def test_a_redrawn_line_is_written_at_its_end_and_every_ten_seconds(tmp_path):
    """Fails when each of ten states a second is written, or the control characters are."""
    now, stream = [0.0], Terminal()
    log = TextLog(clock=lambda: now[0])
    stream_copy = text_log._Copied(stream, "error", log)
    log.open(tmp_path / "log.txt", "== start")
    progress = Progress("rows", 40, stream=stream_copy, clock=lambda: now[0])
    for done in range(1, 26):
        now[0] += 1
        progress.update(done)
    progress.note("half way")
    progress.close()
    log.close()
    found = lines_of(tmp_path)
    assert [line.split("/")[0] for line in found] == ["== start", "rows  9", "rows  19", "half way", "rows  25"]
    assert "\x1b" not in "".join(found) and "\x1b" in stream.getvalue()


def test_a_plain_line_of_training_is_written_as_it_is(tmp_path):
    log, stream = TextLog(), io.StringIO()
    log.open(tmp_path / "log.txt", "== start")
    live = LiveLine(4, every=2, stream=text_log._Copied(stream, "error", log))
    for step in range(1, 5):
        live.update(step, loss=float(step))
    live.close()
    log.close()
    assert "\n".join(lines_of(tmp_path)[1:]) + "\n" == stream.getvalue() and "step 4/4" in stream.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path):
    """Fails when an error of the log reaches the command."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log = TextLog()
    log.open(tmp_path / "log.txt", "== start")
    log.add("error", "one\ntwo\n")
    assert log._file is None, "writing stops after the first error"
    log.close()


def test_each_start_of_a_pretraining_is_logged_and_a_complete_run_is_left_alone(tmp_path):
    """Fails when a step, a note or the header is missing, or a resumed run differs because of the log."""
    run, stores = tmp_path / "run", make_stores(tmp_path)
    arguments = pretrain_arguments(run, stores, "--num-steps", 4)
    first = run_here("pretrain", *arguments)
    found = lines_of(run)
    assert first.code == 0 and found[0].startswith("== ") and found.count(found[0]) == 1
    assert found[1:] == (first.output + first.errors).splitlines()
    assert [line.split("/")[0] for line in found if line.startswith("step ") and "lr" in line] == [
        f"step {step}" for step in metrics(run)
    ]
    assert "is complete" in run_here("pretrain", *arguments).output and lines_of(run) == found
    (run / "log.txt").unlink()
    (run / "log.txt").mkdir()
    refused = run_here("pretrain", *arguments)
    assert refused.code == 2 and "log.txt must be a regular file" in refused.errors
