"""The files of a release: an sdist, the wheel made from it, and what is beside them in the repository.

Fails when something that a command needs is missing in the wheel, which no test in a checkout would notice, or when a
workflow, a template or the Dockerfile names a file that does not exist.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from paths import REPOSITORY
from test_launch import run

import jaxlm
from jaxlm.__main__ import COMMANDS

BESIDE = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff")
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
# Package data, read as the commands read it.
USE = """
from jaxlm.config import find_config
from jaxlm.zero_shot.prompted_rows import read_template
print(find_config("pretrain/gpt1"))
print(read_template("squad", None, ("document", "question")).name)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources that a release is built from."""
    copy = tmp_path_factory.mktemp("release") / "source"
    for name in ("jaxlm", "configs", "launch"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in BESIDE:
        shutil.copy(REPOSITORY / name, copy / name)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    return copy


@pytest.fixture(scope="module")
def built(source) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, as by an installation from PyPI without a wheel."""
    dist = source.parent / "dist"
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(dist)!r})"
    made = run(sys.executable, "-c", code, cwd=source)
    assert made.returncode == 0, made.stderr
    (sdist,) = dist.glob("*.tar.gz")
    made = run(*pip(), "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", dist, sdist)
    assert made.returncode == 0, made.stderr
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


def pip(*words):
    return sys.executable, "-m", "pip", "--disable-pip-version-check", *words


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_they_should(source, built):
    sdist, wheel = built
    version = f"jaxlm-{jaxlm.__version__}"
    assert sdist.name == f"{version}.tar.gz" and wheel.name == f"{version}-py3-none-any.whl"
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert {*BESIDE, "launch/constraints.txt"} <= names and not [name for name in names if name.startswith("tests/")]

    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(source)) for path in (source / "jaxlm").rglob("*.py")}
    expected |= {f"jaxlm/{path.relative_to(source)}" for path in (source / "configs").rglob("*.py")}
    others = {path for path in (source / "jaxlm").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    expected |= {str(path.relative_to(source)) for path in others}
    assert others and expected <= names, sorted(expected - names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "launch/", "configs/"))]


@pytest.mark.slow
def test_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """Every command starts from the wheel alone, outside a checkout, beside the packages of this environment.

    Fails when the wheel lacks a config, a prompt or a module, or its console script is missing.
    """
    bare, work = tmp_path / "bare", tmp_path / "work"
    work.mkdir()
    assert run(sys.executable, "-m", "venv", "--without-pip", bare).returncode == 0
    python = bare / "bin" / "python"
    done = run(*pip("--python", python, "install", "--quiet", "--no-deps", "--no-index", built[1]))
    assert done.returncode == 0, done.stderr
    (site,) = bare.glob("lib/python*/site-packages")
    # A path in a .pth is searched after the wheel, and its own .pth files, of editable installations, are not read.
    (site / "others.pth").write_text("".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib")))

    def jaxlm_(*words, program=bare / "bin" / "jaxlm"):
        clean = {"PYTHONPATH": "", "JAX_PLATFORMS": "cpu"}
        ended = run(program, *words, cwd=work, env=clean)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert jaxlm_("--version") == f"jaxlm {jaxlm.__version__}\n"
    for command in COMMANDS:
        assert jaxlm_(command, "--help").startswith("usage: "), command
    assert "--model.num-layers" in jaxlm_("pretrain", "pretrain/bert_base", "--help")
    found, prompts = jaxlm_("-c", USE, program=python).splitlines()
    assert Path(found) == site / "jaxlm" / "configs" / "pretrain" / "gpt1.py" and prompts == "prompts/squad.txt"

    (work / "text.txt").write_text("It was a dark night, and the wind was cold. " * 200)
    jaxlm_("prepare", "--source", "text:text.txt", "--tokenizer", "train-sentencepiece:330", "--output", "store")
    assert "wind was cold. It was a dark night" in jaxlm_("show", "debug/gpt", "--data.store", "store")


def release(copy: Path, *words) -> subprocess.CompletedProcess:
    return run(copy / "launch" / "release.sh", *words, env={"PYTHON": "false"}, cwd=copy.parent)


def test_release_needs_its_version_as_tag_and_in_the_changelog(tmp_path):
    """Fails when a tag of another version, or a changelog without a section for it, would be built."""
    for name in ("launch/release.sh", "jaxlm/version.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    asked = release(tmp_path, "v99.0.0")
    assert asked.returncode == 2 and f"must be v{jaxlm.__version__}, " in asked.stderr and "got v99.0.0" in asked.stderr
    assert release(tmp_path).returncode == 2
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{jaxlm.__version__}]\n\n## [0.0.1]\n\n- old\n")
    asked = release(tmp_path, f"v{jaxlm.__version__}")
    assert asked.returncode == 2 and f"a section ## [{jaxlm.__version__}]" in asked.stderr


def test_version_is_in_one_place():
    """Fails when another file repeats the version, which the next release would forget, or the citation has another."""
    attribute = "version = attr: jaxlm.version.__version__"
    assert attribute in (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
    for name in ("setup.cfg", "pyproject.toml", "launch/Dockerfile", "jaxlm/__init__.py", "jaxlm/__main__.py"):
        assert jaxlm.__version__ not in (REPOSITORY / name).read_text(encoding="utf-8"), name
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    heading = f"## [{cited['version']}] - {cited['date-released']}"
    assert cited["version"] == jaxlm.__version__
    assert heading in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists(path):
    """Fails when a workflow is not YAML, runs a script that is not there, or may write more than it needs to."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    assert steps and all("@" in step["uses"] for step in steps if "uses" in step)
    scripts = {word for step in steps for word in re.findall(r"(?:\.ci|launch)/[\w.]+", step.get("run", ""))}
    missing = {name for name in scripts if not (REPOSITORY / name).is_file()}
    assert missing <= {"launch/docs.sh"}, missing
    called = [job["uses"] for job in workflow["jobs"].values() if "uses" in job]
    assert all((REPOSITORY / name).is_file() for name in called)


def test_the_workflows_are_those_of_the_repository():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    assert ".ci/run" in (REPOSITORY / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    forms = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [path.stem for path in forms] == ["bug", "config", "feature", "question"]
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        ids = [part["id"] for part in form.get("body", ())]
        assert len(set(ids)) == len(ids) and ("name" in form or path.stem == "config")


def test_citation_is_complete():
    """Fails when CITATION.cff is not YAML, or lacks a field that its format requires."""
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["license"] == "Apache-2.0"
    assert all({"type", "title", "authors"} <= reference.keys() for reference in citation["references"])


def test_dockerfile_copies_what_exists():
    """Fails when a file that the image is made of is missing, or its kinds are not those of launch/setup.sh."""
    text = (REPOSITORY / "launch" / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "setup.cfg", "LICENSE", "README.md", "jaxlm", "configs", "launch"} == set(copied)
    assert all((REPOSITORY / name).exists() for name in copied)
    assert 'launch/setup.sh "$KIND"' in text and "cpu | gpu | tpu)" in (REPOSITORY / "launch/setup.sh").read_text()
