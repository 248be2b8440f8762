"""Pretraining through the real command: what a run directory holds, where a run may start, and how it fails.

Fails when a file of the contract is missing or cannot be read back, when a start takes other parameters, moments or
data than it says, or when a run that cannot go on loses what it had.
"""

import collections
import json
import math
import os
import resource
import shlex
import shutil
import signal
import sys

import jax
import pytest
from toy_runs import (
    Process,
    assert_one_line,
    checkpoints,
    checksums,
    copy_at,
    make_stores,
    metrics,
    newest_step,
    pretrain_arguments,
    run_here,
    sentences,
    starts,
)
from toy_store import write_store

from jaxlm.compiler import memory
from jaxlm.data.rows import training_rows
from jaxlm.data.store import open_store
from jaxlm.errors import InputError
from jaxlm.inference.loaded_run import load_run
from jaxlm.inference.scoring import Scored, Scorer
from jaxlm.objectives.language_model import language_model
from jaxlm.runs.checkpoints import Checkpoints
from jaxlm.runs.metrics_log import read_metrics
from jaxlm.runs.recorder import Recorder
from jaxlm.text import load_tokenizer, train_sentencepiece
from jaxlm.text.bpe import GPT1Tokenizer
from jaxlm.text.piece_models import SentencePieceTokenizer
from jaxlm.training import pretraining_run
from jaxlm.training import program as program_module
from jaxlm.training import start as run_start
from jaxlm.training.step import make_eval_step

pytestmark = pytest.mark.usefixtures("two_devices")

STEADY = ("--optimizer.decay", "constant", "--checkpoint-every", 5)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return make_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, stores):
    """Ten steps at a constant rate, checkpoints 5 and 10."""
    run = tmp_path_factory.mktemp("base") / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *STEADY, "--num-steps", 10, "--eval-every", 5))
    assert ended.code == 0, ended.errors
    return run


def test_a_run_directory_holds_what_the_contract_says(base, stores):
    assert {path.name for path in base.iterdir()} == {
        "config.json", "starts.jsonl", "metrics.jsonl", "log.txt", "tensorboard", "checkpoints", "tokenizer", "lock",
    }  # fmt: skip
    config = json.loads((base / "config.json").read_text())
    store = open_store(stores[0])
    assert config["model"]["kind"] == "gpt" and config["model"]["vocab_size"] == 320
    assert config["optimizer"]["peak_lr"] == 3e-3 and config["num_steps"] == 10
    assert config["fingerprints"]["stores"] == [store.fingerprint]
    assert load_tokenizer(base / "tokenizer").fingerprint == store.tokenizer_fingerprint
    (start,) = starts(base)
    assert start["started_from"] is None and start["devices"]["count"] == 2 and "jax" in start["versions"]
    assert start["command"] == shlex.join(sys.orig_argv)
    assert list((base / "tensorboard").glob("events*"))
    assert checkpoints(base) == [5, 10]


def test_metrics_lines_are_as_the_contract_says(base):
    lines = list(read_metrics(base / "metrics.jsonl"))
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 11))
    for line in training:
        assert line["trained_tokens"] == 8 * 32 * line["step"]
        assert line["tokens_per_second"] > 0 and 0 <= line["wait_share"] <= 1 and line["mfu"] is None
        assert line["device_memory_gib"] is None and 0.1 < line["host_memory_gib"] < 64  # a CPU reports none
        assert line["learning_rate"] == pytest.approx(3e-3 * line["step"] / 10)
        assert len(line["update_norm/blocks"]) == 1 and line["gradient_norm"] > 0
    validation = metrics(base, "validation_loss")
    assert list(validation) == [0, 5, 10] and validation[10] < validation[0]
    assert metrics(base, "perplexity")[10] == pytest.approx(math.exp(validation[10]))


def test_the_state_of_another_run_goes_on_as_that_run_would(base, stores, tmp_path):
    """Parameters, moments, step, order of the data and dropout: the losses are those of going on in place."""
    shutil.copytree(base, tmp_path / "in-place")
    longer = (*STEADY, "--num-steps", 15)
    assert run_here("pretrain", *pretrain_arguments(tmp_path / "in-place", stores, *longer)).code == 0
    forked = pretrain_arguments(tmp_path / "forked", stores, *longer, "--start", base, "--start-with", "state")
    ended = run_here("pretrain", *forked)
    assert ended.code == 0, ended.errors
    in_place, fork = metrics(tmp_path / "in-place"), metrics(tmp_path / "forked")
    assert list(fork) == [11, 12, 13, 14, 15]
    assert fork == {step: loss for step, loss in in_place.items() if step > 10}
    assert checksums(tmp_path / "forked") == checksums(tmp_path / "in-place")
    assert starts(tmp_path / "forked")[0]["started_from"] == f"state of {base}@10"
    assert "state of" in ended.errors


def test_a_fork_at_another_rate_begins_at_the_step_it_names(base, stores, tmp_path):
    flags = ("--start", f"{base}@5", "--start-with", "state", "--optimizer.peak-lr", 1e-3)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *STEADY, "--num-steps", 8, *flags))
    assert ended.code == 0, ended.errors
    rates = metrics(tmp_path / "run", "learning_rate")
    assert list(rates) == [6, 7, 8] and rates[6] == pytest.approx(1e-3 * 6 / 10)
    assert metrics(tmp_path / "run")[6] == metrics(base)[6]  # the loss before the first update at the new rate
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "again", stores, *STEADY, "--num-steps", 5, *flags))
    assert_one_line(ended, 2, "--num-steps must be above 5", "got 5", "ask for more")


def test_the_parameters_of_another_run_begin_at_step_0(base, stores, tmp_path):
    still = ("--start", base, "--optimizer.peak-lr", 0, "--num-steps", 2, "--seed", 4, "--eval-batch-size", 24)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *STEADY, *still))
    assert ended.code == 0, ended.errors
    parameters = {name: value for name, value in checksums(base).items() if name.startswith("params/")}
    assert parameters and parameters.items() <= checksums(tmp_path / "run").items()
    assert list(metrics(tmp_path / "run")) == [1, 2]
    # Every token counts once, however many are in a batch.
    validation = metrics(tmp_path / "run", "validation_loss")[0]
    assert validation == pytest.approx(metrics(base, "validation_loss")[10], rel=1e-6)
    assert metrics(tmp_path / "run", "tokens")[0] == metrics(base, "tokens")[10]
    assert starts(tmp_path / "run")[0]["started_from"] == f"parameters of {base}@10"


def test_a_start_is_pinned_and_a_run_that_goes_on_needs_it_no_more(base, stores, tmp_path):
    """Fails on 2968321: killed before its first checkpoint the run began from the newest one of the other by then; and
    a start that was moved away ended every further one with 'is no run directory'.
    """
    source, run = copy_at(base, 5, tmp_path / "source"), tmp_path / "run"
    begin = lambda steps: run_here(  # noqa: E731
        "pretrain", *pretrain_arguments(run, stores, *STEADY, "--start", source, "--num-steps", steps)
    )
    assert begin(2).code == 0
    saved, before = json.loads((run / "config.json").read_text()), checksums(run)
    assert (saved["start"], saved["start_with"]) == (f"{source}@5", "parameters")
    shutil.copytree(base / "checkpoints" / "10", source / "checkpoints" / "10")  # it trained on
    shutil.rmtree(run / "checkpoints")
    assert begin(2).code == 0
    assert starts(run)[-1]["started_from"] == f"parameters of {source}@5" and checksums(run) == before
    source.rename(tmp_path / "moved")
    ended = begin(3)
    assert ended.code == 0 and starts(run)[-1]["started_from"] == "resumed at step 2", ended.errors
    shutil.rmtree(run / "checkpoints")
    assert_one_line(begin(3), 2, f"{source}: no such run directory", "restore it")
    (tmp_path / "moved").rename(source)
    assert begin(3).code == 0
    ended = run_here("pretrain", *pretrain_arguments(run, stores, *STEADY, "--start", f"{source}@10", "--num-steps", 3))
    assert_one_line(ended, 2, "the start has other parameters", "holds a run with another config")


def test_published_weights_are_not_read_by_a_run_that_goes_on(base, tmp_path):
    """Fails on 2968321: they were read whole at every start."""
    run = tmp_path / "run"
    shutil.copytree(base / "tokenizer", run / "tokenizer")
    config = json.loads((base / "config.json").read_text())
    config |= {"start": "hf:gone", "fingerprints": config["fingerprints"] | {"start": "abc"}}
    (run / "config.json").write_text(json.dumps(config))
    source = run_start.source_of(str(run), "hf:gone")
    assert source.model.vocab_size == config["model"]["vocab_size"] and source.fingerprint == "abc"
    assert source.tokenizer.fingerprint == config["fingerprints"]["tokenizer"]
    with pytest.raises(InputError, match="gone.* restore it"):
        source.saved  # noqa: B018
    for file in (run / "tokenizer").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match="hf:gone must be a directory, or a model"):  # it is opened for its tokenizer
        run_start.source_of(str(run), "hf:gone")


def test_epochs_become_steps_of_the_store(stores, tmp_path):
    run = tmp_path / "run"
    ended = run_here("pretrain", *pretrain_arguments(run, stores, "--num-epochs", 0.02))
    assert ended.code == 0, ended.errors
    rows = open_store(stores[0]).num_tokens // 32
    config = json.loads((run / "config.json").read_text())
    assert abs(config["num_steps"] - 0.02 * rows / 8) <= 1 and len(metrics(run)) == config["num_steps"]
    assert config["num_epochs"] == 0.02


def test_a_run_on_packed_rows_goes_on_with_the_rows_it_was_made_with(stores, tmp_path, monkeypatch):
    """Resumed and forked, of two stores. Fails when one with rows of another version is not refused."""
    flags = ("--data.layout", "packed", "--data.weights", 3, 1, "--num-steps", 5, "--data.store", *stores)
    arguments = pretrain_arguments(tmp_path / "run", stores, *STEADY, *flags, "--checkpoint-every", 3)
    assert run_here("pretrain", *arguments).code == 0
    run, fork = copy_at(tmp_path / "run", 3, tmp_path / "copy"), tmp_path / "fork"
    ended = run_here("pretrain", *arguments, "--run", run)
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    ended = run_here("pretrain", *arguments, "--run", fork, "--start", f"{run}@3", "--start-with", "state")
    assert ended.code == 0, ended.errors
    whole = metrics(tmp_path / "run")
    assert metrics(run) == whole and metrics(fork) == {step: whole[step] for step in (4, 5)}
    assert "do not compare" not in ended.errors
    monkeypatch.setattr(SentencePieceTokenizer, "lossy_note", GPT1Tokenizer.lossy_note)
    ended = run_here("pretrain", *arguments, "--run", tmp_path / "new", "--num-steps", 1)
    assert ended.code == 0 and "metrics per word and per byte count the text" in ended.errors, ended.errors
    assert metrics(tmp_path / "new")[1] == whole[1]
    for name in ("run", "copy", "fork", "new"):
        prints = json.loads((tmp_path / name / "config.json").read_text())["fingerprints"]
        assert prints["data_order"] == 2 and len(prints["stores"]) == 2
    config = json.loads((run / "config.json").read_text())
    config["fingerprints"]["data_order"] = 1
    (run / "config.json").write_text(json.dumps(config))
    ended = run_here("pretrain", *arguments, "--run", run)
    assert_one_line(ended, 2, "data_order must be 2 for --data.layout packed, got 1")


@pytest.mark.slow
def test_a_packed_run_is_judged_as_it_was_trained(tmp_path):
    """Fails on 2968321, where validation, perplexity and scores of a packed run were of rows it was never trained on.

    There validation_loss was of windows across documents, and the id that ends documents, from which the first token of
    a text is predicted, was an untrained input: the first tokens of these documents cost more than their frequencies.
    """
    documents = [" ".join(text.split()[:5]) for text in sentences(400, seed=3)]
    tokenizer = train_sentencepiece(documents, 320)
    store, valid = (
        write_store(tmp_path / name, {"toy": part}, tokenizer)
        for name, part in (("store", documents[:380]), ("valid", documents[380:]))
    )
    flags = (
        "--data.layout",
        "packed",
        "--num-steps",
        200,
        "--log-every",
        50,
        "--optimizer.peak-lr",
        1e-2,
        "--batch-size",
        32,
        "--length",
        16,
    )
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", (store.path, valid.path), *flags))
    assert ended.code == 0, ended.errors
    assert f"validation: {valid.path} in packed rows of 16" in ended.errors
    run = load_run(tmp_path / "run")
    rows = training_rows([valid], run.config.data, length=16, seed=0)
    epoch = rows.read(range(rows.sources[0].rows))
    nll, weight = make_eval_step(language_model(run.model))(run.params, epoch)[0]["nll"]
    said = metrics(tmp_path / "run", "validation_loss")[200]
    assert weight == valid.num_tokens and said == pytest.approx(float(nll / weight), rel=1e-5)
    ended = run_here("evaluate", "perplexity", "--run", tmp_path / "run", "--data.store", valid.path)
    figures = json.loads(ended.output.splitlines()[-1])
    assert figures["layout"] == "packed" and "in packed rows of 16" in ended.output
    assert figures["validation_loss"] == pytest.approx(said, rel=1e-5)
    # As scored, a document costs what it cost in training, and its first token no more than by its frequency.
    ids = [tokenizer.encode(text) for text in documents]
    starts_and_wholes = [Scored([*run.prefix_ids, *tokens]) for tokens in [*(tokens[:1] for tokens in ids), *ids[380:]]]
    scores = list(Scorer(run.model, mesh=run.mesh, batch_size=64)(run.params, starts_and_wholes))
    firsts, wholes = scores[:400], scores[400:]
    assert run.prefix_ids == [tokenizer.specials["end"]] and all(score.tokens == 1 for score in firsts)
    counts = collections.Counter(tokens[0] for tokens in ids)
    entropy = -sum(count / 400 * math.log(count / 400) for count in counts.values())
    first = -sum(score.log_probability for score in firsts) / 400
    assert first < entropy + 0.3
    per_token = -sum(score.log_probability for score in wholes) / sum(score.tokens for score in wholes)
    assert per_token == pytest.approx(said, rel=0.1)  # which counts the ends of documents too


def test_a_loss_that_is_not_finite_saves_the_state_before_it_and_names_the_rows(stores, tmp_path):
    absurd = ("--optimizer.peak-lr", 1e30, "--optimizer.clip-norm", 0, "--num-steps", 50, *STEADY)
    arguments = pretrain_arguments(tmp_path / "run", stores, *absurd)
    ended = run_here("pretrain", *arguments)
    assert ended.code == 1
    (said,) = [line for line in ended.errors.splitlines() if line.startswith("failed:")]
    step = int(said.split("in step ")[1].split(" ")[0])
    assert f"of step {step - 1}, is saved" in said and ended.errors.splitlines()[-1] == said
    assert f"rows {(step - 1) * 8} to {step * 8 - 1}: " in said and str(stores[0]) in said
    assert checkpoints(tmp_path / "run")[-1] == step - 1
    assert list(metrics(tmp_path / "run")) == list(range(1, step))
    # The state is whole: the same command comes to the same step, and a start from it at a sane rate trains.
    again = run_here("pretrain", *arguments)
    assert again.code == 1 and f"in step {step} " in again.errors.splitlines()[-1]
    assert checkpoints(tmp_path / "run")[-1] == step - 1


def test_a_halted_run_goes_on_from_its_state_at_another_rate(stores, tmp_path):
    """The moments of the state that is saved are those before the update that failed."""
    flags = ("--optimizer.warmup", 0, "--optimizer.clip-norm", 0, "--num-steps", 6, *STEADY)
    sane = pretrain_arguments(tmp_path / "sane", stores, *flags, "--num-steps", 1, "--optimizer.peak-lr", 1e30)
    assert run_here("pretrain", *sane).code == 0
    halted = pretrain_arguments(tmp_path / "halted", stores, *flags, "--optimizer.peak-lr", 1e30)
    assert run_here("pretrain", *halted).code == 1
    assert checksums(tmp_path / "halted", 1) == checksums(tmp_path / "sane", 1)


# Long enough for the gate at a quarter of its steps, which is at 250.
GATED = ("--num-steps", 1000, "--checkpoint-every", 1000, "--log-every", 10)


def run_past_the_gate(arguments):
    """The messages of a run that a signal stops at step 260."""

    def training(self, step, metrics):
        training_of(self, step, metrics)
        if step == 260:
            os.kill(os.getpid(), signal.SIGTERM)

    training_of = Recorder.training
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "training", training)
        ended = run_here("pretrain", *arguments)
    assert ended.code == 75, ended.errors
    return ended.errors


def test_a_loss_that_learns_nothing_is_warned_about_once(stores, tmp_path):
    errors = run_past_the_gate(pretrain_arguments(tmp_path / "run", stores, *GATED, "--optimizer.peak-lr", 0))
    (warning,) = [line for line in errors.splitlines() if line.startswith("warning:")]
    entropy = open_store(stores[0]).unigram_entropy()
    assert "step 250:" in warning and "unigram entropy" in warning and f"({entropy:.3f})" in warning
    assert "--model.init-std" in warning


def test_a_loss_that_falls_is_not_warned_about(tmp_path):
    """A text that says the same again and again is learnt within the 250 steps that the gate waits."""
    (text,) = sentences(1, seed=3)
    tokenizer = train_sentencepiece(sentences(140), 320)
    store = write_store(tmp_path / "store", {"toy": [text[:150]] * 200}, tokenizer)
    given = (*GATED, "--optimizer.peak-lr", 1e-2)
    errors = run_past_the_gate(pretrain_arguments(tmp_path / "run", (store.path, store.path), *given))
    assert "warning" not in errors
    assert metrics(tmp_path / "run")[250] < store.unigram_entropy() - 0.5


def test_a_profile_is_written(stores, tmp_path):
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, "--num-steps", 4, "--profile", "1:3"))
    assert ended.code == 0, ended.errors
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no limits on another process here")
def test_a_full_disk_fails_with_one_line_and_the_older_checkpoint_is_gone_on_from(stores, tmp_path):
    run = tmp_path / "run"
    # At first no save is due for long; the disk is "full" (files may not pass 32 KiB) from the second save on.
    arguments = pretrain_arguments(run, stores, "--num-steps", 200, "--checkpoint-every", 50, "--log-every", 20)
    process = Process("pretrain", *arguments, log=tmp_path / "log")
    process.until(lambda: checkpoints(run), "a checkpoint")
    sound = checkpoints(run)[-1]
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (32 << 10, 32 << 10))
    ended = process.ended()
    assert ended.code == 1, ended.errors
    assert "Traceback" not in ended.errors
    said = ended.errors.splitlines()[-1]
    assert said.startswith("failed:") and "could not be written: File too large" in said and "free some space" in said
    kept = checkpoints(run)
    assert sound in kept and f"step {kept[-1]} is the newest complete one" in said
    ended = run_here("pretrain", *arguments)
    assert ended.code == 0, ended.errors
    assert starts(run)[-1]["started_from"] == f"resumed at step {kept[-1]}"
    assert newest_step(run) == 200


def test_a_first_step_that_is_not_finite_and_a_warmup_longer_than_the_run(stores, tmp_path):
    """Fails on 2968321: the state of step 0 was said to be saved, and nothing was said of the warmup."""
    given = ("--num-steps", 4, "--optimizer.warmup", 50, "--model.init-std", 1e25)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *given))
    assert ended.code == 1 and not checkpoints(tmp_path / "run")
    assert "warning: --optimizer.warmup is 50 steps, but the run has 4" in ended.errors
    said = ended.errors.splitlines()[-1]
    assert "not finite in step 1 (" in said and "began from scratch, and nothing was saved" in said


@pytest.mark.parametrize("name", ["batch-size", "eval-batch-size"])
def test_a_batch_that_cannot_be_held_is_one_line_and_leaves_nothing(stores, tmp_path, name):
    """Fails on 2968321: arrays of hundreds of gigabytes were asked for, and the process had to be killed."""
    given = ("--num-steps", 1, f"--{name}", 10**12)
    said = assert_one_line(
        run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *given)),
        2,
        f"--{name} must",
        "GiB are available",
    )
    assert said and not (tmp_path / "run").exists()


def test_a_step_that_cannot_be_held_leaves_nothing(stores, tmp_path, monkeypatch):
    """Fails on 2968321: the compiled step's own size was not looked at. The host is one of few bytes, by decree."""
    monkeypatch.setattr(pretraining_run, "check_batch_memory", lambda *_: None)
    monkeypatch.setattr(pretraining_run, "check_state_memory", lambda *_: None)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**20)
    given = ("--num-steps", 1, "--batch-size", 64)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, *given))
    assert ended.code == 2 and "the training step takes" in ended.errors.splitlines()[-1]
    assert "--micro-batches" in ended.errors.splitlines()[-1] and not (tmp_path / "run").exists()


def test_out_of_device_memory_says_what_to_change(stores, tmp_path, monkeypatch):
    def exhausted(self, *inputs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12345678901 bytes.\nmore lines")

    monkeypatch.setattr(program_module.CompiledStep, "__call__", exhausted)
    ended = run_here("pretrain", *pretrain_arguments(tmp_path / "run", stores, "--num-steps", 4))
    assert ended.code == 1
    said = ended.errors.splitlines()[-1]
    for remedy in ("--micro-batches", "--execution.remat", "--mesh.fsdp", "12345678901"):
        assert remedy in said, said


def test_a_stop_before_a_resumed_run_trains_moves_nothing_aside(base, stores, tmp_path, monkeypatch):
    """Fails if the signal waits for the first step, or if a checkpoint that is read then passes for damaged."""
    run = copy_at(base, 10, tmp_path / "run")
    read = Checkpoints._read

    def reading(*arguments, **given):
        os.kill(os.getpid(), signal.SIGINT)
        return read(*arguments, **given)

    arguments = pretrain_arguments(run, stores, *STEADY, "--num-steps", 12)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_read", reading)
        ended = run_here("pretrain", *arguments)
    assert ended.code == 75 and ended.errors.splitlines()[-1].startswith("stopped before training began"), ended.errors
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["10", "5"]
    ended = run_here("pretrain", *arguments)
    assert ended.code == 0 and starts(run)[-1]["started_from"] == "resumed at step 10", ended.errors
