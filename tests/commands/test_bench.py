"""The measured step is a real one: its figures fit together, its model is the one asked for, bad sizes are refused."""

from dataclasses import replace

import pytest
from pair_store import pair_store

from jaxlm import bench
from jaxlm.config import load_config
from jaxlm.errors import InputError
from jaxlm.models import build, dropout_rates, without_dropout
from jaxlm.models.bert import BERT_LARGE
from jaxlm.models.gpt import GPT1, GPT2
from jaxlm.training.config import PretrainConfig

TOY = "--batch 8 --length 16 --layers 1 --width=32 --heads 4 --steps 2 --warmup 0 --dtype f32"


def measured(line):
    return bench.measure(bench.parse(line.split()))


@pytest.mark.parametrize("model", ["gpt1", "gpt2", "bert-base", "bert-large"])
def test_a_toy_step(model):
    """Fails when the step does not run, is not that of the model, or tokens and FLOPs do not follow from the time."""
    found = measured(f"--model {model} {TOY} --model.vocab-size 101")
    assert (found["model"], found["layers"], found["width"], found["batch"], found["length"]) == (model, 1, 32, 8, 16)
    assert found["tokens_per_second"] == pytest.approx(8 * 16 / found["step_seconds"], rel=0.02)
    sizes = {"num_layers": 1, "width": 32, "num_heads": 4, "feed_forward_width": 128, "vocab_size": 101}
    if model.startswith("gpt"):
        flops = build(replace(GPT1, **sizes)).flops_per_token(16)
    else:
        flops = build(replace(BERT_LARGE, **sizes)).flops_per_token(16, 2 / 16)  # max(1, round(0.15 x 16)) = 2
    rate = found["tokens_per_second"] * flops / 1e12
    assert found["model_tflops_per_second"] == pytest.approx(rate, abs=1e-4)
    # Uniform guesses: ln 101 for words, and ln 2 more for the next sentence.
    assert found["loss"] == pytest.approx(4.62 if model.startswith("gpt") else 4.62 + 0.69, abs=0.4)


def test_the_models_are_the_published_ones():
    models = [bench.MODELS[name].model for name in ("gpt1", "gpt2", "bert-base", "bert-large")]
    assert [model.num_layers for model in models] == [12, 12, 12, 24]
    assert [model.vocab_size for model in models] == [40_478, 50_257, 30_522, 30_522]


@pytest.mark.parametrize("model", ["gpt1", "bert-base"])
def test_sizes_that_do_not_fit_are_refused(model):
    if model == "gpt1":  # an encoder's loss is over masked tokens, which chunks of the length do not divide
        with pytest.raises(InputError, match=r"loss_chunks.* 5"):
            measured(f"--model {model} {TOY} --loss-chunks 5")
    with pytest.raises(InputError, match="batch_size must be .*, got 3"):
        measured(f"--model {model} {TOY} --batch 3")
    with pytest.raises(InputError, match="steps must be at least 1, got 0"):
        measured(f"--model {model} {TOY} --steps 0")
    with pytest.raises(InputError, match="--model must be one of gpt1, gpt2, .*, got t5"):
        measured("--model t5")


def test_short_spellings_are_fields_of_a_config():
    """Fails when a script's command line of `--model` no longer means the published model in these sizes."""
    short = bench.parse(
        "--model gpt2 --batch 4 --length 2048 --width 64 --dropout 0.1 --store a=b --remat full".split()
    )
    assert (short.config, short.steps, short.warmup) == ("gpt2", 10, 3)
    rates = dict.fromkeys(dropout_rates(GPT2), 0.1)
    model = replace(GPT2, num_positions=2048, width=64, feed_forward_width=256, **rates)
    settings = short.settings
    assert settings.model == model and (settings.batch_size, settings.length) == (4, 2048)
    assert settings.data.store == ("a=b",) and settings.execution.remat == "full"
    assert bench.parse([]).settings.model == without_dropout(GPT1)
    assert bench.parse(["--model", "gpt1", "--model", "gpt2"]).config == "gpt2"
    assert bench.parse(["--dtype", "bf16"]).settings.execution.dtype == "bfloat16"


def test_a_config_and_its_fields():
    """Fails when what is measured is not the config's step, or a field does not override it."""
    arguments = bench.parse(
        ["debug/gpt", "--steps=1", "--warmup", "1", "--batch-size", "16", "--dtype", "f32", "--dropout", "0.1"]
    )
    config = load_config("debug/gpt", PretrainConfig)
    config = replace(config, model=replace(config.model, **dict.fromkeys(dropout_rates(config.model), 0.1)))
    execution = replace(config.execution, dtype="float32")
    assert arguments.settings == replace(config, batch_size=16, execution=execution)
    found = bench.measure(arguments)
    assert (found["model"], found["batch"], found["length"]) == ("debug/gpt", 16, config.length)
    assert found["tokens_per_second"] == pytest.approx(16 * config.length / found["step_seconds"], rel=0.02)


def test_rows_of_a_store(tmp_path):
    """Fails when padding counts as tokens, or when rows are not those that a run with such pairs reads."""
    store = pair_store(tmp_path / "store", [[6, 6]] * 120).path
    toy = f"--model bert-base {TOY} --length 64 --store {store}"
    packed, padded = measured(toy), measured(f"{toy} --pairs-per-row 1")
    for found in (packed, padded):
        assert found["real_tokens_per_second"] == pytest.approx(found["fill"] * found["tokens_per_second"], rel=1e-3)
    assert padded["fill"] == pytest.approx(15 / 64, abs=0.01) and packed["fill"] > 0.9  # 12 words, CLS and two SEP
