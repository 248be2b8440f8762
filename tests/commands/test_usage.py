"""Commands that are begun wrongly: the answer is one line with the remedy, and exit code 2."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from paths import REPOSITORY
from toy_runs import assert_one_line, run_here

from jaxlm.data import preparation
from jaxlm.data.preparation import PrepareConfig
from jaxlm.distributed.devices import prepare_process
from jaxlm.errors import RunError
from jaxlm.finetuning.arguments import FinetuneArguments
from jaxlm.flags import ELSEWHERE, fields_of
from jaxlm.hub import reason
from jaxlm.training.config import FinetuneConfig, PretrainArguments, PretrainConfig


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pretrain", "debug/gpt", "--learning-rate", "1e-3"], "give --optimizer.peak-lr"),
        (["finetune", "debug/finetune_gpt", "--per-device-train-batch-size", "8"], "give --batch-size"),
        (["prepare", "--input", "a.txt"], "give --source"),
        (["finetune", "debug/finetune_gpt", "--train-file", "a.csv"], "give --custom.train"),
        (["generate", "--run", "r", "--device", "cpu"], "set JAX_PLATFORMS=cpu, cuda or tpu in the environment"),
        (["evaluate", "--run", "r"], "a subcommand must be the first word, one of perplexity"),
        (
            ["prepare", "--source", "text:a", "--tokenizer", "gpt2", "--output", "o"],
            "give gpt2:DIR, or hf:gpt2 for the Hub",
        ),
        (
            ["convert", "import", "nc/mytexts", "--run", "r"],
            "must begin with one of hf:, openai:, google:, elmo:, cove:, got nc/mytexts",
        ),
    ],
)
def test_words_of_other_programs_are_answered_in_one_line(words, said, tmp_path, monkeypatch):
    """Fails when a flag of Hugging Face's Trainer, or a word that is left out, is answered by a box or another path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("one\n")
    ended = run_here(*words)
    assert ended.code == 2 and said in ended.errors and len(ended.errors.strip().splitlines()) == 1, ended.errors


def test_flags_that_are_named_instead_exist():
    """Fails when a field of ours is renamed and the answer to another program's flag still names it."""
    kinds = (PrepareConfig, PretrainArguments, PretrainConfig, FinetuneArguments, FinetuneConfig)
    known = {name for kind in kinds for name, _ in fields_of(kind)}
    assert {ours for names in ELSEWHERE.values() for ours in names} <= known


def test_a_wrong_tokenizer_is_named_before_the_store_that_is_there(tmp_path, monkeypatch):
    """Fails when a tokenizer of no known form is compared with that of a store, and another --output asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("one\n")
    words = ("prepare", "--source", "text:a", "--output", "o", "--tokenizer")
    assert run_here(*words, "bytes").code == 0
    assert_one_line(run_here(*words, "bpe:1000"), 2, "--tokenizer must be one of", "got 'bpe:1000'")
    assert_one_line(run_here(*words, "gpt2"), 2, "--tokenizer must have a colon", "or hf:gpt2 for the Hub's")
    assert_one_line(run_here(*words, "words:9"), 2, "o was made with --tokenizer bytes, not words:9")


def test_a_small_disk_is_named_in_its_own_unit(tmp_path, monkeypatch):
    """Fails when both sizes are 0.0 GB."""
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
    (tmp_path / "a").write_text("one\n" * 1000)
    words = ("--source", f"text:{tmp_path}/a", "--tokenizer", "bytes", "--output", tmp_path / "o")
    assert_one_line(run_here("prepare", *words), 2, "o needs about 12.8 kB, but only 2.0 kB are free; make room")


def test_the_reason_of_an_error_is_named_once(monkeypatch):
    """Fails when a line says `got Got:`, or has nothing between the name of an error and what to do."""
    assert reason(OSError("Got: ConnectError: [Errno -2] Name or service not known")).startswith("ConnectError: ")

    def fails() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fails)
    with pytest.raises(RunError, match=r"\): AssertionError: no reason is given; install"):
        prepare_process()


def test_a_missing_environment_is_one_line():
    """Fails when a Python without the packages ends in a traceback. -S leaves out all installed packages."""
    command = [sys.executable, "-S", "-E", "-m", "jaxlm.prepare", "--help"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: the package tyro must be installed") and ended.stderr.count("\n") == 1
