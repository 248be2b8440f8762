"""`--micro-batches auto` and `--execution.remat auto`: the first choice that fits, found by compiling; what they do
where memory is not known.
"""

import collections
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from toy import TOY
from toy_runs import finetune_arguments, make_stores, make_task, pretrain_arguments, run_here

from jaxlm.compiler import memory
from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError, RunError
from jaxlm.nn.config import Execution
from jaxlm.training import program
from jaxlm.training.config import PretrainConfig, check_batches
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining

pytestmark = pytest.mark.usefixtures("two_devices")

# Wide logits, which are most of what a micro-batch takes.
CONFIG = PretrainConfig(
    replace(TOY, vocab_size=5000, num_layers=1),
    optimizer=OptimizerConfig(peak_lr=1e-3, warmup=2),
    execution=Execution(loss_chunks=1),
    batch_size=32,
    length=TOY.num_positions,
    micro_batches="auto",
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:2])


def fitted(config, mesh):
    return program.fitted_to_devices(
        config, lambda choice: make_pretraining(choice, None), [program.empty_row(config, config.length)], mesh
    )


def test_numbers_are_those_the_mesh_can_deal_out(mesh):
    """Fails when a micro-batch would have rows for some devices only."""
    assert program.micro_batch_counts(24, mesh) == [1, 2, 3, 4, 6, 12]
    with pytest.raises(InputError, match="batch_size must be .*, got 25"):
        program.micro_batch_counts(25, mesh)


def test_the_smallest_that_fits_is_taken(mesh):
    """Fails when a larger number, or one that does not fit, is taken; the others are not asked for."""
    asked = []

    def fits(config):
        asked.append(config.micro_batches)
        return config.micro_batches >= 3

    assert program.first_that_fits(CONFIG, mesh, fits).micro_batches == 4 and asked == [1, 2, 4]
    assert program.first_that_fits(CONFIG, mesh, lambda config: False) is None


def test_recomputing_is_tried_before_a_further_micro_batch(mesh):
    """Fails when the order is another one, or a field that is not auto changes."""
    auto = replace(CONFIG, execution=replace(CONFIG.execution, remat="auto"))
    found = [(one.micro_batches, one.execution.remat) for one in program.choices(auto, mesh)]
    assert found[:4] == [(1, "none"), (1, "dots"), (1, "full"), (2, "none")]
    given = replace(auto, micro_batches=2)
    assert [one.execution.remat for one in program.choices(given, mesh)] == ["none", "dots", "full"]
    assert {one.micro_batches for one in program.choices(given, mesh)} == {2}


def test_auto_recomputes_where_the_compiler_says_that_nothing_else_fits(mesh, monkeypatch):
    """The limit is between the memory of a step that keeps all values and that of one that recomputes its layers.

    With a loop of layers: a CPU's compiler undoes recomputation without one.
    """
    deep = replace(CONFIG, model=replace(CONFIG.model, vocab_size=100, num_layers=8), micro_batches=1)
    auto = replace(deep, execution=replace(deep.execution, remat="auto", unroll=1))
    peaks = [
        program.compile_training(make_pretraining(one, None), one, program.empty_row(one, one.length), mesh).peak_gib
        for one in program.choices(auto, mesh)
    ]
    assert peaks[2] < 0.9 * peaks[0]
    monkeypatch.setattr(program, "memory_limit_gib", lambda: (peaks[0] + peaks[2]) / 2)
    assert fitted(auto, mesh).execution.remat in ("dots", "full")
    monkeypatch.setattr(program, "memory_limit_gib", lambda: None)
    assert fitted(auto, mesh).execution.remat == "none"


def test_auto_is_one_where_memory_is_not_known(mesh, caplog):
    """A CPU does not say: the log does. A given number stays, and batches are checked before anything is compiled."""
    with caplog.at_level("INFO"):
        assert fitted(CONFIG, mesh).micro_batches == 1
    assert "do not report their memory" in caplog.text
    assert fitted(replace(CONFIG, micro_batches=2), mesh).micro_batches == 2
    assert check_batches(CONFIG, mesh) == 32
    with pytest.raises(InputError, match="batch_size must be .*, got 33"):
        check_batches(replace(CONFIG, batch_size=33), mesh)


def test_auto_is_what_the_compiler_says_fits(mesh, monkeypatch):
    """Fails when the compiled program's memory does not decide. The limit is between that of one piece and of two."""
    pretraining, row = make_pretraining(CONFIG, None), program.empty_row(CONFIG, CONFIG.length)
    one, two = (
        program.compile_training(pretraining, replace(CONFIG, micro_batches=count), row, mesh).peak_gib
        for count in (1, 2)
    )
    assert two < 0.9 * one
    monkeypatch.setattr(program, "memory_limit_gib", lambda: (one + two) / 2)
    assert fitted(CONFIG, mesh).micro_batches == 2
    monkeypatch.setattr(program, "memory_limit_gib", lambda: two / 1000)
    with pytest.raises(InputError, match="micro_batches auto: no choice fits"):
        fitted(CONFIG, mesh)


def test_what_the_compiler_refuses_does_not_fit():
    """The TPU compiler's two ways to say so; without sizes there is none."""
    said = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G)."
    assert program._named_gib(said) == 20
    assert program._named_gib("Ran out of memory in memory space hbm. Used 512.5M of 256.00M hbm.") == 512.5 / 1024
    assert program._named_gib("RESOURCE_EXHAUSTED") is None


def test_a_run_has_the_number_that_was_found(tmp_path, monkeypatch):
    """config.json holds a number, and the same command goes on. A limit that one micro-batch exceeds, by decree."""
    peaks = {1: 2.0, 2: 0.5}
    found = lambda _, config, *__, **___: program.CompiledTraining(object(), peaks[config.micro_batches], 0.0)  # noqa: E731
    monkeypatch.setattr(program, "memory_limit_gib", lambda: 1.0)
    monkeypatch.setattr(program, "compile_training", found)
    given = ("--num-steps", 2, "--batch-size", 16, "--micro-batches", "auto")
    arguments = pretrain_arguments(tmp_path / "run", make_stores(tmp_path), *given)
    for _ in range(2):
        ended = run_here("pretrain", *arguments)
        assert ended.code == 0, ended.errors
    assert "micro_batches 2, remat none, length" in ended.errors
    assert json.loads((tmp_path / "run" / "config.json").read_text())["micro_batches"] == 2


def test_exhausted_memory_names_the_step_and_the_next_smaller_batch(monkeypatch):
    """Fails when memory that runs out in a step ends in XLA's own message, or names rows of another axis."""
    step = program.CompiledStep("training", jax.jit(lambda state, batch: jnp.zeros(10**15, jnp.int8) + state))
    state, batch = jnp.int8(0), {"ids": jnp.zeros((24, 3))}
    with pytest.raises(InputError, match="got 24: the training step takes .* GiB are available; give --batch-size 12"):
        step(state, batch)
    monkeypatch.setattr(program, "check_program_memory", lambda *_, **__: None)
    step = program.CompiledStep("group's training", step.step, rows_axis=1)
    said = "out of device memory: the group's training step takes 931322.6 GiB by the compiler; give --batch-size 1, "
    with pytest.raises(RunError, match=f"^{said}.*RESOURCE_EXHAUSTED"):
        step(state, batch)


def test_batches_of_another_class_have_a_program_of_their_own():
    """Fails when a batch runs the program of another class whose arrays have the same shapes."""
    first, second = (collections.namedtuple(name, "ids") for name in ("First", "Second"))
    step = program.CompiledStep("training", jax.jit(lambda state, batch: state + (type(batch) is first)))
    found = [int(step(jnp.int32(0), of(jnp.zeros((2, 3))))) for of in (first, second, first)]
    assert found == [1, 0, 1] and len(step.programs) == 2


def test_the_command_for_the_largest_batch_names_this_gpu(monkeypatch):
    """Fails when the advice names another GPU than JAX reports, or appears where there is none."""
    assert memory.largest_batch() == ""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 3060")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert "--largest-batch and --topology rtx3060 finds" in memory.largest_batch()
    device.device_kind = "NVIDIA RTX A6000"
    assert "--topology NAME finds" in memory.largest_batch()


def test_a_fine_tuning_has_the_choice_that_was_found(tmp_path, monkeypatch):
    """One that recomputes is tried before two micro-batches; a resumed run keeps it, and a flag replaces it.

    A limit that only `full` keeps to with one micro-batch, by decree.
    """
    asked = []

    def found(_, config, row, *__):
        asked.append((config.micro_batches, config.execution.remat, row.ids.shape[-1]))
        return program.CompiledTraining(object(), 0.5 if config.execution.remat == "full" else 2.0, 0.0)

    monkeypatch.setattr(program, "memory_limit_gib", lambda: 1.0)
    monkeypatch.setattr(program, "compile_training", found)
    task, store = make_task(tmp_path / "task"), make_stores(tmp_path)[0]
    toy = "--model.num-layers 1 --model.width 16 --model.num-heads 2 --model.feed-forward-width 32".split()
    given = ("--tokenizer", f"store:{store}", *toy, "--micro-batches", "auto")
    arguments = finetune_arguments(tmp_path / "run", task, *given)
    ended = run_here("finetune", *arguments, "--execution.remat", "auto")
    assert ended.code == 0, ended.errors
    assert [one[:2] for one in asked] == [(1, "none"), (1, "dots"), (1, "full")]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["micro_batches"], saved["execution"]["remat"]) == (1, "full")
    asked.clear()
    assert run_here("finetune", *arguments, "--execution.remat", "auto").code == 0
    assert [one[:2] for one in asked] == [(1, "full")]
