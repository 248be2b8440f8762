"""The trained length of a checkpoint: of phases, chains and imported models.

Fails on 2968321, which scored, generated and fine-tuned over all positions of a table whatever had been trained.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxlm.data.config import SentencePairs
from jaxlm.errors import InputError
from jaxlm.finetuning.run import notes_on_length
from jaxlm.models.bert import BERT_BASE
from jaxlm.models.gpt import GPTConfig
from jaxlm.objectives.config import MaskedLM
from jaxlm.runs.directory import RunDirectory
from jaxlm.tasks.token_rows import windows
from jaxlm.training.config import FinetuneConfig, PretrainConfig, resolved_json
from jaxlm.training.start import OF_START, check_trained, kept_start_length, trained_length

MODEL = GPTConfig(num_positions=512)
ROWS = PretrainConfig(model=MODEL, length=128, num_steps=100)
TUNED = FinetuneConfig(model=MODEL, length=64, num_steps=9)


def run_of(path, config, starts=(), **more):
    """A run directory without checkpoints; what it started from stands in `more`, or in starts.jsonl."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(resolved_json(config, {}) | more))
    lines = [json.dumps({"started_from": start}) for start in starts]
    (path / "starts.jsonl").write_text("".join(line + "\n" for line in lines))
    return RunDirectory(path)


def test_a_run_of_two_lengths_has_the_one_that_has_begun(tmp_path):
    data = SentencePairs(short_length=128, short_share=0.9)
    config = PretrainConfig(model=BERT_BASE, objective=MaskedLM(), data=data, length=512, num_steps=1000)
    run = run_of(tmp_path / "run", config, **{OF_START: None})
    assert [trained_length(run, step) for step in (0, 1, 899, 900, 901, 1000)] == [128, 128, 128, 128, 512, 512]


def test_an_imported_model_has_the_positions_that_its_tokenizer_named_or_all(tmp_path):
    """Fails when an import without a length is bounded by another field."""
    short = run_of(tmp_path / "short", ROWS, published={"name": "hf:x"})
    whole = run_of(tmp_path / "whole", dataclasses.replace(TUNED, length=None), published={"name": "hf:x"})
    assert [trained_length(run, 1) for run in (short, whole)] == [ROWS.length, 512]


def test_a_chain_has_the_longest_of_its_links(tmp_path):
    """What a run started from is kept, so that it is known when the start is gone."""
    assert trained_length(run_of(tmp_path / "alone", TUNED, **{OF_START: None}), 9) == 64
    assert trained_length(run_of(tmp_path / "tuned", TUNED, **{OF_START: 128}), 9) == 128
    assert (
        trained_length(run_of(tmp_path / "longer", dataclasses.replace(ROWS, length=256), **{OF_START: 128}), 9) == 256
    )
    assert kept_start_length(None, 128) == 128 and kept_start_length({OF_START: 64}, 128) == 64


def test_a_length_beyond_has_to_be_asked_for():
    check_trained("--length", 128, 128, "runs/x@1", beyond=False)
    check_trained("--length", 512, 128, "runs/x@1", beyond=True)
    with pytest.raises(
        InputError, match=r"--length must be at most 128, the trained length of runs/x@1, got 129; .*--bey"
    ):
        check_trained("--length", 129, 128, "runs/x@1", beyond=False)


def test_windows_of_a_question_cover_its_text_where_the_length_is_short():
    """At a trained length of 64 a stride of 128 is more than a window holds."""
    for total in (1, 30, 31, 32, 500):
        seen = [token for start, count in windows(total, 31, 128) for token in range(start, start + count)]
        assert seen == list(range(total))
    source = SimpleNamespace(trained_length=128, name="runs/x@1")
    task = SimpleNamespace(of_windows=True, options=SimpleNamespace(stride=128, question_length=64))
    limit, apart = notes_on_length(TUNED, 128, source, {"length": 384}, task)
    assert limit == "length 128: runs/x@1 was trained on 128 of its 512 positions; --beyond-length uses the others too"
    assert "room for 61 of its text" in apart and "--options.stride" in apart
    task.options.stride = 61
    assert not notes_on_length(TUNED, 128, source, {"length": 100}, task)
