"""Which fields of a model come from a start, and which from the recipe.

Fails when the softmax changes its rows, or dropout its rate, without a word.
"""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import pytest
import toy_run
from toy_runs import assert_one_line, bert_arguments, finetune_arguments, make_pair_stores, make_task, run_here, starts

from jaxlm.errors import InputError
from jaxlm.models import dropout_rates
from jaxlm.models.bert import BertConfig
from jaxlm.models.gpt import GPTConfig
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.training.start import FREE_FIELDS, dropout_notes, model_of_source, open_source

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


def with_other_heads(run):
    """Replace the newest checkpoint of a run by one that differs in the heads."""
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(lambda metadata: metadata.tree)
    shutil.rmtree(run / "checkpoints")
    head = jax.tree.map(lambda leaf: leaf + 1, restored.state["params"]["head"])
    state = restored.state | {"params": restored.state["params"] | {"head": head}}
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(restored.step, state, config=restored.config, extra=restored.extra)


@pytest.mark.slow
def test_other_heads_are_another_start(tmp_path):
    """A run without a checkpoint begins again, from the same parameters, also one of an earlier version, whose
    fingerprint left the heads out. Fails if an exchanged head is not noticed.
    """
    source, run, stores = tmp_path / "source", tmp_path / "run", make_pair_stores(tmp_path)

    def train(run, *more):
        return run_here("pretrain", *bert_arguments(run, stores, "--data.validation", "--num-steps", 1, *more))

    assert train(source).code == 0 and train(run, "--start", source).code == 0
    config, known = json.loads((run / "config.json").read_text()), open_source(str(source)).open_parameters()
    assert config["fingerprints"]["start"] == known.fingerprint != known.earlier_fingerprint
    config["fingerprints"]["start"] = known.earlier_fingerprint
    (run / "config.json").write_text(json.dumps(config))
    moved = source.rename(tmp_path / "moved")
    shutil.rmtree(run / "checkpoints")
    assert train(run, "--start", moved).code == 0
    assert starts(run)[-1]["started_from"] == f"parameters of {moved}@1"
    config = json.loads((run / "config.json").read_text())
    config["fingerprints"]["start"] = known.fingerprint
    (run / "config.json").write_text(json.dumps(config))
    with_other_heads(moved)
    shutil.rmtree(run / "checkpoints")
    assert_one_line(train(run, "--start", moved), 2, f"must have the parameters that {run} began from, got others")
