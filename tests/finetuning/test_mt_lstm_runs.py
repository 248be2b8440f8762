"""Runs of the MT-LSTM on several meshes. Its numbers are in tests/models/test_mt_lstm_parity.py."""

import random

import numpy as np
import pytest
from toy_runs import metrics, run_here
from toy_store import write_store

from jaxlm.text import train_words

pytestmark = pytest.mark.usefixtures("two_devices")
LETTERS = "abcdefgh"
COLUMNS = "--task custom --custom.kind text --custom.text source --custom.label target".split()
TOY = "--num-epochs 1 --batch-size 8 --options.target-length 10 --length 10".split()


@pytest.fixture
def words(tmp_path):
    """The arguments of a run on 24 sequences of letters and their reversals, three steps of eight."""
    rng = random.Random(1)
    rows = [rng.choices(LETTERS, k=rng.randint(2, 8)) for _ in range(24)]
    lines = [f"{' '.join(row)}\t{' '.join(reversed(row))}\n" for row in rows]
    for part, some in (("train", lines), ("dev", lines[:8])):
        (tmp_path / f"{part}.tsv").write_text("source\ttarget\n" + "".join(some))
    write_store(tmp_path / "store", {"text": [" ".join(LETTERS)]}, train_words([" ".join(LETTERS)], 20))
    files = ("--custom.train", tmp_path / "train.tsv", "--custom.dev", tmp_path / "dev.tsv")
    return ["debug/mt_lstm", *files, *COLUMNS, *TOY, "--tokenizer", f"store:{tmp_path / 'store'}"]


@pytest.mark.usefixtures("eight_devices")
def test_another_mesh_gives_the_same_losses(words, tmp_path):
    """Against eight rows on a device each, both with dropout. Fails when the state of the decoder or the source of the
    attention is sharded otherwise than its rows, a kernel's gradient is summed over too few devices, or a dropout mask
    depends on the devices.
    """
    for name, mesh in (("rows", "--mesh.data 8"), ("parts", "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2")):
        ended = run_here("finetune", *words, "--run", tmp_path / name, *mesh.split())
        assert ended.code == 0, ended.errors
    found, wanted = (metrics(tmp_path / name, "loss") for name in ("parts", "rows"))
    assert found.keys() == wanted.keys() and len(set(wanted.values())) == 3
    for step, value in wanted.items():
        np.testing.assert_allclose(found[step], value, rtol=1e-4, err_msg=f"step {step}")
