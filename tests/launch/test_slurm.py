"""launch/slurm.sh with stand-ins of Slurm: `srun` runs the command, `scontrol` writes down what it is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_text import paragraphs

from jaxlm.data.preparation import PrepareConfig, prepare

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
while case $1 in --*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> scontrol.txt
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A checkout with a .venv, a text, and Slurm's commands on the PATH."""
    monkeypatch.chdir(tmp_path)
    for name, script in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        file = tmp_path / (".venv/bin" if name == "python" else "bin") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
        file.chmod(0o755)
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs(60)))
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7",
    }


def submit(cluster, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "launch/slurm.sh"), "prepare", *arguments]
    return subprocess.run(command, env=cluster | variables, capture_output=True, text=True)


def test_the_jobs_of_an_array_prepare_parts_that_another_job_joins(cluster):
    """Fails if a part is encoded twice or by none, or the array's first index or step is not taken into account."""
    arguments = ("--source", "lines:text.txt", "--tokenizer", "words:200", "--output", "store", "--unit-bytes", "500")
    for task in ("3", "5", "7"):
        array = {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
        done = submit(cluster, *arguments, SLURM_ARRAY_TASK_ID=task, **array)
        assert done.returncode == 0, done.stderr
        assert f"part {(int(task) - 3) // 2}/3 is done" in done.stdout
    joined = submit(cluster, *arguments)
    assert joined.returncode == 0, joined.stderr
    units = joined.stdout.split("continuing: ")[1].split(" units")[0].split(" of ")
    assert units[0] == units[1]
    whole = PrepareConfig(("lines:text.txt",), "words:200", "whole", workers=1, unit_bytes=500)
    prepare(whole)
    assert Path("store/tokens.bin").read_bytes() == Path("whole/tokens.bin").read_bytes()


def test_a_preparation_that_was_stopped_is_queued_again(cluster):
    """Fails if exit code 75 is lost, or another code brings the job back."""
    Path(".venv/bin/python").write_text("#!/bin/sh\nexit 75\n")
    assert submit(cluster).returncode == 75
    assert Path("scontrol.txt").read_text() == "requeue 7\n"
    Path(".venv/bin/python").write_text("#!/bin/sh\nexit 2\n")
    assert submit(cluster).returncode == 2
    assert Path("scontrol.txt").read_text() == "requeue 7\n"
