"""The pins of launch/constraints.txt resolve on every supported Python, as uv finds: pip resolves for its own alone.

Whether jaxlm works there is another question, which docs/testing.md answers.
"""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11.9", "3.12", "3.13", "3.14")  # the extra docs needs 3.11.5
# The index has sources of these alone; they are pure Python.
SOURCES = ("promise", "rouge-score", "sqlitedict", "word2number")
# What PyTorch's CUDA build takes with it, beside the pinned torch.
UNPINNED = re.compile(r"cuda-|nvidia-|triton")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = set(SETUP["options.extras_require"])


def resolve(version: str, extras: set[str], tmp_path: Path) -> subprocess.CompletedProcess:
    """Ask uv for all packages of the extras on Linux, as wheels and within the pins."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed; it comes with the extra [test]")
    groups = [SETUP["options"]["install_requires"], *(SETUP["options.extras_require"][name] for name in sorted(extras))]
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("\n".join(groups), encoding="utf-8")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += ["--python-version", version, "--python-platform", "x86_64-manylinux_2_31", "--only-binary", ":all:"]
    command += [word for name in SOURCES for word in ("--no-binary", name)]
    command += ["--constraint", str(ROOT / "launch" / "constraints.txt"), str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 2 and re.search("Failed to fetch|error sending request|Could not connect", done.stderr):
        pytest.skip("the package index cannot be reached")
    return done


BETWEEN = [pytest.mark.campaign]  # its pins are those of 3.13


@pytest.mark.parametrize("version", [pytest.param(one, marks=BETWEEN * (one == "3.12")) for one in VERSIONS])
def test_the_pins_of_all_extras_resolve(version, tmp_path):
    """Fails when a pin has no wheel for a supported Python, two pins contradict, or a package has no pin."""
    done = resolve(version, EXTRAS - ({"tfds"} if version == "3.14" else set()), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (ROOT / "launch" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.split("==|;", line)[0].strip().lower().replace("_", "-") for line in lines if "==" in line}
    resolved = {line.partition("==")[0].split("[")[0] for line in done.stdout.splitlines() if "==" in line}
    assert {"jax", "flax", "torch", "sphinx", "lm-eval", "gcsfs"} <= resolved
    assert {name for name in resolved - pinned if not UNPINNED.match(name)} == set()


@pytest.mark.campaign
def test_tensorflow_has_no_wheel_for_the_newest_python(tmp_path):
    """When this fails, launch/setup.sh need not refuse the extra tfds on Python 3.14 any longer."""
    done = resolve("3.14", {"tfds"}, tmp_path)
    assert done.returncode == 1 and "tensorflow-cpu" in done.stderr, done.stderr
