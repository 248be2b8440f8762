"""The demonstrations: their scripts with commands that only note a call, and the table."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from documents import parse
from paths import REPOSITORY
from staged_checkout import run_staged, staged_checkout

NOVELS = (
    "books/train/Charles_Dickens_David_Copperfield.txt",
    "books/test/Aldous_Huxley_Antic_Hay.txt",
    "books/valid/Anton_Chekhov_The_Duel.txt",
)
NAMES = sorted(path.stem for path in (REPOSITORY / "launch" / "demonstrations").glob("*.bash"))


@pytest.fixture
def stage(tmp_path) -> Path:
    parts = ["books/train", "books/valid", "books/test", "classify/trec", "classify/trec50", "classify/sst_trees"]
    parts += ["glue/SST-2", "translation/multi30k", "chunk/conll2000", "ud/ewt"]
    for part in parts:
        (tmp_path / "data" / part).mkdir(parents=True)
    for novel in NOVELS:
        (tmp_path / "data" / novel).write_text("It was the best of times. " * 9000)
    (tmp_path / "data/classify/trec/train.txt").write_text("1 What is it ?\n0 Why ?\n")
    (tmp_path / "data/chunk/conll2000/train.txt").write_text("It PRP B-NP\nwas VBD B-VP\n")
    (tmp_path / "data/glue/SST-2/train.tsv").write_text("sentence\tlabel\nfine\t1\nfine\t1\nbad\t0\n")
    return staged_checkout(tmp_path, "demonstrate.sh")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_parses_and_every_arm_has_its_seeds(stage, name, monkeypatch):
    """Fails when a step lacks a name, an arm a seed, or a command has an unknown flag."""
    done = run_staged(stage, "demonstrate.sh", name, str(stage / "data"), "out")
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in (stage / "calls").read_text().splitlines()]
    assert f"[{len(calls)}/{len(calls)}] " in done.stdout and calls[-1][0].endswith("table.py")
    steps = [json.loads(line)["step"] for line in (stage / "out" / "steps.jsonl").read_text().splitlines()]
    assert steps == [line.split()[1].rstrip(",") for line in done.stdout.splitlines() if line.startswith("[")]
    arms = Counter(step.rpartition("-")[0] for step in steps if step[-1].isdigit())
    assert arms and set(arms.values()) == {3}
    for call in calls:
        if call[0] == "-m":
            assert parse(call[1].removeprefix("jaxlm."), call[2:], monkeypatch) is None, call


def test_the_texts_of_the_tasks_have_no_label(stage):
    """Fails when the language model of ULMFiT's second stage sees a label, or a text twice."""
    assert run_staged(stage, "demonstrate.sh", "ulmfit", str(stage / "data"), "out").returncode == 0
    assert (stage / "out" / "trec.txt").read_text().split("\n\n") == ["What is it ?", "Why ?", ""]
    assert (stage / "out" / "sst2.txt").read_text().split("\n\n") == ["fine", "bad", ""]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected NAME, DATA"),
        (("nothing", "data"), "NAME must be auxiliary_losses, awd_lstm"),
        (("--fast", "data"), "unknown option"),
        (("ulmfit", "nowhere"), "DATA must have books/train, got none in nowhere"),
    ],
)
def test_bad_arguments_are_one_line(stage, arguments, said):
    done = run_staged(stage, "demonstrate.sh", *arguments)
    assert done.returncode == 2 and said in done.stderr and "usage:" in done.stderr


def run_table(directory: Path, *more: str) -> subprocess.CompletedProcess:
    words = ["--directory", str(directory), "--seeds", "0", "1", "--rows", "a=first", "b=second", *more]
    table = REPOSITORY / "launch" / "demonstrations" / "table.py"
    return subprocess.run([sys.executable, table, *words], capture_output=True, text=True, check=False, cwd=REPOSITORY)


def test_the_table_has_differences_of_the_same_seed(tmp_path):
    """Fails when rows are compared over different seeds, or a reduction takes the wrong records."""
    for row, seed, values in (("a", 0, (5, 3, 4)), ("a", 1, (9, 7, 8)), ("b", 0, (9, 2, 5)), ("b", 1, (9, 8, 10))):
        (tmp_path / f"{row}-{seed}").mkdir()
        lines = [{"step": step, "loss": value} for step, value in enumerate(values)] + [{"step": 9, "other": 0}]
        (tmp_path / f"{row}-{seed}" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{row}-{seed}.json").write_text(
            json.dumps({"runs": [{"score": values[0] / 10}], "by": [*values, 99]})
        )
    file = "{row}-{seed}/metrics.jsonl"
    columns = [f"{how}={file}:{how}:loss" for how in ("min", "last", "recent")]
    columns.append("value={row}-{seed}.json:value:runs.0.score")
    columns.append("mean={row}-{seed}.json:mean:by.1:3")
    done = run_table(tmp_path, "--digits", "2", "--name", "two", "--columns", *columns)
    assert done.returncode == 0, done.stderr
    first, second = ([cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:])
    assert first[:2] == ["first", "5.00 ± 2.83"] and first[2] == ""
    assert second[1:5] == ["5.00 ± 4.24", "+0.00 ± 1.41", "7.50 ± 3.54", "+1.50 ± 0.71"]
    assert second[6] == "+1.17 ± 0.24" and second[8] == "+0.20 ± 0.28"
    assert first[9] == "5.50 ± 2.83" and second[9] == "6.25 ± 3.89"
    assert (tmp_path / "two.md").read_text() == done.stdout
    done = run_table(tmp_path, "--columns", f"second={file}:1:loss")
    assert "| 5.000 ± 2.828 |" in done.stdout and "| 5.000 ± 4.243 |" in done.stdout
    done = run_table(tmp_path, "--columns", f"fourth={file}:3:loss")
    assert done.returncode == 2 and "has 3 records with loss" in done.stderr
    (tmp_path / "b-1.json").unlink()
    done = run_table(tmp_path, "--columns", columns[-2])
    assert done.returncode == 2 and "b-1.json" in done.stderr and done.stderr.count("\n") == 1
