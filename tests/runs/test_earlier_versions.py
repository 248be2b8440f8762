"""Runs of commit 192edfa, the oldest ones that this version reads, are opened and continued.

Fails when a config.json, a task.json, a store, a tokenizer or a checkpoint of that commit is refused, or is read with
another meaning: the continued run then has other losses than its own commit computed. These runs have dropout, whose
masks are others since: after the last checkpoint losses agree as those of two seeds of dropout do.
"""

import json
from pathlib import Path

import pytest
from earlier_runs import FINETUNINGS, PRETRAININGS, WITHOUT_CHECKPOINT, unpack
from toy_runs import run_here

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


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(unpack(tmp_path))
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
    """And of each family that the commit had."""
    for names, kind in ((PRETRAININGS, PretrainConfig), (FINETUNINGS, FinetuneConfig)):
        configs = [run_config(RunDirectory(directory / "runs" / name)) for name in names]
        assert all(isinstance(config, kind) for config in configs)
        if kind is PretrainConfig:
            assert (
                {config.model.kind for config in configs}
                == {"gpt", "bert", "lstm", "awd_lstm", "transformer_xl", "character_transformer"}
                <= set(FAMILIES)
            )
            assert {config.data.layout for config in configs} == {"windows", "packed", "pairs", "streams"}
            assert all((config.select, config.patience) == ("last", None) for config in configs)


@pytest.mark.parametrize("name", PRETRAININGS)
def test_a_pretraining_goes_on(directory, name):
    run = directory / "runs" / name
    saved, expected = json.loads((run / "config.json").read_text()), losses(run)
    ended = run_here("pretrain", *PRETRAININGS[name].split(), "--run", f"runs/{name}", *ASKED.get(name, ()))
    assert ended.code == 0 and ("resumed at step 2" in ended.errors) == (name not in WITHOUT_CHECKPOINT), ended.errors
    same(losses(run), expected, 0 if name in WITHOUT_CHECKPOINT else 2)
    assert "dropout masks of earlier versions" in ended.errors
    assert json.loads((run / "config.json").read_text()) == saved
    shown = run_here("show", f"runs/{name}")
    assert shown.code == 0, shown.errors


@pytest.mark.parametrize("name", FINETUNINGS)
def test_a_fine_tuning_goes_on(directory, name):
    run, complete = directory / "runs" / name, directory / "complete" / name
    saved = json.loads((run / "config.json").read_text())
    ended = run_here("finetune", *FINETUNINGS[name].split(), "--run", f"runs/{name}")
    assert ended.code == 0 and "resumed at step 2" in ended.errors, ended.errors
    same(losses(run), losses(complete), 2)
    assert "dropout masks of earlier versions" in ended.output + ended.errors
    assert json.loads((run / "config.json").read_text()) == saved
    found, expected = (
        [json.loads(line) for line in (place / "predictions.jsonl").read_text().splitlines()]
        for place in (run, complete)
    )
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line["scores"] == pytest.approx(wanted["scores"], abs=0.01)


def test_a_complete_fine_tuning_is_read_and_takes_no_new_option(directory):
    """Fails when an option that was added since changes such a run, or a command that reads it."""
    command = (*FINETUNINGS["finetune_gpt"].split(), "--run", "complete/finetune_gpt")
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
