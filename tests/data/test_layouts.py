"""A layout is one class: no other code asks which one it is, and it answers without JAX."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.data.config import MEMBERS

ROOT = Path(__file__).resolve().parent.parent.parent
CLASSES = "|".join(member.__name__ for member in MEMBERS.values())
NAMES = "|".join(MEMBERS)
ASKS = re.compile(rf"layout (?:==|!=)|[!=]= \"(?:{NAMES})\"|isinstance\([^()]*\b(?:{CLASSES})\b")


def questions(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if ASKS.search(line)]


def test_no_code_asks_which_layout_it_is():
    """Fails when a layout is compared by name or class: what differs is asked of the object."""
    earlier = {ROOT / "jaxlm/runs/config.py"}  # completes configs that have no objects yet
    files = [path for path in sorted((ROOT / "jaxlm").rglob("*.py")) if path not in earlier]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): asked for path in files if (asked := questions(path.read_text("utf-8")))}
    assert not found


@pytest.mark.parametrize(
    "line", ['if data.layout == "packed":', "if isinstance(config.data, Streams):", 'if run.layout != "windows":']
)
def test_questions_are_found(line):
    assert questions(line) == [line]


def test_layouts_do_not_import_jax():
    """Fails when a config cannot be checked before JAX is imported."""
    checks = "[member().check() for member in config.MEMBERS.values()]"
    program = f"import sys; from jaxlm.data import config; {checks}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
