"""The files that decide the numbers of a plain GPT's step are those that docs/how_a_step_works.md lists."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import jax
import pytest
from paths import REPOSITORY
from toy_store import write_store

from jaxlm.config import load_config
from jaxlm.data.layouts.layout import Reading
from jaxlm.data.loader import batch_at, phased_rows
from jaxlm.distributed.mesh import make_mesh, to_devices, use_mesh
from jaxlm.text.units import bytes_tokenizer
from jaxlm.training.config import PretrainConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import make_program, run_settings

PAGE = (REPOSITORY / "docs" / "how_a_step_works.md").read_text(encoding="utf-8")
ONLY_FIELDS = {"jaxlm/training/config.py"}  # the step has its values, and no function of it runs


def listed(start: str, end: str) -> list[str]:
    """Return the paths that a part of the page names."""
    part = PAGE[PAGE.index(start) : PAGE.index(end)]
    found = re.findall(r"`((?:jaxlm|configs)/[a-z0-9_/.]+)`", part)
    assert found and all((REPOSITORY / path).exists() for path in found), found
    return found


STEP = listed("These eleven files", "They use a library")
LIBRARY = listed("They use a library", "`tests/test_walk.py`")
FEATURES = listed("| file | content |", "## One batch")


def entered(build: Callable[[], None]) -> set[str]:
    """Return the files of this repository whose functions run in a call; importing a module does not count."""
    codes = set()

    def profile(frame: FrameType, event: str, _) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            codes.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        build()
    finally:
        sys.setprofile(before)
    paths = (Path(name) for name in codes)
    files = {path.relative_to(REPOSITORY).as_posix() for path in paths if path.is_relative_to(REPOSITORY)}
    return {file for file in files if file.startswith(("jaxlm/", "configs/"))}


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Callable[..., None]:
    """A function that makes a batch of debug/gpt and traces its step, with other values of some fields."""
    jax.devices()  # that the process starts is no part of a step
    store = write_store(tmp_path_factory.mktemp("store") / "store", ["to be or not to be " * 99], bytes_tokenizer())

    def trace(**fields) -> None:
        config = load_config("debug/gpt", PretrainConfig)
        config = replace(config, model=replace(config.model, vocab_size=store.vocab_size), **fields)
        sizes = {"length": config.length, "seed": 0, "batch_size": 8}
        batch = batch_at(phased_rows(config.data, Reading([store], **sizes), 100), 3, 8)
        mesh = make_mesh(config.mesh)
        with use_mesh(mesh):
            program = make_program(make_pretraining(config, None), config, mesh)
            program.step.trace(program.abstract, to_devices(batch, mesh, 8), run_settings(config, 100))

    return trace


def test_a_step_is_in_the_files_of_the_page(step):
    """Fails when code of a file that the page does not list decides a number, or a listed file takes no part."""
    found = entered(step)
    assert len(STEP) == len(set(STEP)) == 11
    assert set(STEP) - found == ONLY_FIELDS
    strays = {file for file in found - set(STEP) if not any(Path(file).is_relative_to(part) for part in LIBRARY)}
    assert not strays, f"a plain GPT enters {sorted(strays)}"


def test_a_feature_enters_its_file(step):
    """Fails when the walk cannot see a file of the page's table, so that the test above would hold nothing."""
    found = entered(lambda: step(ema=0.5))
    assert {file for file in FEATURES if file in found} == {"jaxlm/training/weights.py"}
