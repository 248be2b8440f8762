"""Whole runs of every family at the toy sizes of its debug config: resumed, on another mesh, and read by commands."""

import functools
import json
import math
import shutil
import signal
from fractions import Fraction

import numpy as np
import pytest
from toy_runs import (
    Process,
    assert_one_line,
    checksums,
    copy_at,
    finetune_arguments,
    make_pair_stores,
    make_stores,
    make_task,
    make_word_stores,
    metrics,
    newest_step,
    run_here,
)

from jaxlm.inference.loaded_run import load_run
from jaxlm.models import FAMILIES as ALL
from jaxlm.runs.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("two_devices")

STEPS = 12
FAMILIES = {name: family for name, family in ALL.items() if family.objectives(family.config())}  # that are pretrained
# What a family's run has besides its debug config. AWD-LSTM's losses rise soon at this learning rate, so that the
# average begins, and a spike would be skipped; the character Transformer's layers stop after steps 2, 3, 5 and 6.
FLAGS = {
    "lstm": "--data.reset-probability 0.2",
    "awd_lstm": "--optimizer.peak-lr 60 --average-interval 1 --spike-factor 50 --on-spike skip",
    "character_transformer": "--data.layout streams --model.num-positions 16",
    "transformer_xl": "--model.memory-length 20 --optimizer.warmup 1",
}
PRETRAINED = [name for name, family in FAMILIES.items() if family.layouts]
# tests/training/test_resume.py and tests/commands/test_pretrain_bert.py resume the first two, test_mesh.py in
# tests/distributed has them on meshes.
ELSEWHERE = ("gpt", "bert")
NAMES = [pytest.param(name, marks=[pytest.mark.campaign] * (name in ELSEWHERE)) for name in PRETRAINED]
DECODERS = [name for name, family in FAMILIES.items() if family.role in ("decoder", "encoder_decoder")]
MAKERS = {"encoder": make_pair_stores, "bidirectional": make_word_stores}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def stores(directory):
    """Return a function from a family to its two stores, of text, of pairs of sentences or of words."""

    @functools.cache
    def make(maker):
        place = directory / maker.__name__
        place.mkdir()
        return maker(place)

    return lambda name: make(MAKERS.get(FAMILIES[name].role, make_stores))


@pytest.fixture(scope="module")
def arguments(stores):
    """Return a function (family, run, flags) -> a command line of pretraining."""

    def arguments(name, run, *more, texts=None):
        store, valid = texts or stores(name)
        steps = f"--length 16 --eval-batch-size 8 --num-steps {STEPS} --checkpoint-every 3 --eval-every 2".split()
        steps += ["--keep-newest", 9]
        paths = ("--run", run, "--data.store", store, "--data.validation", valid)
        return (f"debug/{name}", *paths, *steps, *FLAGS.get(name, "").split(), *more)

    return arguments


@pytest.fixture(scope="module")
def base(directory, arguments):
    """Return a function from a family to its run of 12 steps, never stopped."""

    @functools.cache
    def make(name):
        ended = run_here("pretrain", *arguments(name, directory / name))
        assert ended.code == 0, ended.errors
        assert ended.errors.count("compiled the training step") == 1 and "compiled again" not in ended.errors
        return directory / name

    return make


def assert_same_run(found, expected):
    """All lines of the log and all leaves are the same to the bit."""
    for name in ("loss", "learning_rate", "validation_loss", "raw_validation_loss", "layer_nll"):
        assert metrics(found, name) == metrics(expected, name), name
    assert checksums(found) == checksums(expected)


# What is saved of a family besides parameters, moments and the step.
SAVED = {
    "lstm": {"carry"},
    "awd_lstm": {"carry", "iterates", "average"},
    "transformer_xl": {"carry"},
    "elmo": {"carry"},
}


@pytest.mark.versions
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_to_the_bit(base, arguments, name, tmp_path):
    """Fails when the carry is not in the checkpoint, is another row's or begins empty, when momentum, the iterates or
    the losses that begin their average are lost, or a schedule begins anew.
    """
    kinds = {leaf.split("/")[0] for leaf in checksums(base(name))}
    assert kinds - {"params", "opt_state", "step"} >= SAVED.get(name, set())
    assert ("carry" in kinds) == FAMILIES[name].carries
    run = copy_at(base(name), 3, tmp_path / "run")
    ended = run_here("pretrain", *arguments(name, run))
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert_same_run(run, base(name))


@pytest.mark.versions
def test_a_killed_process_goes_on_to_the_bit(base, arguments, tmp_path):
    """A real kill with all that a run can have: streams of varied windows, a carry, an average of iterates that the
    validation losses begin, regularized activations, spikes that are skipped. Fails when any of it is not saved.
    """
    run = tmp_path / "run"
    process = Process("pretrain", *arguments("awd_lstm", run), log=tmp_path / "killed", devices=2)
    process.until(lambda: newest_step(run) >= 5, "step 5")
    process.kill(signal.SIGKILL)
    ended = run_here("pretrain", *arguments("awd_lstm", run))
    assert ended.code == 0, ended.errors
    assert_same_run(run, base("awd_lstm"))


def test_a_rate_that_validation_halves_goes_on_to_the_bit(arguments, tmp_path):
    """Fails when the factor or the newest loss is not in the checkpoint, or the first evaluation halves. The rates are
    compared with onmt/Optim.py's rule on the losses of the log.
    """
    rate = 0.3
    decay = ("--optimizer.decay", "halved_by_validation", "--optimizer.warmup", 0, "--optimizer.peak-lr", rate)
    whole = tmp_path / "whole"
    ended = run_here("pretrain", *arguments("lstm", whole, *decay))
    assert ended.code == 0, ended.errors
    losses, factor, wanted = metrics(whole, "validation_loss"), 1.0, {}
    for step in range(1, STEPS + 1):
        wanted[step] = rate * factor
        if step > 2 and step % 2 == 0 and losses[step] > losses[step - 2]:
            factor *= 0.5
    assert metrics(whole, "learning_rate") == pytest.approx(wanted) and 0 < factor < 1
    run = copy_at(whole, 3, tmp_path / "run")
    ended = run_here("pretrain", *arguments("lstm", run, *decay))
    assert ended.code == 0 and "resumed at step 3" in ended.errors, ended.errors
    assert_same_run(run, whole)
    words = [*arguments("lstm", tmp_path / "none", *decay)]
    at = words.index("--data.validation")
    refused = run_here("pretrain", *words[:at], *words[at + 2 :])
    assert_one_line(refused, 2, "--data.validation must be given with --optimizer.decay halved_by_validation")


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("name", NAMES)
def test_another_mesh_gives_the_same_losses(base, arguments, name, tmp_path):
    """Fails when the carry or a head is sharded otherwise than its rows or kernels, a dropout mask depends on the
    devices, or a run without a validation text does not train.
    """
    run = tmp_path / "run"
    mesh = "--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --checkpoint-every 12".split()
    words = [*arguments(name, run, *mesh)]
    at = words.index("--data.validation")
    ended = run_here("pretrain", *words[:at], *words[at + 2 :])
    assert ended.code == 0, ended.errors
    assert ("without --data.validation no average begins" in ended.errors) == (name == "awd_lstm")
    for term in ("loss", "second_nll", "layer_second_nll"):
        found, wanted = metrics(run, term), metrics(base(name), term)
        assert found.keys() == wanted.keys()
        for step in (1, 2, 3) if found else ():
            np.testing.assert_allclose(found[step], wanted[step], rtol=1e-4, err_msg=term)


@pytest.mark.parametrize("name", [name for name in DECODERS if "streams" in FAMILIES[name].layouts])
def test_other_commands_read_the_family(base, stores, name):
    """Fails when evaluate, generate or show read other parameters than the evaluated ones, assume heads, positions or
    a table of positions, or when an evaluation forgets what came before.
    """
    flags = "--length 16 --batch-size 8 --layout streams".split()
    ended = run_here("evaluate", "perplexity", "--run", base(name), "--data.store", stores(name)[1], *flags)
    assert ended.code == 0, ended.errors
    found = json.loads(ended.output.splitlines()[-1])
    assert (found["layout"], found["carry"]) == ("streams", FAMILIES[name].carries)
    if name != "gpt":  # it is validated on windows
        assert found["validation_loss"] == pytest.approx(metrics(base(name), "validation_loss")[STEPS], rel=1e-5)
    shown = run_here("show", base(name))
    assert shown.code == 0 and " layers x 32" in shown.output, shown.errors
    made = run_here("generate", "--run", base(name), "--prompt", "bada", "--length", 5)
    assert made.code == 0, made.errors


def test_a_family_with_a_source_is_shown_and_generates(base, stores):
    """Fails when a prompt is not read as the source, or an evaluation of one text is begun."""
    shown = run_here("show", base("t5"))
    assert shown.code == 0 and " layers x 32" in shown.output, shown.errors
    made = run_here("generate", "--run", base("t5"), "--prompt", "bada", "--length", 5)
    assert made.code == 0, made.errors
    refused = run_here("evaluate", "perplexity", "--run", base("t5"), "--data.store", stores("t5")[1])
    assert_one_line(refused, 2, "evaluate perplexity must have a model that reads one text")


# One family each


def test_the_carried_state_is_used(base, stores):
    """Fails when streams are evaluated as windows are: metrics with and without a carry differ."""
    found = {}
    for layout in ("streams", "windows"):
        words = ("--run", base("lstm"), "--data.store", stores("lstm")[1], "--length", 16, "--layout", layout)
        found[layout] = json.loads(run_here("evaluate", "perplexity", *words).output.splitlines()[-1])
    streams, windows = found["streams"], found["windows"]
    assert streams["carry"] and (windows["layout"], windows["carry"]) == ("windows", False)
    assert streams["tokens"] == windows["tokens"] and streams["validation_loss"] != windows["validation_loss"]
    assert streams["validation_loss"] == metrics(base("lstm"), "validation_loss")[STEPS]


def test_an_lstm_is_fine_tuned_and_not_exported(base, tmp_path):
    """Fails when fine-tuning or the export assumes heads, positions or a table of positions."""
    run, shown = tmp_path / "tuned", run_here("show", base("lstm"))
    assert "2 layers x 32, 64 units" in shown.output
    make_task(tmp_path / "task")
    _, *words = finetune_arguments(run, tmp_path / "task", "--start", base("lstm"))
    tuned = run_here("finetune", "finetune/lstm", *words)
    assert tuned.code == 0, tuned.errors
    assert "accuracy" in json.loads((run / "results.json").read_text())["dev"]
    exported = run_here("convert", "export", base("lstm"), "--to", f"hf:{tmp_path / 'out'}")
    assert_one_line(exported, 2)


def test_averaging_begins_by_the_validation_losses(base):
    """Fails when the rule is not applied to the losses of this run, or the raw parameters are evaluated after it."""
    run = base("awd_lstm")
    losses, raw = metrics(run, "validation_loss"), metrics(run, "raw_validation_loss")
    steps = [step for step in sorted(losses) if step]
    begins = next(
        step
        for number, step in enumerate(steps)
        if losses[step] > min((losses[before] for before in steps[: max(number - 1, 0)]), default=math.inf)
    )
    assert 3 < begins < 10 and sorted(raw) == [step for step in steps if step > begins]
    assert all(raw[step] != losses[step] for step in raw if step > begins)
    assert f"step {begins}: the validation loss no longer falls" in (run / "log.txt").read_text()
    rates = set(metrics(run, "learning_rate").values())
    assert len(rates) > 3 and max(rates) <= 60 * 26 / 16 + 1e-6
    assert Checkpoints(run / "checkpoints", read_only=True).metadata(STEPS).weights == "average"


def test_a_run_that_its_validation_losses_steer_keeps_them(base, arguments, stores, tmp_path):
    """Fails when losses of two texts, of other streams or at other steps are compared after a resume; the text may
    move."""
    run, (store, valid) = base("awd_lstm"), stores("awd_lstm")
    for flag, value, said in (
        ("--data.validation", store, "the validation stores hold another text"),
        ("--eval-every", 3, "--eval-every: 2 -> 3"),
        ("--eval-batch-size", 16, "--eval-batch-size: 8 -> 16"),
    ):
        assert_one_line(run_here("pretrain", *arguments("awd_lstm", run, flag, value)), 2, said)
    moved = shutil.copytree(valid, tmp_path / "moved")
    ended = run_here("pretrain", *arguments("awd_lstm", run, texts=(store, moved)))
    assert ended.code == 0 and "is complete" in ended.output, ended.errors


def test_a_run_goes_on_in_another_dtype(base, arguments, tmp_path):
    """Fails when a run cannot go on where the default dtype is another one, or its memory is lost there."""
    run = copy_at(base("transformer_xl"), 9, tmp_path / "run")
    ended = run_here("pretrain", *arguments("transformer_xl", run, "--execution.dtype", "bfloat16"))
    assert ended.code == 0, ended.errors
    assert "the carried state of step 9 is converted from float32 to bfloat16" in ended.errors
    assert metrics(run)[10] == pytest.approx(metrics(base("transformer_xl"))[10], rel=1e-2)


def test_a_state_is_continued_with_as_many_streams(base, stores, tmp_path):
    """Fails when the batch size, which decides, is not named."""
    words = ("debug/transformer_xl", "--run", tmp_path / "run", "--data.store", stores("transformer_xl")[0])
    state = ("--length", 16, "--num-steps", 14, "--start", base("transformer_xl"), "--start-with", "state")
    ended = run_here("pretrain", *words, *state, "--batch-size", 16)
    said = f"--batch-size must be 8, the streams that the state of {base('transformer_xl')}@12 has read, got 16; give"
    assert_one_line(ended, 2, said)


def test_the_loss_is_that_of_the_layers_that_contribute(base):
    """Fails when the schedule is not that of the run's steps, or a term is not in the log."""
    run = base("character_transformer")
    second, per_layer = metrics(run, "second_nll"), metrics(run, "layer_nll")
    for step, loss in metrics(run).items():
        of_layers = zip(per_layer[step], metrics(run, "layer_second_nll")[step], strict=True)
        active = [layer for layer in (1, 2, 3) if Fraction(step - 1, STEPS) < Fraction(layer, 8)]
        terms = [first + 0.5 * second for first, second in of_layers]
        expected = metrics(run, "nll")[step] + 0.5 * second[step] + sum(terms[layer - 1] for layer in active)
        assert loss == pytest.approx(expected, rel=1e-5), step


def test_more_steps_would_change_the_losses_of_layers(base, arguments):
    """Fails when a run is continued to another last step, which moves the steps at which layers stop."""
    ended = run_here("pretrain", *arguments("character_transformer", base("character_transformer"), "--num-steps", 20))
    assert ended.code == 2 and "--num-steps: 12 -> 20" in ended.errors


def test_no_command_loads_auxiliary_classifiers(base):
    """Fails when they are part of what other commands read."""
    assert set(load_run(base("character_transformer")).params["head"]) == {"classifier"}
