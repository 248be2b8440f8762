"""Every command and every flag that README.md prints is parsed by the command it belongs to.

Fails when a flag is renamed, or printed in a form that the parser refuses: on 2968321 `--masking.whole-word True` and
`--frozen True` stood there.
"""

import contextlib
import importlib
import io
import re
import shlex

import pytest
import tyro
from conftest import REPOSITORY

from jaxlm.config import config_directories

# Commands that flags in the text may belong to, with what each needs beside them.
BEGINNINGS = (
    ("prepare", "--source text:x --tokenizer train-wordpiece:9 --output x"),
    ("pretrain", "debug/gpt --run x --data.store x"),
    ("pretrain", "debug/bert --run x --data.store x"),
    ("finetune", "finetune/gpt1 --run x --task cola"),
    ("finetune", "finetune/bert --run x --task cola"),
    ("predict", "--run x --input x"),
    ("generate", "--run x"),
    ("evaluate", "perplexity --run x --data.store x"),
    ("evaluate", "task --run x --input x"),
    ("evaluate", "score --run x --input x"),
    ("evaluate", "ensemble x y"),
    ("convert", "import hf:x --run x"),
    ("convert", "export x --to hf:x"),
    ("show", "debug/gpt --data.store x"),
    ("show", "."),
    ("aot", "debug/gpt"),
    ("bench", "--model gpt1"),
    ("doctor", "debug/gpt"),
)
# The group of --mesh.data and its like, and flags of shell scripts, which the tests in tests/launch run.
OTHERS = {
    "--mesh",
    "--retries",
    "--xla_gpu_deterministic_ops=true",
    "--dry-run",
    "--spot",
    "--slices",
    "--name",
    "--zone",
    "--project",
    "--type",
    "--run",
    "--help",
}
CLI = tyro.cli
WHOLE = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PROGRAMS = r"^```python\n(.*?)^```\n"  # tests/api/test_examples.py reads these blocks
README = re.sub(PROGRAMS, "", WHOLE, flags=re.DOTALL | re.MULTILINE)


class Parsed(Exception):
    """The command line was accepted."""


def parse(command: str, words: list[str], monkeypatch) -> str | None:
    """None where the parser of the command accepts these words, else what it says."""
    module = importlib.import_module(f"jaxlm.{command}")

    def accept(*arguments, **settings):
        CLI(*arguments, **settings)
        raise Parsed

    said = io.StringIO()
    with monkeypatch.context() as patched, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        patched.setattr(tyro, "cli", accept)
        patched.setattr("sys.argv", [command, *words])
        try:
            module.main()
        except Parsed:
            return None
        except (SystemExit, Exception) as error:  # noqa: B014
            return f"{error!r}: {said.getvalue()}"
    raise AssertionError(f"{command} does not read its command line by tyro.cli")


def printed_commands() -> list[tuple[str, list[str]]]:
    """The commands of all blocks of shell, as (command, words); of a launcher that of the program it starts."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            words = shlex.split(line.split(" && ")[-1], comments=True)
            if words[:2] == ["python", "-m"]:
                found.append((words[2].removeprefix("jaxlm."), words[3:]))
            elif words[:2] == ["launch/tpu_pod.sh", "create"]:
                found.append(("pretrain", [*words[words.index("--") + 1 :], "--run", "x"]))
    return found


def printed_flags() -> list[str]:
    """The flags with their values that stand between backticks in the text, without those of whole commands."""
    text = re.sub(r"^```\n.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    flags = []
    for span in spans:
        if "--" not in span:
            continue
        flags += re.findall(r"--[a-z][\w.-]*(?:=\S+)?(?: (?!--|…)[^\s…]+)*", span)
    return sorted({flag for flag in flags if flag.split()[0] not in OTHERS})


def test_every_printed_command_is_parsed(monkeypatch):
    """Fails on a flag or value that the command refuses, and on a config that does not exist."""
    commands = printed_commands()
    assert len(commands) > 10
    said = {" ".join([command, *words]): parse(command, words, monkeypatch) for command, words in commands}
    assert not {command: why for command, why in said.items() if why}


def test_every_printed_flag_is_one_of_some_command(monkeypatch):
    """Fails on 2968321: `--masking.whole-word True` and `--frozen True` are refused."""
    flags = printed_flags()
    assert len(flags) > 40

    def known(flag: str, command: str, beginning: str) -> bool:
        name, *values = shlex.split(flag)
        placeholder = all(value.isupper() or value in ("n", "gs://") for value in values)  # `--data.masks`, `--run RUN`
        why = parse(command, [*beginning.split(), name, *([] if placeholder else values)], monkeypatch)
        return not why or (placeholder and "Unrecognized" not in why)

    assert not [flag for flag in flags if not any(known(flag, *beginning) for beginning in BEGINNINGS)]


def test_every_printed_config_exists():
    files = [path for directory in config_directories() for path in directory.glob("*/*.py")]
    names = {f"{path.parent.name}/{path.stem}" for path in files}
    printed = re.findall(r"`((?:pretrain|finetune|debug)/\w+)`", README)
    assert len(printed) > 10 and set(printed) <= names


@pytest.mark.parametrize("words", ["--masking.whole-word True", "--frozen True", "--no-such-flag 1"])
def test_the_parsers_refuse_what_is_no_flag(words, monkeypatch):
    """The check above would mean nothing if anything were accepted."""
    assert parse("finetune", ["finetune/bert", "--run", "x", "--task", "cola", *words.split()], monkeypatch)
