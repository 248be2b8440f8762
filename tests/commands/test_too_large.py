"""Models that the memory and checkpoints that the disk cannot hold: refused before the step is compiled."""

import re
import shutil
import time

import jax
import numpy as np
import pytest
from toy_runs import assert_one_line, make_stores, pretrain_arguments, run_here

from jaxlm.runs import remote
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training import program as program_module


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


def test_a_model_that_cannot_be_held_is_not_compiled(stores, tmp_path, monkeypatch):
    """Fails if 20 TB of parameters are compiled first, or if the bytes are not those of NumPy's arithmetic."""
    monkeypatch.setattr(program_module.CompiledStep, "prepare", None)
    given = ("--num-steps", 1, "--model.width", 65536, "--model.num-layers", 96, "--model.num-heads", 64)
    began = time.monotonic()
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *given))
    assert_one_line(ended, 2, "model must be small enough", "--mesh.fsdp")
    needed = float(re.search(r"gradients take ([\d,.]+) GB", ended.errors).group(1).replace(",", ""))
    kernels = 96 * 4 * 65536**2  # of attention: the toy's feed-forward layers stay narrow
    assert 1 < needed * 1e9 / (kernels * 4 * 4 * jax.local_device_count()) < 1.01, "four float32 numbers of each"
    assert time.monotonic() - began < 30 and not (tmp_path / "run").exists()


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_compilation(stores, tmp_path, monkeypatch):
    """Fails if the first save finds out, if a disk for one checkpoint and not for all that are kept is no news, or if
    the size is not that of the files.
    """
    usage, run = shutil.disk_usage(tmp_path), tmp_path / "run"
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: usage._replace(free=1500))
    with monkeypatch.context() as patch:
        patch.setattr(program_module.CompiledStep, "prepare", None)
        ended = run_here("pretrain", *pretrain_arguments(run, stores, "--num-steps", 4))
        assert_one_line(ended, 2, "--run must be on a disk with room for a checkpoint, which takes", "1.5 kB free")
        assert not run.exists()
    known = float(re.search(r"which takes ([\d.]+) kB", ended.errors).group(1)) * 1e3
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: usage._replace(free=1.5 * known))
    ended = run_here("pretrain", *pretrain_arguments(run, stores, "--num-steps", 4))
    assert ended.code == 0 and f"are free in {run}, and 4 more checkpoints of" in ended.errors, ended.errors
    stored = Checkpoints(run / "checkpoints", read_only=True).metadata(4)
    leaves = jax.tree.leaves(stored.tree)
    assert sum(np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves) == pytest.approx(known, rel=0.05)
