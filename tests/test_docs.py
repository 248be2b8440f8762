"""The documentation: every command is parsed by its own parser, flags and configs exist, links lead somewhere.

Blocks marked `bash run` and the cells of notebooks are run, page by page, and the site is built where Sphinx is
installed.
"""

import ast
import html
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import blocks, cells, commands, documents, notebooks, of_jaxlm, parse, steps, without_blocks
from paths import REPOSITORY
from test_language import text_of
from toy_runs import run_here
from xla_flags import xla_flags

from jaxlm.config import is_config, known_configs
from jaxlm.flags import fields_of

# Commands that flags in the text may belong to, with what each needs beside them.
BEGINNINGS = (
    ("pretrain", "debug/gpt --run x --data.store x"),
    ("pretrain", "debug/bert --run x --data.store x"),
    ("pretrain", "debug/lstm --run x --data.store x"),
    ("pretrain", "debug/gpt --run x --data.store x --data.layout packed"),
    ("pretrain", "debug/gpt --run x --data.store x --optimizer.kind sgd"),
    ("finetune", "finetune/gpt1 --run x --task cola"),
    ("finetune", "finetune/bert --run x --task cola"),
    ("finetune", "finetune/bilstm --run x --task chunk"),
    ("prepare", "--source text:x --tokenizer train-wordpiece:9 --output x"),
    ("predict", "--run x --input x"),
    ("generate", "--run x"),
    ("evaluate", "perplexity --run x --data.store x"),
    ("evaluate", "task --run x --input x"),
    ("evaluate", "score --run x --input x"),
    ("evaluate", "features --run x --input x"),
    ("evaluate", "ensemble x y"),
    ("evaluate", "activations --run x --ids x --output x"),
    ("evaluate", "zero-shot --run x --task blimp:x"),
    ("evaluate", "zero-shot-curve x --output x"),
    ("convert", "import hf:x --run x"),
    ("convert", "export x --to hf:x"),
    ("report", "x --output x.html"),
    ("show", "debug/gpt --data.store x"),
    ("show", "--task cola"),
    ("show", "."),
    ("aot", "debug/gpt"),
    ("bench", "--model gpt1"),
    ("doctor", "debug/gpt"),
    ("doctor", ""),
)
# Flags of scripts of launch/, which the tests in tests/launch run, of lm_eval, of pytest, and of XLA.
OTHERS = {"--help", "--dry-run", "--spot", "--reserved", "--slices", "--retries", "--name", "--zone", "--project"}
OTHERS |= {"--type", "--image", "--tasks", "--model", "--model_args", "--device", "--max_batch_size", "--use_cache"}
OTHERS |= {"--output_path", "--prefix-token-id", "--update-golden", "--xla_gpu_deterministic_ops=true"}
OTHERS |= {"--xla_backend_extra_options=-nvptx-allow-ftz-atomics"}
# For each notebook an expression of its names that holds at its end if what the text says is true.
CLAIMS = {
    "compare_runs": '[name for name in configs[0] if configs[0][name] != configs[1][name]] == ["optimizer"]'
    ' and "rate_0.002" in Path("report.html").read_text(encoding="utf-8")',
    "finetune_exported": "all(map(np.array_equal, ours, theirs)) and 0 <= results['test']['accuracy']['mean'] <= 1",
    "quickstart": "records[-1]['validation_loss'] < records[0]['validation_loss'] and len(tuned.predict(new)) == 3",
}
SHORTER = (
    (r'"num_steps": \d+', '"num_steps": 20'),
    (r'"num_epochs": \d+', '"num_epochs": 1'),
    (r"PACKAGES = .*", 'PACKAGES = ["matplotlib", "sklearn"]'),
    (r"corpus\[:2500\]", "corpus[:800]"),
    (r"corpus\[2500:\]", "corpus[800:2000]"),
)
# Runs the cells in the file of its first argument, as a kernel does, and then evaluates its second.
RUNNER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for line, language, text in json.load(open(sys.argv[1], encoding="utf-8")):
    if language == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
    else:
        exec(compile(text, f"the cell at line {line}", "exec"), names)
assert eval(sys.argv[2], names), sys.argv[2]
"""
GROUPS = {"--mesh", "--data", "--model", "--optimizer", "--execution", "--objective", "--options", "--custom"}
FENCED = {"bash", "python", "text", "json", "toml"}
FENCED |= {"{toctree}", "{include}", "{eval-rst}", "{image}", "{code-cell}", "{math}"}
TEXTS = {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in documents()}
SHELL = {
    name: [block for block in blocks(text) + cells(text) if block.language == "bash"] for name, text in TEXTS.items()
}
RUN = [name for name, found in SHELL.items() if any("run" in block.marks for block in found)]


@pytest.fixture(scope="session")
def option_pages():
    """The module that writes the generated pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "docs")
        return importlib.import_module("option_pages")


def test_every_block_names_its_language():
    """Fails on a block that the tests below would not read."""
    found = {(name, block.line, block.language) for name, text in TEXTS.items() for block in blocks(text)}
    assert not [one for one in found if one[2] not in FENCED]
    assert not [block for found in SHELL.values() for block in found if set(block.marks) - {"run"}]


@pytest.mark.parametrize("name", [name for name, found in SHELL.items() if found])
def test_every_command_is_parsed(name, monkeypatch, tmp_path):
    """Fails on a flag, a choice or a config that the parser of the command refuses, and on a script that is missing."""
    monkeypatch.chdir(tmp_path)
    copied = REPOSITORY / "configs/debug/gpt.py"
    (tmp_path / "mine.py").write_text(copied.read_text(encoding="utf-8"), encoding="utf-8")  # "a config of your own"
    wrong = {}
    for block in SHELL[name]:
        for words in commands(block.text):
            line = " ".join(words)
            if words[0].startswith("launch/") and not (REPOSITORY / words[0]).is_file():
                wrong[line] = "there is no such script"
            if (command := of_jaxlm(words)) is None:
                continue
            if command[0] == "show" and not command[1][0].startswith("-") and not is_config(command[1][0]):
                Path(command[1][0]).mkdir(parents=True, exist_ok=True)  # show asks what a directory is before its flags
            if (why := parse(*command, monkeypatch)) is not None:
                wrong[line] = why
    assert not wrong


def printed_flags() -> dict[str, str]:
    """The flags that stand between backticks in the text, with their values, and a page that has them."""
    found: dict[str, str] = {}
    for name, text in TEXTS.items():
        if name == "docs/messages.md":  # its first column has messages, which a test of its own finds
            text = re.sub(r"^\| `[^`]+` \|", "|", text, flags=re.MULTILINE)
        for span in re.findall(r"`([^`]+)`", without_blocks(text)):
            words = " ".join(span.split())
            if words.startswith(("launch/", "python -m pytest", "gcloud", "pip ")):
                continue
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*(?:=\S+)?(?: (?!--|…)[^\s…]+)*", words):
                first = flag.split()[0]
                if first not in OTHERS | GROUPS and not first.endswith(("-", ".")):
                    found.setdefault(flag, name)
    return found


def beginnings_of(name: str, fields: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The beginnings of the commands that have a field of this name, or all of them for a short spelling."""
    field = name.removeprefix("--").partition("=")[0].replace("-", "_")
    fitting = [one for one in BEGINNINGS if {field, field.replace("no_", "", 1)} & fields[one[0]]]
    return fitting or list(BEGINNINGS)


def test_every_flag_in_the_text_is_one_of_some_command(monkeypatch, option_pages):
    """Fails on a flag that was renamed, or that is shown with a value that the parser refuses."""
    fields = {
        command: {name for kind in kinds.values() for name, _ in fields_of(kind)}
        for command, kinds in option_pages.COMMANDS.items()
    }

    def known(name: str, values: list[str], command: str, beginning: str) -> bool:
        placeholder = all(value.isupper() or value in ("n", "gs://") for value in values)  # `--data.masks`, `--run RUN`
        why = parse(command, [*beginning.split(), name, *([] if placeholder else values)], monkeypatch)
        return not why or (placeholder and "is not an option" not in why)

    flags = printed_flags()
    assert len(flags) > 100
    wrong = {}
    for flag, page in flags.items():
        try:
            name, *values = shlex.split(flag)
        except ValueError:  # an apostrophe
            name, *values = flag.split()
        if not any(known(name, values, *beginning) for beginning in beginnings_of(name, fields)):
            wrong[flag] = page
    assert not wrong


def test_a_flag_that_does_not_exist_is_found(monkeypatch):
    """The tests above would mean nothing if anything were accepted."""
    for words in ("--objective.masking.whole-word True", "--frozen True", "--no-such-flag 1"):
        assert parse("finetune", ["finetune/bert", "--run", "x", "--task", "cola", *words.split()], monkeypatch)
    lines = "# a comment\nmkdir -p x && python -m jaxlm.show 'a b' > out  # shown\ncat > f <<'END'\npython -m x\nEND\n"
    assert commands(lines)[:2] == [["mkdir", "-p", "x"], ["python", "-m", "jaxlm.show", "a b"]]
    assert not [words for words in commands(lines) if words[-1] == "x" and words[0] == "python"]


def test_every_config_in_the_text_exists():
    known = set(known_configs())
    for name, text in TEXTS.items():
        printed = set(re.findall(r"`((?:pretrain|finetune|debug)/\w+)`", text)) - {"finetune/NAME"}
        assert printed <= known, name


def test_links_between_pages_lead_somewhere(option_pages):
    """Fails on a link to a file that is not there; generated pages count as there."""
    there = {f"docs/generated/{name}" for name in option_pages.pages()}
    missing = []
    for name, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
            path, _, _ = target.partition("#")
            if not path or re.match(r"[a-z]+:", path):
                continue
            file = os.path.normpath(Path(name).parent / path)
            if file not in there and not (REPOSITORY / file).exists():
                missing.append((name, target))
    assert not missing


def test_every_page_is_in_the_table_of_contents():
    """Fails when a page or a notebook is added without an entry in docs/index.md."""
    listed = {entry for block in blocks(TEXTS["docs/index.md"]) for entry in block.text.split()}
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in TEXTS if name.startswith("docs/")} - {"index"}
    assert pages <= listed, pages - listed


def test_every_message_on_the_page_exists():
    """Fails when a message that docs/messages.md explains is reworded in the program."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "jaxlm").rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node.args[0] for node in nodes if isinstance(node, ast.Call) and node.args]
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value]
    said = [re.sub(r"…+", "…", text_of(node)) for node in calls + returned]
    shown = re.findall(r"^\| `([^`]+)` \|", TEXTS["docs/messages.md"], flags=re.MULTILINE)
    assert len(shown) > 40
    assert not [message for message in shown if not any(message in text for text in said)]


def test_option_pages_have_every_flag(option_pages):
    """Fails when a field of a command has no entry in the generated pages, or an entry has no text."""
    text = "\n".join(option_pages.pages().values())
    entries = set(re.findall(r"^`(-*[\w.-]+)", text, flags=re.MULTILINE))
    missing = set()
    for kinds in option_pages.COMMANDS.values():
        for name in {name for kind in kinds.values() for name, _ in fields_of(kind)} - {"model.kind", "of_lm_eval"}:
            if not {f"--{name}".replace("_", "-"), name.upper()} & entries:
                missing.add(name)
    assert not missing
    assert not re.findall(r"^: *$", text, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("name", RUN)
def test_marked_blocks_run(name, tmp_path, monkeypatch):
    """Fails when a command of a block marked `run` fails; those of a page run in order, in one directory.

    Commands of jaxlm run in this process, all others in a shell. Fails, too, when an exported and imported model
    continues the tour's prompt with another text, or a page writes beside its one folder.
    """
    monkeypatch.chdir(tmp_path)
    generated = []
    for step in steps("\n".join(block.text for block in SHELL[name] if "run" in block.marks)):
        if isinstance(step, str):
            shell = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", step], capture_output=True, text=True, check=False
            )
            assert shell.returncode == 0, f"{step}: {shell.stderr}"
            continue
        ended = run_here(*step)
        assert ended.code == 0, f"{' '.join(step)}: {ended.errors[-2000:]}"
        if step[0] == "generate" and "--seed" in step:
            generated.append(ended.output)
    if name == "docs/tour.md":  # it ends in text of its books and in right labels
        assert len(generated) == 2 and generated[0] == generated[1] and "the cat sat on the mat" in generated[0]
        labelled = (tmp_path / "toy/labelled.csv").read_text().splitlines()[1:]
        assert [line.split(",")[2] for line in labelled] == ["cat", "dog"]
    if name in ("docs/tour.md", "docs/own_files.md"):  # one folder, which git ignores
        assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.campaign] * (path.stem != "quickstart"))
        for path in notebooks()
    ],
)
def test_notebooks_run(path, tmp_path):
    """Fails when a cell raises, a command in it fails, the page would show a warning, or its text is not true.

    The cells run in order, in a new process and an empty directory, without Jupyter. Text and training are shortened
    here; the build of the documentation has all of both, and the notebooks that are left out by default.
    """
    text = path.read_text(encoding="utf-8")
    for pattern, shorter in SHORTER:
        text = re.sub(pattern, shorter, text)
    found = cells(text)
    assert found
    file = tmp_path / "cells.json"
    file.write_text(json.dumps([(one.line, one.language, one.text) for one in found]), encoding="utf-8")
    directory = tmp_path / "empty"
    directory.mkdir()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),  # one device, unlike the other tests
        "MPLBACKEND": "agg",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
    }
    words = [sys.executable, "-c", RUNNER, file, CLAIMS[path.stem]]
    ended = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert not ended.stderr


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    """Fails on a warning of Sphinx: a dead link within the site, a page in no list, an unknown name, a failing cell."""
    for package in ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: launch/setup.sh cpu docs")
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY / "docs", source / "docs", ignore=shutil.ignore_patterns("generated"))
    for name in ("jaxlm", "configs", "launch", "README.md", "CHANGELOG.md"):
        (source / name).symlink_to(REPOSITORY / name)
    words = ["-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html", source / "docs", tmp_path / "site"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(source)}

    def build() -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)

    built = build()
    assert built.returncode == 0, built.stderr[-4000:]
    page = (tmp_path / "site/generated/pretraining-config.html").read_text(encoding="utf-8")
    assert "--num-steps" in page
    notebook = (tmp_path / "site/notebooks/quickstart.html").read_text(encoding="utf-8")
    assert "accuracy on test: 0." in notebook and "<img" in notebook
    assert "stderr" not in notebook, "a cell shows a warning"
    assert sorted(path.name for path in (source / "docs/notebooks").iterdir()) == [path.name for path in notebooks()]
    assert not re.search(r'<(script|link)[^>]*(src|href)="(https?:)?//', page), "a page loads nothing from elsewhere"

    check_pages(tmp_path / "site")

    with (source / "docs/speed.md").open("a", encoding="utf-8") as file:
        file.write("\n[one](nowhere.md) [two](memory.md#no-such-heading)\n")
    refused = build()
    assert refused.returncode != 0 and "nowhere.md" in refused.stderr and "no-such-heading" in refused.stderr


def check_pages(site: Path) -> None:
    """Fails when a page has no search box or two, a command runs off its block, or a formula is not typeset."""
    index = (site / "index.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<button class="[^"]*search-button-field', index)) == 1
    assert "copybutton.js" in index
    table = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("\n## Systems\n")[1].split("\n## ")[0]
    systems = re.findall(r"\(docs/(\w+)\.md\) \|$", table, re.MULTILINE)
    assert len(systems) == 14 and all(f'href="{name}.html"' in index.split("<article")[1] for name in systems)
    for path in site.glob("*.html"):
        for block in re.findall(r"highlight-bash.*?<pre>(.*?)</pre>", path.read_text(encoding="utf-8"), re.DOTALL):
            lines = html.unescape(re.sub(r"<[^>]*>", "", block)).split("\n")
            assert not [line for line in lines if len(line) > 76 and re.search(r" --[a-z].* --[a-z]", line)], path.name
    for name in ("gpt1", "lstm", "transformer_xl", "ulmfit"):
        assert "<math " in (site / f"{name}.html").read_text(encoding="utf-8")
