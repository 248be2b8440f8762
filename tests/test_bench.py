"""The measured step is a real one: its figures fit together, its model is the one asked for, bad sizes are refused."""

from dataclasses import replace

import pytest
from pair_store import pair_store

from jaxlm import bench
from jaxlm.errors import InputError
from jaxlm.models import bert, gpt
from jaxlm.models.bert import BERT_LARGE
from jaxlm.models.gpt import GPT1

TOY = bench.Arguments(batch=8, length=16, layers=1, width=32, heads=4, steps=2, warmup=0, dtype="f32")


@pytest.mark.parametrize("model", ["gpt1", "gpt2", "bert-base", "bert-large"])
def test_a_toy_step(model, monkeypatch):
    """Fails when the step does not run, is not that of the model, or tokens and FLOPs do not follow from the time."""
    small = {name: replace(config, vocab_size=101) for name, config in bench.MODELS.items()}
    monkeypatch.setattr(bench, "MODELS", small)
    found = bench.measure(replace(TOY, model=model))
    assert (found["model"], found["layers"], found["width"], found["batch"], found["length"]) == (model, 1, 32, 8, 16)
    assert found["tokens_per_second"] == pytest.approx(8 * 16 / found["step_seconds"], rel=0.02)
    sizes = {"num_layers": 1, "width": 32, "num_heads": 4, "feed_forward_width": 128, "vocab_size": 101}
    if model.startswith("gpt"):
        flops = gpt.model_flops_per_token(replace(GPT1, **sizes), 16)
    else:
        flops = bert.model_flops_per_token(replace(BERT_LARGE, **sizes), 16, 2 / 16)  # max(1, round(0.15 x 16)) = 2
    rate = found["tokens_per_second"] * flops / 1e12
    assert found["model_tflops_per_second"] == pytest.approx(rate, abs=1e-4)
    # Uniform guesses: ln 101 for words, and ln 2 more for the next sentence.
    assert found["loss"] == pytest.approx(4.62 if model.startswith("gpt") else 4.62 + 0.69, abs=0.4)


def test_the_models_are_the_published_ones():
    assert [config.num_layers for config in bench.MODELS.values()] == [12, 12, 12, 24]
    assert [config.vocab_size for config in bench.MODELS.values()] == [40_478, 50_257, 30_522, 30_522]


@pytest.mark.parametrize("model", ["gpt1", "bert-base"])
def test_sizes_that_do_not_fit_are_refused(model):
    with pytest.raises(InputError, match="--loss-chunks 5"):
        bench.measure(replace(TOY, model=model, loss_chunks=5))
    with pytest.raises(InputError, match="batch_size 3"):
        bench.measure(replace(TOY, model=model, batch=3))


def test_rows_of_a_store(tmp_path):
    """Fails when padding counts as tokens, or when rows are not those that a run with such pairs reads."""
    store = pair_store(tmp_path / "store", [[6, 6]] * 120).path
    toy = replace(TOY, model="bert-base", length=64, store=store)
    packed, padded = bench.measure(toy), bench.measure(replace(toy, pairs_per_row=1))
    for found in (packed, padded):
        assert found["real_tokens_per_second"] == pytest.approx(found["fill"] * found["tokens_per_second"], rel=1e-3)
    assert padded["fill"] == pytest.approx(15 / 64, abs=0.01) and packed["fill"] > 0.9  # 12 words, CLS and two SEP
