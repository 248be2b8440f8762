"""Commands that are begun wrongly: the answer is one line with the remedy, and exit code 2."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY
from toy_runs import run_here


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pretrain", "debug/gpt", "--learning-rate", "1e-3"], "give --optimizer.peak-lr"),
        (["finetune", "debug/finetune_gpt", "--per-device-train-batch-size", "8"], "give --batch-size"),
        (["prepare", "--input", "a.txt"], "give --source"),
        (["evaluate", "--run", "r"], "a subcommand must be the first word, one of perplexity"),
        (
            ["prepare", "--source", "text:a", "--tokenizer", "gpt2", "--output", "o"],
            "give gpt2:DIR, or hf:gpt2 for the Hub",
        ),
        (
            ["convert", "import", "nc/mytexts", "--run", "r"],
            "must begin with one of hf:, openai:, google:, got nc/mytexts",
        ),
    ],
)
def test_words_of_other_programs_are_answered_in_one_line(words, said, tmp_path, monkeypatch):
    """Fails when a flag of Hugging Face's Trainer, or a word that is left out, is answered by a box or another path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("one\n")
    ended = run_here(*words)
    assert ended.code == 2 and said in ended.errors and len(ended.errors.strip().splitlines()) == 1, ended.errors


def test_a_missing_environment_is_one_line():
    """Fails when a Python without the packages ends in a traceback. -S leaves out all installed packages."""
    command = [sys.executable, "-S", "-E", "-m", "jaxlm.prepare", "--help"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: the package tyro must be installed") and ended.stderr.count("\n") == 1
