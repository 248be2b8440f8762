"""The quickstart's end: its table, summary and script, on made-up runs and with commands that only note a call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY
from staged_checkout import run_staged, staged_checkout


def run_table(directory: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, REPOSITORY / "launch" / "quickstart" / "table.py", "--directory", str(directory)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )


# --- table ------------------------------------------------------------------------------------------------------------


def finished_directory(root: Path) -> Path:
    """What the commands leave behind, with figures that are easy to check."""

    def write(path: str, rows: list[dict]) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("pretrained/config.json", [{"batch_size": 8, "length": 64}])
    curve = [{"step": s, "loss": 8 - s / 100, "tokens_per_second": 10_000 + s} for s in (100, 200, 300)]
    held_out = [
        {"step": 0, "validation_loss": 8.3, "perplexity": 4000.0, "bits_per_byte": 3.3},
        {"step": 300, "validation_loss": 4.3, "perplexity": 73.7, "bits_per_byte": 1.72},
    ]
    write("pretrained/metrics.jsonl", [held_out[0], *curve, held_out[1]])
    accuracies = {"finetuned": (0.78, 0.80, 0.82), "scratch": (0.50, 0.52, 0.48), "scratch-long": (0.62,)}
    for name, values in accuracies.items():
        runs = [
            {"seed": seed, "learning_rate": 1e-3, "dev": {"accuracy": value + 0.01}, "test": {"accuracy": value}}
            for seed, value in enumerate(values)
        ]
        write(f"{name}/results.json", [{"task": "custom", "metric": "accuracy", "runs": runs[::-1]}])
        lines = [
            {"step": s, "seed": seed, "loss": 1.0, "task_loss": 0.7 - s / 1000}
            for seed in range(len(values))
            for s in range(1, 9)
        ]
        write(f"{name}/metrics.jsonl", [*lines, {"step": 8, "seed": 0, "dev_accuracy": 0.7, "dev_loss": 0.6}])
    write("baseline.json", [{"dev_accuracy": 0.70, "test_accuracy": 0.714, "inverse_regularisation": 10.0}])
    pairs = [{"first": "A b.", "second": "B a.", "answer": answer} for answer in ("first", "second", "first", "second")]
    write("task/test.jsonl", pairs)
    scores = [(-3.0, -4.0), (-5.0, -4.5), (-2.0, -1.0), (-1.0, -1.0)]
    write(
        "zero-shot.jsonl",
        [{"index": i, "log_probability": {"first": a, "second": b}} for i, (a, b) in enumerate(scores)],
    )
    steps = [("corpus", 20, 0), ("pretrain", 100, 137), ("pretrain", 200, 0), ("pretrain", 3, 0), ("corpus", 1, 0)]
    write("steps.jsonl", [{"step": step, "seconds": seconds, "code": code} for step, seconds, code in steps])
    (root / "sample.txt").write_text("The function returns the sample.\n")
    return root


def test_the_table_and_the_summary_say_what_the_runs_wrote(tmp_path):
    directory = finished_directory(tmp_path / "quickstart")
    done = run_table(directory)
    assert done.returncode == 0, done.stderr
    assert json.loads((directory / "summary.json").read_text()) == {
        "pretrained_accuracy": [0.78, 0.80, 0.82],
        "scratch_accuracy": [0.50, 0.52, 0.48],
        "long_scratch_accuracy": 0.62,
        "baseline_accuracy": 0.714,
        "zero_shot_accuracy": 2.5 / 4,
        "validation_perplexity": 73.7,
        "seconds": 320,
    }
    for expected in (
        "80.0 ± 2.0",
        "50.0 ± 2.0",
        "62.0",
        "71.4",
        "62.5",
        "+30.0",
        "+18.0",
        "4000.0 (step 0)",
        "73.7",
        "1.72",
    ):
        assert expected in done.stdout, expected
    assert "10,200 tokens per second" in done.stdout
    assert "The function returns the sample." in done.stdout
    assert "higher probability in\n62.5 % of the test pairs" in done.stdout  # apart from the rows with labels
    files = done.stdout.split("Files:\n")[1].split("\n\n")[0].split("\n")
    written = {path.name for path in directory.iterdir()} | {"corpus", "stores", "report.html"}
    assert {line.split()[0].removeprefix(f"{directory}/") for line in files} == written - {"scratch-long"}
    following = [line for line in done.stdout.split("\nNext")[1].splitlines() if line.startswith("  python -m jaxlm.")]
    assert [line.split()[2] for line in following] == ["jaxlm.finetune", "jaxlm.predict"]
    assert f"--start {directory / 'pretrained'}" in following[0]
    assert "Limitations" in done.stdout and str(directory / "summary.json") in done.stdout
    assert (directory / "table.txt").read_text() in done.stdout
    picture = (directory / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@pytest.mark.parametrize(
    "gone", ["pretrained/metrics.jsonl", "finetuned/results.json", "zero-shot.jsonl", "steps.jsonl", "task/test.jsonl"]
)
def test_a_missing_file_is_named_in_one_line(tmp_path, gone):
    directory = finished_directory(tmp_path / "quickstart")
    (directory / gone).unlink()
    done = run_table(directory)
    assert done.returncode == 2
    assert gone in done.stderr and done.stderr.count("\n") == 1
    assert not (directory / "summary.json").exists()


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path) -> Path:
    return staged_checkout(tmp_path, "quickstart.sh")


def quickstart(stage: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return run_staged(stage, "quickstart.sh", *arguments, **environment)


def test_the_script_prints_each_command_before_it_runs_and_stops_where_one_fails(stage):
    done = quickstart(stage)
    assert done.returncode == 0, done.stderr
    calls = (stage / "calls").read_text().splitlines()
    printed = [line[len("$ python ") :] for line in done.stdout.splitlines() if line.startswith("$ python ")]
    assert [line.split(" > ")[0].replace("'", "") for line in printed] == calls
    assert f"[{len(calls)}/{len(calls)}] table" in done.stdout  # last, as it lists the files
    trained = [words[words.index("--run") + 1] for words in map(str.split, calls) if "configs/" in words[2]]
    assert calls[-2].split()[2:] == [*trained, "--output", "runs/quickstart/report.html"]
    assert "ready: cpu" in done.stdout
    steps = [json.loads(line) for line in (stage / "runs" / "quickstart" / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == len(calls) and all(step["code"] == 0 for step in steps)
    seeds = [call.split("--num-epochs ")[1] for call in calls if "--num-epochs" in call]
    assert [entry.split()[0] for entry in seeds] == ["4", "4", "16"]
    assert ["--seeds 3" in entry for entry in seeds] == [True, True, False]

    (stage / "calls").unlink()
    failed = quickstart(stage, "runs/other", PRETRAIN_CODE="75")
    assert failed.returncode == 75
    assert "launch/quickstart.sh runs/other continues" in failed.stderr
    assert "jaxlm.pretrain" in (stage / "calls").read_text().splitlines()[-1]
    steps = [json.loads(line) for line in (stage / "runs" / "other" / "steps.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == "pretrain" and steps[-1]["code"] == 75


def test_the_sample_is_made_once(stage):
    quickstart(stage)
    quickstart(stage)
    assert sum("jaxlm.generate" in line for line in (stage / "calls").read_text().splitlines()) == 1
    assert (stage / "runs" / "quickstart" / "sample.txt").read_text() == "The function returns a sample.\n"


def test_help_and_wrong_usage(stage):
    assert "usage: launch/quickstart.sh" in quickstart(stage, "--help").stdout
    for arguments in (("--fast",), ("a", "b")):
        wrong = quickstart(stage, *arguments)
        assert wrong.returncode == 2 and "usage:" in wrong.stderr
    assert not (stage / "calls").exists()
