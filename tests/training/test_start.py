"""Which fields of a model come from a start, and which from the recipe.

Fails when the softmax changes its rows, or dropout its rate, without a word.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import toy_run
from toy_runs import finetune_arguments, make_task, run_here

from jaxlm.errors import InputError
from jaxlm.models import dropout_rates
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.training.initialization import FREE_FIELDS, dropout_notes, model_of_source

pytestmark = pytest.mark.usefixtures("two_devices")

SMALL = GPTConfig(num_layers=2, width=16, num_heads=2, feed_forward_width=32, tables="one", dropout_rate=0.0)
SMALL = dataclasses.replace(SMALL, embedding_dropout_rate=0.0, attention_dropout_rate=0.0)


def source(model):
    """What these functions read of a start."""
    return SimpleNamespace(name="runs/small@7", model=model)


def test_sizes_and_tables_come_from_the_start_and_dropout_from_the_recipe():
    """Fails on 2968321: `tables` is the config's."""
    asked = GPTConfig(num_layers=12, dropout_rate=0.3)
    found = model_of_source(source(SMALL), asked, set())
    assert found == dataclasses.replace(
        SMALL, dropout_rate=0.3, embedding_dropout_rate=0.1, attention_dropout_rate=0.1, tables="one"
    )
    assert model_of_source(source(SMALL), asked, {"model.tables"}).tables == "two"
    # A run that was begun under the config's, by an earlier version, goes on with what it saved.
    assert model_of_source(source(SMALL), asked, set(), {"model": {"tables": "two"}}).tables == "two"
    assert model_of_source(source(SMALL), asked, {"model.tables"}, {"model": {"tables": "one"}}).tables == "two"
    with pytest.raises(
        InputError, match=r"--model.num-layers must be left out with --start: the sizes come from runs/small@7"
    ):
        model_of_source(source(SMALL), asked, {"model.num_layers"})
    with pytest.raises(InputError, match="--model.adaptive.cutoffs must be left out with --start"):
        model_of_source(source(SMALL), asked, {"model.adaptive.cutoffs"})
    for name in (*FREE_FIELDS, *dropout_rates(asked)):
        model_of_source(source(SMALL), asked, {f"model.{name}"})
    encoder = BertConfig(num_layers=2, width=16, num_heads=2)
    assert model_of_source(source(encoder), BertConfig(dropout_rate=0.2), set()) == dataclasses.replace(
        encoder, dropout_rate=0.2
    )


def test_another_dropout_than_the_starts_is_one_sentence():
    """Fails on 2968321: nothing is said."""
    asked = GPTConfig()
    assert dropout_notes(None, asked) == [] and dropout_notes(source(SMALL), SMALL) == []
    assert dropout_notes(source(SMALL), asked) == [
        "dropout 0.1, from the config; runs/small@7 was trained with 0",
    ]
    (said,) = dropout_notes(source(SMALL), dataclasses.replace(SMALL, attention_dropout_rate=0.25))
    assert said.startswith("dropout_rate 0, embedding_dropout_rate 0, attention_dropout_rate 0.25, from")
    rates = ["dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"]
    assert sorted(dropout_rates(asked)) == sorted(dropout_rates(BertConfig())) == sorted(rates)


@pytest.mark.slow
def test_fine_tuning_keeps_the_tables_and_says_the_dropout(tmp_path, monkeypatch):
    """Fails on 2968321: the run's config.json has `tables two`, and the log no word of dropout."""
    sizes = dataclasses.replace(toy_run.SIZES, tables="one", dropout_rate=0.0)
    monkeypatch.setattr(toy_run, "SIZES", sizes)
    store = toy_run.toy_store(tmp_path / "store", toy_run.toy_tokenizer())
    start, task = toy_run.pretrained(tmp_path / "start", store), make_task(tmp_path / "task")
    flags = ["--start", start, "--num-epochs", 1]
    ended = run_here("finetune", *finetune_arguments(tmp_path / "run", task, *flags))
    assert ended.code == 0, ended.errors
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert saved["tables"] == "one" and saved["dropout_rate"] == 0.1
    assert "dropout_rate 0.1, embedding_dropout_rate 0.1, attention_dropout_rate 0.1, from the config" in ended.output
    # As a run of that commit was saved; it is complete, and the same command says so.
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["tables"] = "two"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    again = run_here("finetune", *finetune_arguments(tmp_path / "run", task, *flags))
    assert again.code == 0 and "is complete" in again.output, again.errors
