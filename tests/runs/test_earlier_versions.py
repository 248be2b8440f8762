"""Runs of the oldest commit that this version reads, and of releases, are opened and continued.

Fails when a config.json, a task.json, a store, a tokenizer or a checkpoint of an earlier version is refused, or is read
with another meaning: the continued run then has other losses than its own version computed. The runs of 192edfa have
dropout masks that are others since: after the last checkpoint their losses agree as those of two seeds of dropout do.
Since 0.1.0 masks do not change, and all losses agree.
"""

import json
from pathlib import Path

import jax
import pytest
from earlier_runs import FIRST_RELEASE, OLDEST
from toy_runs import run_here

from jaxlm.data.config import MEMBERS
from jaxlm.inference.loaded_run import run_config, saved_task
from jaxlm.models import FAMILIES
from jaxlm.runs.directory import RunDirectory
from jaxlm.training.config import FinetuneConfig, PretrainConfig

# A model with projected tails was trained without the projection.
ASKED = {
    "lstm": ("--data.reset-probability", 0.0),  # another value in today's debug/lstm
    "transformer_xl": ("--model.adaptive.clusters", "unprojected", "--data.reset-probability", 0.0),
}
LOSSES = ("loss", "validation_loss", "dev_loss", "gradient_norm")


def each(kind: str) -> list:
    """Return a parameter for each pretraining or fine-tuning of the archives, with its archive."""
    archives = (OLDEST, FIRST_RELEASE)
    return [pytest.param(one, name, id=f"{one.version}-{name}") for one in archives for name in getattr(one, kind)]


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], name, line[name]) for line in lines for name in LOSSES if name in line]


def same(found: list[tuple], expected: list[tuple], until: int) -> None:
    """Compare exactly up to a step, and afterwards as far as other masks leave it."""
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected] and found[-1][0] == 4
    for (step, name, loss), (*_, wanted) in zip(found, expected, strict=True):
        tolerance = 1e-4 if step <= until else 0.5 if name == "gradient_norm" else 0.05
        assert loss == pytest.approx(wanted, rel=tolerance), (step, name)


def test_there_is_one_of_each_kind(directory):
    """Fails when a family, a layout or a kind of run is not among the runs that are continued below."""
    kinds, layouts = set(), set()
    for archive in (OLDEST, FIRST_RELEASE):
        place = archive.unpack(directory / archive.version)
        for names, kind in ((archive.pretrainings, PretrainConfig), (archive.finetunings, FinetuneConfig)):
            configs = [run_config(RunDirectory(place / "runs" / name)) for name in names]
            assert all(isinstance(config, kind) for config in configs)
            kinds |= {config.model.kind for config in configs}
            if kind is PretrainConfig:
                layouts |= {config.data.layout for config in configs}
                assert all((config.select, config.patience) == ("last", None) for config in configs)
    assert kinds == set(FAMILIES) and layouts == set(MEMBERS)


@pytest.mark.parametrize(("archive", "name"), each("pretrainings"))
def test_a_pretraining_goes_on(directory, archive, name):
    run = archive.unpack(directory) / "runs" / name
    again, oldest = name in archive.without_checkpoint, archive is OLDEST
    saved, expected = json.loads((run / "config.json").read_text()), losses(run)
    ended = run_here("pretrain", *archive.pretrainings[name].split(), "--run", f"runs/{name}", *ASKED.get(name, ()))
    assert ended.code == 0 and ("resumed at step 2" in ended.errors) != again, ended.errors
    same(losses(run), expected, until=(0 if again else 2) if oldest else 4)
    assert ("dropout masks of earlier versions" in ended.errors) == oldest
    assert json.loads((run / "config.json").read_text()) == saved
    shown = run_here("show", f"runs/{name}")
    assert shown.code == 0, shown.errors


@pytest.mark.parametrize(("archive", "name"), each("finetunings"))
def test_a_fine_tuning_goes_on(directory, archive, name):
    archive.unpack(directory)
    run, complete = directory / "runs" / name, directory / "complete" / name
    saved = json.loads((run / "config.json").read_text())
    ended = run_here("finetune", *archive.finetunings[name].split(), "--run", f"runs/{name}")
    assert ended.code == 0 and "resumed at step 2" in ended.errors, ended.errors
    same(losses(run), losses(complete), until=2 if archive is OLDEST else 4)
    assert ("dropout masks of earlier versions" in ended.output + ended.errors) == (archive is OLDEST)
    assert json.loads((run / "config.json").read_text()) == saved
    found, expected = (
        [json.loads(line) for line in (place / "predictions.jsonl").read_text().splitlines()]
        for place in (run, complete)
    )
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        tolerance = 0.01 if archive is OLDEST else 1e-5
        assert jax.tree.leaves(line["scores"]) == pytest.approx(jax.tree.leaves(wanted["scores"]), abs=tolerance)


def test_a_complete_fine_tuning_is_read_and_takes_no_new_option(directory):
    """Fails when an option that was added since changes such a run, or a command that reads it."""
    OLDEST.unpack(directory)
    command = (*OLDEST.finetunings["finetune_gpt"].split(), "--run", "complete/finetune_gpt")
    ended = run_here("finetune", *command)
    assert ended.code == 0 and "is complete" in ended.output, ended.errors
    ended = run_here("finetune", *command, "--special-tokens", "end")
    assert ended.code == 2 and "special_tokens: absent -> " in ended.errors.replace("-tokens", "_tokens")
    ended = run_here(
        "predict", "--run", "complete/finetune_gpt", "--input", "rows.tsv", "--output", "predictions.jsonl"
    )
    assert ended.code == 0, ended.errors
    kept = (directory / "complete" / "finetune_gpt" / "predictions.jsonl").read_text().splitlines()
    found = (directory / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in found] == [json.loads(line)["prediction"] for line in kept]
    assert saved_task(RunDirectory(directory / "complete" / "finetune_gpt")).special_tokens == "gpt1"
    ended = run_here("evaluate", "ensemble", "complete/finetune_gpt", "complete/finetune_gpt")
    assert ended.code == 0, ended.errors
