"""The console script `jaxlm`: its list of commands, its errors, completion, and the start of every command.

Fails when a summary differs from the command's own, a shell completes a flag that the command lacks, or a command
imports JAX before it has read its command line.
"""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY
from test_layers import COMMANDS as MODULES

import jaxlm
from jaxlm.__main__ import COMMANDS, completion, usage
from jaxlm.errors import InputError
from jaxlm.flags import fields_of

# Libraries that take from a tenth of a second to seconds to import, and that no command line needs.
SLOW = ("jax", "flax", "optax", "orbax", "grain", "sklearn", "scipy", "matplotlib", "tensorflow", "tokenizers")
# Commands that import them before they read their command line.
STILL_SLOW: set[str] = set()

PROBE = f"""
import runpy, sys
module, *sys.argv = sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("code", end.code or 0)
print("slow", *(name for name in {SLOW!r} if name in sys.modules))
"""


def run(*words, code=None):
    command = [sys.executable, *(["-c", code] if code else ["-m", "jaxlm"]), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)


def docstring(command: str) -> str:
    source = (REPOSITORY / "jaxlm" / f"{command}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


@pytest.mark.parametrize("command", COMMANDS)
def test_summaries_are_those_of_the_commands(command):
    """Fails when the first line of a command's docstring changes and the list of commands does not."""
    assert docstring(command).splitlines()[0].split(": `")[0].rstrip(".") == COMMANDS[command]
    assert hasattr(importlib.import_module(f"jaxlm.{command}"), "ARGUMENTS"), "completion reads ARGUMENTS"


def test_every_command_is_listed():
    """Fails when a module with a `main` is missing in the list, or is no command in the map of imports."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (REPOSITORY / "jaxlm").glob("*.py")}
    assert set(COMMANDS) == {name for name, text in sources.items() if "run_command(main)" in text} == MODULES


def test_help_version_and_errors():
    for words in ((), ("--help",)):
        shown = run(*words)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, usage() + "\n", "")
    assert all(f"  {name}" in usage() and summary in usage() for name, summary in COMMANDS.items())
    assert run("--version").stdout == f"jaxlm {jaxlm.__version__}\n"
    wrong = run("pretain", "--help")
    assert wrong.returncode == 2 and wrong.stdout == "" and len(wrong.stderr.splitlines()) == 1
    assert "got pretain; did you mean pretrain?" in wrong.stderr
    assert run("--completion", "fish").stderr.startswith("error: --completion must be bash or zsh, got fish")


def test_a_command_runs_and_names_itself():
    """Fails when the exit code or the name in the usage is not that of the command that was typed."""
    asked = run("predict", "--help")
    assert asked.returncode == 0 and asked.stdout.startswith("usage: jaxlm predict [-h]")
    refused = run("pretrain")
    assert refused.returncode == 2 and "`jaxlm pretrain CONFIG --help` lists its flags" in refused.stderr
    refused = run("pretrain", "pretrain/gpt1", "--no-such-flag", "1")
    assert refused.returncode == 2 and "--no-such-flag" in refused.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["jaxlm", "--help"],
        ["jaxlm", "--version"],
        *([f"jaxlm.{command}", "--help"] for command in sorted(set(COMMANDS) - STILL_SLOW)),
        ["jaxlm.pretrain", "pretrain/bert_base", "--help"],
        ["jaxlm.pretrain", "--run", "x"],
        ["jaxlm.finetune", "finetune/gpt1", "--no-such-flag"],
        ["jaxlm.evaluate", "zero-shot", "--help"],
    ],
    ids=" ".join,
)
def test_a_command_line_is_read_before_slow_imports(words):
    """Fails when help, version or a usage error wait for JAX or another slow library."""
    module, *arguments = words
    ended = run(module, module, *arguments, code=PROBE)
    lines = ended.stdout.splitlines()
    assert lines[-1] == "slow", lines[-1]
    assert "code 0" in lines or "code 2" in lines or module == "jaxlm", ended.stderr


def test_orbax_is_quiet_although_it_is_imported_later():
    """Fails when absl does not make its logger itself: it would be recorded as the caller of every message."""
    code = (
        "import logging, jaxlm.errors; jaxlm.errors.quiet_after_failures(); import jaxlm.runs.checkpoints\n"
        "logger = logging.getLogger('absl'); print(type(logger).__name__, len(logger.filters))"
    )
    assert run(code=code).stdout == "ABSLLogger 1\n"


@pytest.fixture(scope="module")
def bash() -> str:
    return completion("bash")


def completed(script: str, *words: str) -> list[str]:
    """Return the words that bash offers for the last one."""
    line = " ".join(f"'{word}'" for word in words)
    call = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _jaxlm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    ended = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=30, check=True)
    assert not ended.stderr, ended.stderr
    return ended.stdout.split()


def test_bash_completes_commands_flags_and_values(bash):
    assert completed(bash, "jaxlm", "pre") == ["prepare", "pretrain", "predict"]
    assert set(COMMANDS) <= set(completed(bash, "jaxlm", ""))
    assert completed(bash, "jaxlm", "pretrain", "pretrain/gpt1") == ["pretrain/gpt1"]
    assert {"--model.num-layers", "--model.num-heads"} <= set(completed(bash, "jaxlm", "pretrain", "x", "--model.num-"))
    assert completed(bash, "jaxlm", "pretrain", "x", "--data.layout", "pack") == ["packed"]
    assert completed(bash, "jaxlm", "evaluate", "perp") == ["perplexity"]
    assert completed(bash, "jaxlm", "evaluate", "score", "--choice") == ["--choice-list"]
    assert completed(bash, "jaxlm", "evaluate", "perplexity", "--choice") == []
    assert completed(bash, "jaxlm", "predict", "--with") == ["--with-inputs"]
    assert completed(bash, "jaxlm", "predict", "--run", "runs/") == [], "files are left to the shell"
    assert completed(bash, "jaxlm", "--completion", "") == ["bash", "zsh"]
    assert completed(bash, "jaxlm", "no-such-command", "--") == []


def test_every_flag_is_completed(bash):
    """Fails when a flag of a command is missing in the script, or is completed where the command has none."""
    from jaxlm.finetuning.arguments import FinetuneArguments

    offered = set(completed(bash, "jaxlm", "finetune", "x", "--")) - {"--help"}
    named = {f"--{name.replace('_', '-')}" for name, _ in fields_of(FinetuneArguments)} - {"--config"}
    assert named <= offered
    assert {re.sub(r"(^--|\.)no-", r"\1", flag) for flag in offered - named} <= named, offered - named


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_scripts_are_accepted_by_their_shell(shell, tmp_path):
    text = completion(shell)
    assert "_jaxlm" in text and all(command in text for command in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = Path(tmp_path / "script")
    path.write_text(text, encoding="utf-8")
    assert subprocess.run([shell, "-n", str(path)], capture_output=True, timeout=30).returncode == 0


def test_completion_names_the_shells():
    with pytest.raises(InputError, match="must be bash or zsh, got nothing"):
        completion("")
