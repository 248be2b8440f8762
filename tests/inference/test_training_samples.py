"""Samples of text during pretraining are those of jaxlm.generate at the same checkpoint."""

import pytest
from toy_runs import copy_at, make_stores, pretrain_arguments, run_here

from jaxlm.runs.directory import RunDirectory
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.views.report.run_record import read_record

pytestmark = pytest.mark.usefixtures("two_devices")

PROMPTS = ("bada", "lo mi")
STEPS = ("--num-steps", 6, "--checkpoint-every", 3, "--sample-every", 3)
ASKED = (*STEPS, "--sample-prompt", PROMPTS[0], "--sample-prompt", PROMPTS[1])
LSTM = ("--model.num-layers", 1, "--model.width", 16, "--model.units", 24, "--length", 32, "--batch-size", 8)
LSTM += ("--optimizer.peak-lr", 0.05, "--optimizer.warmup", 1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


def arguments(name, run, stores, *more):
    if name == "gpt":
        return pretrain_arguments(run, stores, "--model.num-layers", 2, *more)
    return ("debug/lstm", "--run", run, "--data.store", stores[0], *LSTM, *more)


def samples(run):
    found = [(line["step"], line["sample"]) for line in read_metrics(run / "metrics.jsonl") if "sample" in line]
    return {(step, sample["prompt"]): sample["text"] for step, sample in found}


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_samples_are_those_of_generate(name, stores, tmp_path):
    """Two devices share the rows of training. Fails for other parameters, seeds or settings, or after a restart."""
    run = tmp_path / "run"
    ended = run_here("pretrain", *arguments(name, run, stores, *ASKED))
    assert ended.code == 0, ended.errors
    found = samples(run)
    assert found.keys() == {(step, prompt) for step in (0, 3, 6) for prompt in PROMPTS}
    for step in (3, 6):
        for prompt in PROMPTS:
            made = run_here("generate", "--run", f"{run}@{step}", "--prompt", prompt)
            assert made.code == 0 and made.output.rstrip("\n") == found[step, prompt].rstrip("\n"), made.errors
            assert f"step {step}: sample: " in ended.errors
    assert found[3, PROMPTS[0]] != found[6, PROMPTS[0]]
    assert read_record(RunDirectory(run), 2).samples == [f"step 6: {found[6, prompt]}" for prompt in PROMPTS]
    copy = copy_at(run, 3, tmp_path / "copy")
    ended = run_here("pretrain", *arguments(name, copy, stores, *ASKED))
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert samples(copy) == found


def test_without_prompts_a_text_begins(stores, tmp_path):
    ended = run_here("pretrain", *arguments("gpt", tmp_path / "run", stores, *STEPS, "--num-steps", 3))
    made = run_here("generate", "--run", f"{tmp_path / 'run'}@3", "--prompt", "")
    assert ended.code == made.code == 0, ended.errors + made.errors
    assert samples(tmp_path / "run")[3, ""].rstrip("\n") == made.output.rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sample-every", -1), "--sample-every must be at least 0, got -1; give a larger one"),
        (("--sample-prompt", "x"), "--sample-every must be above 0 with --sample-prompt, got 0; give"),
        (("--sample-every", 2, "--sample-prompt", "bada " * 40), "--sample-prompt must have from 1 to 31 tokens"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(flags, said, stores, tmp_path):
    """Fails when a prompt that is too long is refused after minutes of compilation, with a run directory left."""
    ended = run_here("pretrain", *arguments("gpt", tmp_path / "run", stores, "--num-steps", 2, *flags))
    assert ended.code == 2 and said in ended.errors.splitlines()[-1], ended.errors
    assert "compiled" not in ended.errors and not (tmp_path / "run").exists()


def test_samples_of_an_encoder_are_refused_before_it_is_compiled(stores, tmp_path):
    """Fails when an encoder is refused after minutes of compilation, with a run directory left behind."""
    flags = ("--run", tmp_path / "run", "--data.store", stores[0], "--num-steps", 2, "--sample-every", 2)
    ended = run_here("pretrain", "debug/bert", *flags)
    assert (
        ended.code == 2
        and ended.errors == "error: --sample-every must be 0 for an encoder (bert), got 2; leave it out\n"
    )
    assert not (tmp_path / "run").exists()
