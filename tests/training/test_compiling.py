"""What a compiled training step depends on: shapes and kinds, and not on the numbers of a run."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from toy_runs import (
    Process,
    finetune_arguments,
    make_stores,
    make_task,
    metrics,
    pretrain_arguments,
    run_here,
)

from jaxlm.config import load_config
from jaxlm.data.batch import ExampleBatch
from jaxlm.distributed.mesh import MeshConfig, abstract_replicated, batch_sharding, make_mesh, replicated, use_mesh
from jaxlm.finetuning.trial import make_programs, trial_settings
from jaxlm.nn.config import Execution
from jaxlm.tasks import KINDS, Size
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.optimizer import OptimizerConfig, learning_rate, schedule_of
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import CompiledStep, abstract_rows, empty_row, make_program, with_vocabulary
from jaxlm.training.step import settings_of


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:2])


def other_numbers(config):
    """The config with other values of all that is data of the step."""
    optimizer = replace(config.optimizer, peak_lr=7e-5, warmup=0.25, floor=0.05)
    return replace(config, optimizer=optimizer, num_steps=12_345, log_every=17, seed=4)


def program_of(config: PretrainConfig, mesh) -> str:
    """The program of a run's step as text, before it is compiled."""
    with use_mesh(mesh):
        program = make_program(make_pretraining(config, None), config, mesh)
        settings = replicated(settings_of(config.optimizer, config.num_steps, norms_every=config.log_every), mesh)
        batch = abstract_rows(empty_row(config, config.length), config.batch_size, mesh)
        text = program.step.lower(program.abstract, batch, settings).as_text()
        assert program.lowered(batch).as_text() == text, "what is sized is not what is run"
    return text


@pytest.mark.parametrize("name", ["debug/gpt", "debug/bert"])
def test_rates_and_the_length_of_a_run_are_no_part_of_its_program(name, mesh):
    """Fails on 2968321: each of these numbers was a constant of the program, and another one compiled it anew."""
    config = with_vocabulary(load_config(name, PretrainConfig))
    text = program_of(config, mesh)
    assert program_of(other_numbers(config), mesh) == text
    assert program_of(replace(config, optimizer=replace(config.optimizer, decay="constant")), mesh) != text


def test_nor_of_a_fine_tunings(mesh):
    """Fails on 2968321: of the same numbers only the learning rate and the seed were data."""
    config = FinetuneConfig(model=replace(load_config("debug/gpt", PretrainConfig).model, vocab_size=50), num_steps=9)
    task = KINDS["classification"](name="toy", labels=("a", "b"))

    def text(config: FinetuneConfig) -> str:
        work = SimpleNamespace(config=config, num_steps=config.num_steps, task=task, mesh=mesh, tokenizer=None)
        work.encoded = {"train": SimpleNamespace(length=16)}
        work.batches = lambda seed: SimpleNamespace(sizes=(Size(0, 16),), steps_per_epoch=5)
        with use_mesh(mesh):
            programs = make_programs(work)
            ids, numbers = np.zeros((8, 1, 16), np.int32), np.zeros(8, np.int32)
            row = ExampleBatch(ids, ids[..., 0], ids[..., 0], ids[..., 0], numbers, np.float32(numbers), numbers)
            sharding = batch_sharding(mesh)
            batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), row)
            settings = abstract_replicated(trial_settings(work, config.optimizer.peak_lr), mesh)
            return programs.train.step.lower(programs.program.abstract, batch, settings).as_text()

    assert text(other_numbers(config)) == text(config)


@pytest.mark.parametrize("kind", ["adamw", "openai_adam", "bert_adamw"])
@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_schedule_that_is_data_has_the_bits_of_one_of_constants(kind, decay):
    """Fails when a run of before is continued with rates that are off by a bit: XLA multiplies by the inverse of a
    constant, and combines constants, where it divides by data.
    """
    config, num_steps = OptimizerConfig(kind=kind, peak_lr=2.5e-4, warmup=0.13, decay=decay), 804
    as_data = jax.jit(functools.partial(learning_rate, config))
    schedule = schedule_of(config, num_steps)
    total, warmup = num_steps, config.warmup_steps(num_steps)

    @jax.jit
    def of_constants(t):  # as it was written before
        t = t.astype(np.float32)
        fall = lambda x: 1.0 - x if decay == "linear" else 0.5 * (1.0 + jax.numpy.cos(jax.numpy.pi * x))  # noqa: E731
        where, clip = jax.numpy.where, jax.numpy.clip
        if kind == "bert_adamw":
            return 2.5e-4 * where(t < warmup, t / warmup, fall(clip(t / total, 0.0, 1.0)))
        if kind == "adamw":
            rise = jax.numpy.minimum(1.0, (t + 1) / warmup)
            return 2.5e-4 * where(t < warmup, rise, fall(clip((t - warmup) / (total - warmup), 0.0, 1.0)))
        x, share = t / total, warmup / total
        warming = x <= share
        left = where(warming, 1.0, fall(x)) if decay == "cosine" else fall(x)
        return 2.5e-4 * where(warming, x / share, 1.0) * left

    for t in range(0, num_steps, 7):
        assert float(as_data(np.int32(t), schedule)) == float(of_constants(np.int32(t))), t


@pytest.mark.parametrize("kind", ["pretrain", "finetune", "group"])
@pytest.mark.usefixtures("two_devices")
def test_the_options_of_the_compiler_reach_every_step_of_a_run(kind, tmp_path, monkeypatch):
    """Fails when training or an evaluation that selects parameters is compiled without them, or the log and config.json
    do not have the field. The options stand in for a GPU's, which the CPU's compiler does not read.
    """
    options, compiled = {"xla_embed_ir_in_executable": True}, []
    original = CompiledStep._compiled
    monkeypatch.setattr(Execution, "compiler_options", lambda self: options if self.deterministic else {})
    monkeypatch.setattr(CompiledStep, "_compiled", lambda self, *of: compiled.append(self) or original(self, *of))
    run, (store, valid) = tmp_path / "run", make_stores(tmp_path)
    if kind == "pretrain":
        words = pretrain_arguments(run, (store, valid), "--num-steps", 2, "--eval-every", 1)
    else:
        sizes = "--model.num-layers 1 --model.width 16 --model.num-heads 2 --model.feed-forward-width 32".split()
        several = ("--seeds", 2, "--members-per-group", 2) if kind == "group" else ()
        task = make_task(tmp_path / "task", train=16, dev=4, test=2)
        words = finetune_arguments(run, task, "--tokenizer", f"store:{store}", *sizes, *several)
    ended = run_here(kind.replace("group", "finetune"), *words, "--execution.deterministic")
    assert ended.code == 0, ended.errors
    training = "group's training" if kind == "group" else "training"
    assert {step.name for step in compiled} == {training, "evaluation"}
    assert all(step.options == options for step in compiled)
    said = "execution.deterministic has no effect on a cpu"
    assert (ended.errors + ended.output).count(said) == 1
    assert json.loads((run / "config.json").read_text())["execution"]["deterministic"] is True


@pytest.mark.slow
def test_a_second_run_with_other_numbers_is_served_by_the_cache(tmp_path, monkeypatch):
    """Fails on 2968321: the second run compiled its step anew and left it in the cache as another."""
    stores, cache = make_stores(tmp_path), tmp_path / "cache"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    steps = lambda: {path.name for path in cache.rglob("jit_train_step*-cache")}  # noqa: E731
    first = ("--num-steps", 4, "--log-every", 1)
    other = ("--num-steps", 6, "--log-every", 2, "--seed", 3, "--optimizer.peak-lr", 1e-4, "--optimizer.warmup", 3)
    found = []
    for number, given in enumerate((first, other)):
        run = tmp_path / f"run{number}"
        ended = Process("pretrain", *pretrain_arguments(run, stores, *given), log=tmp_path / "log").ended()
        assert ended.code == 0, ended.errors
        assert "compiling the training step for batch 8 x " in ended.errors, "people wait here"
        found.append(steps())
        assert metrics(run, "learning_rate"), "the run is one"
    assert found[0] and found[1] == found[0]
