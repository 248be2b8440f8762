"""Pretraining of BERT through the real command: two lengths in one run, what is predicted, starts, resuming.

Fails when a run that is stopped or killed around the switch of length ends in another state than one that never was,
when an evaluation depends on when or how it is done, when a choice of what to predict changes nothing or is not said,
or when a start takes other parameters than it says.
"""

import contextlib
import json
import math
import os
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from toy_runs import (
    Process,
    assert_one_line,
    bert_arguments,
    checkpoints,
    checksums,
    copy_at,
    lined,
    make_pair_stores,
    metrics,
    newest_step,
    run_here,
    sentences,
    starts,
)

from jaxlm import objectives, pretrain
from jaxlm.config import load_config
from jaxlm.data.loader import batch_at, validation_pairs
from jaxlm.data.pairs import mask_slots
from jaxlm.data.phases import phased_rows
from jaxlm.data.rows import rows_per_epoch
from jaxlm.data.store import open_store
from jaxlm.data.writer import write_store
from jaxlm.logs import MetricsLog
from jaxlm.text import load_tokenizer
from jaxlm.training.compiled import CompiledStep
from jaxlm.training.config import PretrainConfig
from jaxlm.training.record import Recorder
from jaxlm.training.run import RunDirectory

STEPS, SWITCH, SAVES = 104, 52, 26
# Without decay, runs of other lengths share the compiled programs of this one; it switches its length all the same.
STEADY = ("--optimizer.decay", "constant", "--checkpoint-every", SAVES, "--eval-every", SAVES, "--keep-newest", 9)
TWO_LENGTHS = ("--num-steps", STEPS, "--data.short-length", 32, "--data.short-share", SWITCH / STEPS)
NO_DROPOUT = [f"--model.{name}-rate=0" for name in ("dropout", "embedding-dropout", "attention-dropout")]
FIGURES = ("loss", "masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy")


def train(run, stores, *more):
    """A toy run without decay that has to end well."""
    ended = run_here("pretrain", *bert_arguments(run, stores, *STEADY, *more))
    assert ended.code == 0, ended.errors
    return ended


@contextlib.contextmanager
def after(steps, act):
    """Within it, `act` maps the state that goes into training step number `steps` of a start."""
    original, taken = CompiledStep.__call__, [0]

    def call(self, state, batch):
        if self.name == "training":
            taken[0] += 1
            if taken[0] == steps:
                state = act(state)
        return original(self, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledStep, "__call__", call)
        yield


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_pair_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, stores):
    """52 steps of 32 tokens and 52 of 64, never stopped, and how it ended; said to have learnt nothing."""
    run = tmp_path_factory.mktemp("base") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "_unigram_entropy", lambda stores: 0.5)
        return SimpleNamespace(run=run, ended=train(run, stores, *TWO_LENGTHS))


def parameters(run, step=None, part=""):
    return {name: value for name, value in checksums(run, step).items() if name.startswith(f"params/{part}")}


def assert_same_run(run, base):
    """To the bit: all figures of all steps and evaluations, parameters, moments."""
    assert list(metrics(run)) == list(range(1, STEPS + 1))
    names = [*FIGURES, "gradient_norm", "learning_rate", "update_norm/blocks", "update_norm/head"]
    for name in [*names, *(f"validation_{name}" for name in FIGURES)]:
        assert metrics(base.run, name), name
        assert metrics(run, name) == metrics(base.run, name), name
    assert checkpoints(run)[-1] == STEPS and checksums(run) == checksums(base.run)


# One run


def test_a_run_says_what_it_is(base, stores):
    said = base.ended.errors
    assert "104 steps: 52 of 8 x 32 tokens" in said and "and 52 of 8 x 64 tokens" in said and "bert_adamw" in said
    shares = r"[\d,]+ pairs in [\d,]+ rows an epoch, at most \d a row; [\d.]+% of them short, [\d.]+% true"
    assert re.search(f"pairs at length 32: {shares}", said) and re.search(f"pairs at length 64: {shares}", said)
    assert "masks: 15% of tokens (80% hidden, 10% random, 10% as they are), dynamic; next-sentence loss x 1" in said
    assert said.count("compiled the training step") == 2 and "compiled again" not in said
    assert said.index("batch (8, 64)") < said.index("step 1/104"), "both steps are compiled ahead"
    config = json.loads((base.run / "config.json").read_text())
    assert config["model"]["kind"] == "bert" and config["model"]["vocab_size"] == 320
    assert config["fingerprints"]["stores"] == [open_store(stores[0]).fingerprint]
    assert len(config["fingerprints"]["data_order"]) == 3
    assert load_tokenizer(base.run / "tokenizer").fingerprint == config["fingerprints"]["tokenizer"]
    assert {name.split("/")[0] for name in checksums(base.run)} == {"params", "opt_state", "step"}
    assert {name.split("/")[2] for name in parameters(base.run, part="head")} == {"masked_lm", "next_sentence"}


def test_figures_are_those_of_both_terms(base):
    found = {name: metrics(base.run, name) for name in FIGURES}
    for step in range(1, STEPS + 1):
        terms = found["masked_lm_loss"][step] + found["next_sentence_loss"][step]
        assert found["loss"][step] == pytest.approx(terms, rel=1e-6)
    held_out = {name: metrics(base.run, f"validation_{name}") for name in FIGURES}
    for step in range(0, STEPS + 1, SAVES):
        terms = held_out["masked_lm_loss"][step] + held_out["next_sentence_loss"][step]
        assert held_out["loss"][step] == pytest.approx(terms, rel=1e-6)
    assert held_out["masked_lm_loss"][0] == pytest.approx(math.log(320), abs=0.3)
    assert held_out["masked_lm_loss"][STEPS] < held_out["masked_lm_loss"][0] - 0.5
    rates = metrics(base.run, "learning_rate")
    assert rates[1] == 0 and rates[6] == pytest.approx(3e-3 * 5 / 10) and rates[STEPS] == pytest.approx(3e-3)


def test_the_gate_goes_by_the_masked_words(base, tmp_path):
    """Fails when the next-sentence loss, about ln 2, is held against the entropy of words too."""
    (warning,) = [line for line in base.ended.errors.splitlines() if line.startswith("warning:")]
    average = np.mean([metrics(base.run, "masked_lm_loss")[step] for step in range(81, 101)])
    assert f"step 100: the loss ({average:.3f}) has not left the unigram entropy" in warning

    log = MetricsLog(tmp_path, None)
    settings = {"start": 0, "total": 120, "work": lambda step: (step, step), "log_every": 100}
    gate = {"unigram_entropy": 5.0, "gate_metric": "masked_lm_loss"}
    recorder = Recorder(RunDirectory(tmp_path), log, **settings, **gate)
    said = []
    recorder.warn = said.append
    line = {"halted": False, "update_norm": {}, "learning_rate": 0.1, "gradient_norm": 1.0}
    recorder.training(100, line | {"loss": 5.4, "masked_lm_loss": 4.7, "next_sentence_loss": 0.7})
    recorder.close()
    log.close()
    assert said == []


def test_an_evaluation_sees_the_same_masks_at_any_step_and_in_any_batches(base, stores, tmp_path):
    """The first update has rate 0, so that the parameters of steps 0 and 1 are the same."""
    run = tmp_path / "run"
    train(run, stores, "--num-steps", 1, "--eval-batch-size", 24)
    for name in FIGURES:
        found, expected = metrics(run, f"validation_{name}"), metrics(base.run, f"validation_{name}")
        assert found[1] == found[0] and found[0] == pytest.approx(expected[0], rel=1e-6), name
    sources = validation_pairs([open_store(stores[1])], load_config("debug/bert", PretrainConfig).data,
                               length=64, batch_size=8)  # fmt: skip
    weight = sum(float(batch.pair_weights.sum()) for batch in sources)
    assert weight == sources.num_pairs > 8
    hits = metrics(run, "validation_next_sentence_accuracy")[1] * sources.num_pairs
    assert hits == pytest.approx(round(hits), abs=1e-3), "every pair once"


# Stopping and going on


def test_sigterm_before_at_and_after_the_switch(base, stores, tmp_path):
    run, done = tmp_path / "run", 0

    def stop(state):
        os.kill(os.getpid(), signal.SIGTERM)
        return state

    for step in (SWITCH - 1, SWITCH, SWITCH + 1):
        with after(step - done, stop):
            ended = run_here("pretrain", *bert_arguments(run, stores, *STEADY, *TWO_LENGTHS))
        assert ended.code == 75, ended.errors
        last = ended.errors.splitlines()[-1]
        assert last == f"stopped at step {step} of {STEPS}, saved; the same command continues"
        done = step
    ended = train(run, stores, *TWO_LENGTHS)
    assert ended.errors.count("compiled the training step") == 1, "the short step is not needed any more"
    origins = [f"resumed at step {SWITCH + more}" for more in (-1, 0, 1)]
    assert [start["started_from"] for start in starts(run)] == [None, *origins]
    assert_same_run(run, base)


@pytest.mark.parametrize("step", [SWITCH - SAVES, SWITCH])
def test_lines_beyond_the_checkpoint_are_dropped(base, stores, tmp_path, step):
    """As if it had been killed when this checkpoint was its newest."""
    run = copy_at(base.run, step, tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 105, "masked_lm_')
    assert f"beyond step {step} and 1 torn ones" in train(run, stores, *TWO_LENGTHS).errors
    assert_same_run(run, base)


@pytest.mark.slow
def test_killed_before_at_and_after_the_switch(base, stores, tmp_path):
    run = tmp_path / "run"
    arguments = bert_arguments(run, stores, *STEADY, *TWO_LENGTHS, "--checkpoint-every", 4)
    for number, step in enumerate((SWITCH // 3, SWITCH, SWITCH + 5)):
        process = Process("pretrain", *arguments, log=tmp_path / str(number), devices=8)
        process.until(lambda step=step: newest_step(run) >= step, f"step {step}")
        assert process.kill().code == -signal.SIGKILL
    ended = run_here("pretrain", *arguments)
    assert ended.code == 0, ended.errors
    origins = [start["started_from"] for start in starts(run)]
    resumed = [int(origin.removeprefix("resumed at step ")) for origin in origins[1:]]
    assert origins[0] is None and resumed[0] < SWITCH <= resumed[-1], origins
    assert_same_run(run, base)


def test_the_number_of_steps_is_identity_where_the_length_depends_on_it(base, stores, tmp_path):
    def line(run, *more):
        return assert_one_line(run_here("pretrain", *bert_arguments(run, stores, *STEADY, *more)), 2)

    before = (base.run / "config.json").read_bytes()
    assert "num_steps: 104 -> 120" in line(base.run, *TWO_LENGTHS, "--num-steps", 120)
    assert "data.short_share: 0.5 -> 0.6" in line(base.run, *TWO_LENGTHS, "--data.short-share", 0.6)
    assert "data.masks" in line(base.run, *TWO_LENGTHS, "--data.masks", "static")
    assert "masking.rate" in line(base.run, *TWO_LENGTHS, "--masking.rate", 0.2)
    assert (base.run / "config.json").read_bytes() == before
    # The switch falls on no step of this run, but would on one of a longer run that began with long rows.
    short = ("--data.short-length", 32, "--data.short-share", 0.4)
    train(tmp_path / "run", stores, *short, "--num-steps", 1)
    assert "num_steps: 1 -> 2" in line(tmp_path / "run", *short, "--num-steps", 2)
    train(tmp_path / "steady", stores, "--num-steps", 1)
    train(tmp_path / "steady", stores, "--num-steps", 2)
    assert starts(tmp_path / "steady")[-1]["started_from"] == "resumed at step 1"


def test_a_loss_that_is_not_finite_names_step_and_documents(base, stores, tmp_path):
    run, step = copy_at(base.run, SWITCH, tmp_path / "run"), SWITCH + 4

    def poison(state):
        head = jax.tree.map(lambda leaf: leaf * np.nan, state.params["head"])
        return replace(state, params=state.params | {"head": head})

    with after(4, poison):
        ended = run_here("pretrain", *bert_arguments(run, stores, *STEADY, *TWO_LENGTHS))
    assert ended.code == 1
    said = ended.errors.splitlines()[-1]
    assert said.startswith(f"failed: loss or gradient are not finite in step {step} ")
    assert f"rows {(step - 1) * 8} to {step * 8 - 1}: " in said and f"of step {step - 1}, is saved" in said
    assert checkpoints(run)[-1] == step - 1
    # The documents that are named hold the first pair of each row.
    store = open_store(stores[0])
    data = replace(load_config("debug/bert", PretrainConfig).data, short_length=32, short_share=SWITCH / STEPS)
    rows = phased_rows([store], data, length=64, seed=0, num_steps=STEPS, batch_size=8)
    batch = batch_at(rows, step - 1, 8)
    named = re.findall(rf"{re.escape(str(stores[0]))} \(toy\) document (\d+) token (\d+)", said)
    assert len(named) == 8 and batch.ids.shape == (8, 64)
    for row, (document, token) in enumerate(named):
        first = batch.ids[row][(batch.segments[row] == 1) & (batch.types[row] == 0)][1:-1]
        start = int(store.document_starts[int(document)]) + int(token)
        np.testing.assert_array_equal(first, np.asarray(store.tokens)[start : start + len(first)])


# Starts


def test_the_state_of_another_run_goes_on(base, stores, tmp_path):
    """As that run would have, on the same steps; and longer."""
    state = ("--start-with", "state", "--start")
    train(tmp_path / "fork", stores, *TWO_LENGTHS, *state, f"{base.run}@{STEPS - SAVES}")
    later = range(STEPS - SAVES + 1, STEPS + 1)
    assert metrics(tmp_path / "fork") == {step: metrics(base.run)[step] for step in later}
    assert checksums(tmp_path / "fork") == checksums(base.run)
    ended = train(tmp_path / "more", stores, *state, base.run, "--num-steps", STEPS + 2)
    assert list(metrics(tmp_path / "more")) == [STEPS + 1, STEPS + 2] and "state of" in ended.errors
    assert starts(tmp_path / "more")[0]["started_from"] == f"state of {base.run}@{STEPS}"


def test_a_start_takes_the_heads_along(base, stores, tmp_path):
    """The first update has rate 0: what is saved after it is what the run started with."""
    one = ("--num-steps", 1, "--start")
    ended = train(tmp_path / "same", stores, *one, base.run, "--seed", 4)
    assert parameters(tmp_path / "same") == parameters(base.run) and "fresh:" not in ended.errors
    assert metrics(tmp_path / "same", "validation_loss")[0] == metrics(base.run, "validation_loss")[STEPS]
    alone = ("--next-sentence-coefficient", 0)
    ended = train(tmp_path / "alone", stores, *one, base.run, *alone)
    kept = {name: value for name, value in parameters(base.run).items() if "/next_sentence/" not in name}
    assert parameters(tmp_path / "alone") == kept and "fresh:" not in ended.errors
    ended = train(tmp_path / "again", stores, *one, tmp_path / "alone")
    assert "fresh: head/next_sentence/bias, head/next_sentence/kernel" in ended.errors
    assert kept.items() < parameters(tmp_path / "again").items()
    assert parameters(tmp_path / "again", part="head/next") != parameters(base.run, part="head/next")
    state = bert_arguments(tmp_path / "run", stores, *STEADY, *one, base.run, *alone, "--start-with", "state",
                           "--num-steps", STEPS + 1)  # fmt: skip
    assert_one_line(run_here("pretrain", *state), 2, "head/next_sentence/kernel")


# What is predicted


def test_without_next_sentences(stores, tmp_path):
    run = tmp_path / "run"
    said = train(run, stores, "--next-sentence-coefficient", 0, "--num-steps", 2).errors
    assert "no next-sentence loss" in said and "true, " in said
    assert list(metrics(run)) == [1, 2] and not metrics(run, "next_sentence_loss")
    assert metrics(run, "loss") == metrics(run, "masked_lm_loss")
    assert metrics(run, "validation_loss") == metrics(run, "validation_masked_lm_loss")
    assert not metrics(run, "validation_next_sentence_accuracy")
    assert {name.split("/")[2] for name in parameters(run, part="head")} == {"masked_lm"}


def test_left_to_right(stores, tmp_path):
    """The paper's ablation: every token from those before it, with the masked language model's head and no other."""
    run = tmp_path / "run"
    said = train(run, stores, "--model.attention", "causal", "--num-steps", 2).errors
    assert "left to right, no next-sentence loss" in said and "masks:" not in said
    assert metrics(run, "loss") == metrics(run, "nll") and not metrics(run, "masked_lm_loss")
    assert metrics(run, "validation_loss") == metrics(run, "validation_nll")
    assert metrics(run, "validation_loss")[2] == pytest.approx(math.log(320), abs=0.5)
    assert {name.split("/")[2] for name in parameters(run, part="head")} == {"masked_lm"}


def test_whole_words_and_static_masks(stores, tmp_path):
    """An epoch of one step: with one static copy, both steps have the same pairs and masks, in another order of rows.

    The first update has rate 0 and nothing is dropped, so the losses of both steps tell.
    """
    tokenizer = open_store(stores[0]).tokenizer()
    store = write_store(tmp_path / "store", {"toy": lined(sentences(4))}, tokenizer, sentences="lines")
    assert rows_per_epoch([store], load_config("debug/bert", PretrainConfig).data, 64) == [8]
    calls = []

    def spied(batch, masking, specials, vocab_size, continues, slots, original=objectives.mask_tokens):
        calls.append((masking.whole_word, continues, slots, batch.ids.shape[1], batch.firsts.shape[1]))
        return original(batch, masking, specials, vocab_size, continues, slots)

    losses, said = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objectives, "mask_tokens", spied)
        for kind in ("static", "dynamic"):
            run = tmp_path / kind
            flags = ("--masking.whole-word", "--data.masks", kind, "--data.mask-copies", 1, "--num-steps", 2)
            arguments = bert_arguments(run, (store.path, store.path), *STEADY, *NO_DROPOUT, *flags, "--data.validation")
            ended = run_here("pretrain", *arguments)
            assert ended.code == 0, ended.errors
            losses[kind] = [metrics(run, name) for name in ("masked_lm_loss", "next_sentence_loss")]
            said[kind] = ended.errors
    for found in losses["static"]:
        assert found[2] == pytest.approx(found[1], rel=1e-5)
    for found in losses["dynamic"]:
        assert abs(found[2] - found[1]) > 1e-3 * found[1]
    assert "masks: 15% of whole words" in said["static"] and "static in 1 copies" in said["static"]
    assert "dynamic" in said["dynamic"]
    for whole_word, continues, slots, length, pairs in calls:
        assert whole_word and slots == mask_slots(length, pairs)
        np.testing.assert_array_equal(continues, tokenizer.continues)
    assert calls
