"""launch/gke_prepare.yaml: its Jobs are well formed, and their commands prepare a store. No cluster runs it here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_store import contents
from toy_text import write_books

from jaxlm.data.preparation import prepare_store

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra [docs] or Hugging Face's packages bring")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def jobs():
    text = (ROOT / "launch" / "gke_prepare.yaml").read_text(encoding="utf-8")
    return {job["metadata"]["name"]: job["spec"] for job in yaml.safe_load_all(text)}


def container(spec: dict) -> dict:
    return spec["template"]["spec"]["containers"][0]


def variables(spec: dict) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(spec)["env"]}


def test_the_jobs_fit_together(jobs):
    """Fails if a part is nobody's, the join begins before the parts, or both write to different places."""
    parts, join = jobs["jaxlm-prepare"], jobs["jaxlm-join"]
    assert parts["completionMode"] == "Indexed" and parts["completions"] == parts["parallelism"]
    assert variables(parts).pop("PARTS") == str(parts["completions"])
    assert join["suspend"] and variables(parts).items() > variables(join).items()
    mounted = [(container(spec)["volumeMounts"], spec["template"]["spec"]["volumes"]) for spec in (parts, join)]
    assert mounted[0] == mounted[1] and container(parts)["image"] == container(join)["image"]
    rules = {rule["action"]: rule for rule in parts["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"] == {"operator": "In", "values": [2]}, "75 and 1 are tried again"


def test_the_commands_prepare_the_store_of_one_process(jobs, tmp_path, monkeypatch):
    """Fails if the shell reads the commands otherwise than they look, or an index is no part."""
    monkeypatch.chdir(tmp_path)
    write_books([40, 60, 20])
    (tmp_path / "programs").mkdir()
    program = tmp_path / "programs" / "jaxlm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxlm "$@"\n')
    program.chmod(0o755)
    toy = {"SOURCE": "text:books/*.txt", "TOKENIZER": "words:200", "OUTPUT": "store", "PARTS": "2"}
    assert toy.keys() == variables(jobs["jaxlm-prepare"]).keys()
    environment = os.environ | toy | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(spec: dict, **others: str) -> str:
        command = [*container(spec)["command"], *container(spec)["args"]]
        done = subprocess.run(
            command, env=environment | others, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for index in "01":
        said = run(jobs["jaxlm-prepare"], JOB_COMPLETION_INDEX=index)
        assert f"part {index}/2 is done" in said
    run(jobs["jaxlm-join"])
    prepare_store("text:books/*.txt", tokenizer="words:200", output="whole")
    assert contents(Path("store")) == contents(Path("whole"))
