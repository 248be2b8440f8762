"""Reading compiled TPU programs, and `jaxlm.aot` on the real compiler where it is installed.

Fails when a loop is counted once, a collective is missed, counted twice or given to the wrong group, or when the report
leaves out what the step does.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxlm import aot
from jaxlm.compiler import chips, kernels
from jaxlm.compiler.chips import RUNTIME_GIB, topology
from jaxlm.compiler.collectives import CHIPS, SLICES
from jaxlm.compiler.estimate import estimate
from jaxlm.config import load_config, with_fields
from jaxlm.distributed.devices import compiling_for, peak_of_kind
from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.errors import InputError, RunError
from jaxlm.models.gpt import GPTConfig
from jaxlm.nn.config import Execution
from jaxlm.nn.transformer import attend
from jaxlm.training import program as training_program
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.views import aot_report
from jaxlm.views.aot_report import _changes, report
from jaxlm.views.aot_steps import PretrainingStep

VERSIONS = pytest.mark.versions  # of what reads the text of a compiled program, in whatever form a version writes it


def test_the_clock_is_the_peak_of_all_multipliers():
    """The published clocks: 1.05 GHz of v4, 1.5 of v5e, 1.75 of v5p and v6e."""
    clocks = {name: round(chip.clock_hz / 1e9, 2) for name, chip in chips.CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}


@pytest.mark.parametrize(
    ("name", "slices", "said"),
    [
        ("v7:4x4", 1, "must name one of v4, v5e"),
        ("v5e:4x4x4", 1, "must have 2 sides for v5e"),
        ("v5p:4x4", 1, "v5p:4x4x4"),
        ("v5e", 1, "must have 2 sides for v5e"),
        ("v5e:0x4", 1, "2 sides"),
        ("v5e:16x32", 1, "at most 256 chips per slice"),
    ],
)
def test_topologies_that_are_none_are_refused(name, slices, said):
    with pytest.raises(InputError, match=said):
        topology(name, slices)


@pytest.fixture(autouse=True, scope="module")
def no_cache():
    """As in `jaxlm.aot`: JAX cannot read a program back that was compiled without a device, and warns on each try."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def topology_or_skip(name, slices=1):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU's compiler, which the extra [test] brings on Linux (x86-64)")
    return topology(name, slices)


def compiled(program, where, *shapes, dtype=jnp.float32, spec=None):
    """`program` compiled for a topology: on one chip, or on a mesh `data` of all with arguments laid out by `spec`."""
    mesh = make_mesh(MeshConfig(), where.devices())
    place = NamedSharding(mesh, spec) if spec is not None else SingleDeviceSharding(where.devices()[0])
    with jax.set_mesh(mesh) if spec is not None else contextlib.nullcontext():
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in shapes]
        return jax.jit(program).lower(*arguments).compile(), mesh.shape


@VERSIONS
def test_loops_of_3_and_5_matrix_products():
    """Fails when nested loops are not multiplied out, in cycles or in FLOPs: 15 products of 1024 x 1024."""
    where = topology_or_skip("v5e:2x2")

    def product(x):
        return jnp.tanh(x @ x)

    def nested(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.fori_loop(0, 5, lambda _, z: product(z), y), x)

    one, many = (
        estimate(*compiled(program, where, (1024, 1024), dtype=jnp.bfloat16)[:1], where, {"data": 4})
        for program in (product, nested)
    )
    assert (one.matmul_flops, many.matmul_flops) == (2 * 1024**3, 15 * 2 * 1024**3)
    assert many.parts["matrix products"] == pytest.approx(15 * one.parts["matrix products"], rel=0.2)
    assert one.parts["matrix products"] == pytest.approx(2 * 1024**3 / 197e12 * 1e3, rel=0.5)


@VERSIONS
def test_flops_of_products_with_batch_dimensions_are_the_compilers():
    """Fails when the windows and dilations that batch dimensions become are miscounted; XLA counts too, without loops.

    One product of the forward pass and four of the backward pass: the gradient of a sum needs no output.
    """
    where = topology_or_skip("v5e:2x2")

    def attention(q_BHLK, k_BHLK):
        scores_BHLL = jnp.einsum("bhlk,bhmk->bhlm", q_BHLK, k_BHLK)
        return jnp.einsum("bhlm,bhmk->bhlk", jnp.maximum(scores_BHLL, 0), q_BHLK)

    step = jax.grad(lambda q_BHLK, k_BHLK: attention(q_BHLK, k_BHLK).astype(jnp.float32).sum(), argnums=(0, 1))
    program, _ = compiled(step, where, (3, 5, 128, 64), (3, 5, 128, 64), dtype=jnp.bfloat16)
    found = estimate(program, where, {"data": 4}).matmul_flops
    assert found == 5 * (2 * 3 * 5 * 128 * 128 * 64)
    assert program.cost_analysis()["flops"] == pytest.approx(found, rel=0.1)


@VERSIONS
def test_an_all_reduce_of_known_bytes():
    """Fails when bytes are counted of all chips, or time is taken over both directions or one link."""
    where = topology_or_skip("v5e:2x4")
    total = lambda x: jax.lax.with_sharding_constraint(x.sum(axis=0), P())  # noqa: E731
    program, mesh = compiled(total, where, (64, 2**20), spec=P("data"))
    ((one, time),) = estimate(program, where, mesh).collectives
    assert (one.kind, one.axis, one.network, one.size, one.bytes) == ("all-reduce", "data", CHIPS, 8, 4 * 2**20)
    assert time == pytest.approx(2 * 7 / 8 * 4 * 2**20 / 200e9 * 1e3)


@VERSIONS
def test_slices_have_data_across_them_and_the_data_centers_network_between():
    """Fails when a slice's chips are dealt out to several copies, or what crosses slices is timed as if it did not."""
    where = topology_or_skip("v5e:2x4", slices=2)
    mesh = make_mesh(MeshConfig(data=4, fsdp=2, tensor=2), where.devices())
    assert [{device.slice_index for device in part.flat} for part in np.split(mesh.devices, 2)] == [{0}, {1}]
    with pytest.raises(InputError, match="a multiple of the 2 slices"):
        make_mesh(MeshConfig(data=1, fsdp=16), where.devices())
    total = lambda x: jax.lax.with_sharding_constraint(x.sum(axis=0), P())  # noqa: E731
    program, sizes = compiled(total, where, (64, 2**20), spec=P("data"))
    found = {one.network: (one, time) for one, time in estimate(program, where, sizes).collectives if one.bytes > 64}
    between, time = found[SLICES]
    assert (between.kind, between.axis, between.size) == ("all-reduce", "data", 2) and CHIPS in found
    assert between.bytes * 8 == 4 * 2**20, "each chip of a slice brings its eighth"
    assert time == pytest.approx(between.bytes / 3.125e9 * 1e3)


@VERSIONS
def test_a_kernel_takes_its_bundles():
    """Flash attention, 12 heads of 512 x 64, 16 rows on v5e: 0.12 ms forward, 0.20 backward, read once by hand.

    Fails when a kernel is not measured, its grid counts once, or a loop of the step does not multiply it.
    """
    where = topology_or_skip("v5e:2x2")
    attention = lambda x: attend(x, x, x, causal=True, backend="flash")  # noqa: E731
    loss = lambda x: attention(x).astype(jnp.float32).sum()  # noqa: E731
    three = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.grad(loss)(y), x)  # noqa: E731
    with compiling_for("tpu", kind=where.chip.kind):
        program, _ = compiled(three, where, (16, 12, 512, 64), dtype=jnp.bfloat16)
    found = estimate(program, where, {"data": 4})
    forward, backward = sorted(found.kernels, key=lambda kernel: "backward" in kernel.name)
    assert "flash_attention_forward" in forward.name and "flash_attention_backward" in backward.name
    assert (forward.count, backward.count) == (3, 3)
    assert forward.milliseconds / 3 == pytest.approx(0.12, rel=0.25)
    assert backward.milliseconds / 3 == pytest.approx(0.20, rel=0.25)
    assert found.parts["kernels"] == pytest.approx(forward.milliseconds + backward.milliseconds)


def tiny(**changes):
    """A GPT of one layer that compiles in seconds."""
    model = GPTConfig(
        vocab_size=1000,
        num_positions=128,
        num_layers=1,
        width=128,
        num_heads=2,
        feed_forward_width=512,
        dropout_rate=0.0,
        embedding_dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    settings = {"batch_size": 32, "length": 128, "num_steps": 1000} | changes
    return PretrainConfig(model, optimizer=OptimizerConfig(peak_lr=1e-3, warmup=2), **settings)


def test_an_axis_need_not_be_a_side_of_the_torus():
    """Fails when eight pieces of a model are refused on 4 x 4 x 4 chips, or a chip stands twice in the mesh."""
    devices = topology_or_skip("v5p:4x4x4").devices()
    mesh = make_mesh(MeshConfig(data=-1, fsdp=8), devices)
    assert dict(mesh.shape) == {"data": 8, "fsdp": 8, "tensor": 1}
    assert set(mesh.devices.flat) == set(devices)


CAMPAIGN = pytest.mark.campaign  # v5e is that of the other tests here


@pytest.mark.parametrize(
    "name",
    [
        "v4:2x2x1",
        pytest.param("v5e:2x2", marks=CAMPAIGN),
        pytest.param("v5p:2x2x1", marks=CAMPAIGN),
        pytest.param("v6e:2x2", marks=VERSIONS),
    ],
)
def test_the_report_of_a_tiny_step(name, tmp_path, capsys):
    """Fails when a chip is not one device of the compiler, or the report leaves out what the step does."""
    where = topology_or_skip(name)
    figures = aot.aot(aot.Arguments("", topology=name, output=tmp_path / "report.json", settings=tiny()))
    assert json.loads((tmp_path / "report.json").read_text()) == figures
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    assert figures["chips"] == 4 and figures["fits"] and 0 < figures["peak_gib"] < figures["hbm_gib"]
    assert figures["step_milliseconds"] == pytest.approx(sum(figures["step_parts"].values()), rel=1e-2)
    hidden = figures["step_milliseconds"] - figures["step_milliseconds_overlapped"]
    assert -1e-3 <= hidden <= figures["step_parts"]["collectives"] + 1e-3
    assert {(one["kind"], one["axis"]) for one in figures["collectives"]} == {("all-reduce", "data")}
    flash = {"flash_attention_forward": 1, "flash_attention_backward": 1}
    assert {one["name"]: one["count"] for one in figures["kernels"]} == flash and not figures["uncounted_kernels"]
    assert not figures["lower_bound"] and "≥" not in "".join(aot.lines(figures))
    libtpu = importlib.metadata.version("libtpu")
    assert figures["versions"] == {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "libtpu": libtpu}
    assert f"versions: jax {jax.__version__}, jaxlib {jax.lib.__version__}, libtpu {libtpu}" in aot.lines(figures)
    blocks, tokens, positions = 128 * (4 * 128 + 8 * 128), 128 * 1000, 128 * 128
    expected = 2 * blocks + 4 * (2 * tokens + positions)  # tokens as input and as output; and some biases and norms
    reduced = sum(one["bytes"] for one in figures["collectives"])
    assert expected < reduced < 1.01 * expected, "weights' gradients travel in bfloat16, those of tables in float32"
    assert figures["chip_tflops"] * 4 == pytest.approx(figures["model_tflops"], rel=0.1)
    flops = figures["model_tflops"] / figures["step_milliseconds"] * 1e3
    assert figures["mfu"] == pytest.approx(flops / (4 * where.chip.peak_tflops), rel=0.1)
    assert figures["days"] == round(1000 * figures["step_milliseconds"] / 1e3 / 86400, 2)
    rates = {one["program"]: one["estimated"] / one["peak"] for one in figures["calibration"]}
    assert 0.6 < rates["matrix product"] <= 1 and 0.1 < rates["row sums"] < rates["elementwise"] <= 1


def test_a_step_with_a_kernel_that_cannot_be_read_is_a_lower_bound(monkeypatch):
    """Fails when a time without one of its kernels looks like any other, in the text or in the JSON."""
    where = topology_or_skip("v5e:2x2")
    monkeypatch.setattr(kernels, "_measured", {})
    monkeypatch.setattr(kernels.subprocess, "run", lambda *words, **more: subprocess.CompletedProcess([], 1, "", "no"))
    aot_report._estimate.cache_clear()
    figures = report(PretrainingStep(tiny()), where)
    aot_report._estimate.cache_clear()
    assert figures["lower_bound"] and figures["steps"][0]["lower_bound"] and len(figures["uncounted_kernels"]) == 2
    said = "\n".join(aot.lines(figures))
    assert f"step          ≥ {figures['step_milliseconds']:.1f} ms, ≤ " in said and "MFU ≤ " in said
    assert f"the whole run: ≥ {figures['days']:.1f} days" in said
    row = aot.table([{"choice": "as given"} | figures])[1]
    assert f"≥ {figures['step_milliseconds']:.1f}  " in row and f"≤ {figures['mfu']:.1%}  " in row


@pytest.mark.slow
def test_the_report_of_a_small_step(tmp_path):
    """Two lengths, fsdp: the full length at the top, and the gathers of weights that fsdp makes."""
    topology_or_skip("v5e:2x2")
    config = load_config("pretrain/bert_small", PretrainConfig)
    model = replace(config.model, num_layers=1, vocab_size=2000)
    config = replace(config, model=model, mesh=MeshConfig(data=2, fsdp=2))
    figures = aot.aot(aot.Arguments("", topology="v5e:2x2", output=tmp_path / "report.json", settings=config))
    assert json.loads((tmp_path / "report.json").read_text()) == figures
    assert figures["chips"] == 4 and figures["fits"] and 0 < figures["peak_gib"] < figures["hbm_gib"] == 16
    assert [step["length"] for step in figures["steps"]] == [128, 32] and figures["length"] == 128
    assert figures["step_milliseconds"] == pytest.approx(sum(figures["step_parts"].values()), rel=1e-2)
    assert {"all-reduce", "all-gather"} <= {one["kind"] for one in figures["collectives"]}
    flops = figures["model_tflops"] / figures["step_milliseconds"] * 1e3
    assert figures["mfu"] == pytest.approx(flops / (4 * 197), rel=2e-2)


@pytest.mark.slow
def test_choices_side_by_side(capsys):
    """Fails when a choice is compared without its fields, or a topology of two slices is one."""
    topology_or_skip("v5e:2x2")
    compare = ("mesh.fsdp=4", "topology=v5e:2x4 slices=2")
    figures = aot.aot(aot.Arguments("", topology="v5e:2x2", compare=compare, settings=tiny()))
    assert [one["choice"] for one in figures["compared"]] == list(compare)
    fsdp, slices = figures["compared"]
    assert fsdp["mesh"]["fsdp"] == 4 and "all-gather" in {one["kind"] for one in fsdp["collectives"]}
    assert slices["chips"] == 16 and SLICES in {one["network"] for one in slices["collectives"]}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("as given", *compare))]
    assert len(rows) == 3


def test_a_comparison_without_a_value_is_refused():
    """One line that says how, before anything is compiled."""
    with pytest.raises(InputError, match="mesh.fsdp=16"):
        aot.aot(aot.Arguments("", compare=("--mesh.fsdp 16",), settings=tiny()))


@pytest.mark.slow
def test_what_does_not_fit_is_changed_until_it_does(monkeypatch):
    """On a chip with a little less memory than the step takes, two micro-batches fit.

    Fails when advice is given that was not compiled. What auto takes is tested in tests/training/test_fit.py.
    """
    where = topology_or_skip("v5e:2x2")
    config = replace(tiny(batch_size=256), model=replace(tiny().model, vocab_size=4000))
    small = replace(where.chip, memory_gib=RUNTIME_GIB + 0.95 * report(PretrainingStep(config), where)["peak_gib"])
    monkeypatch.setitem(chips.CHIPS, "v5e", small)
    figures = aot.aot(aot.Arguments("", topology="v5e:2x2", settings=config))
    assert not figures["fits"] and figures["advice"]["choice"] == "--micro-batches 2"
    assert figures["advice"]["tried"] == [
        {"choice": "--micro-batches 2", "fits": True, "peak_gib": figures["advice"]["report"]["peak_gib"]}
    ]


def test_what_the_compiler_refuses():
    """A table of 6 GB with its two moments on chips of 16: the report says what is needed, and has no milliseconds."""
    where = topology_or_skip("v5e:2x2")
    config = replace(tiny(batch_size=4), model=replace(tiny().model, vocab_size=12_000_000))
    figures = report(PretrainingStep(config), where)
    assert not figures["fits"] and figures["peak_gib"] > 16 and figures["step_milliseconds"] is figures["days"] is None
    assert any("DOES NOT FIT" in line for line in aot.lines(figures))
    assert aot.table([{"choice": "as given"} | figures])[1].split()[2] == "no"


def test_changes_are_tried_in_order():
    """What costs least first; with slices `data` stays divisible by them; nothing is tried that the config has."""
    mesh = make_mesh(MeshConfig())
    config = tiny(batch_size=16, execution=Execution(remat="dots"))
    said = [
        " ".join(f"{name} {value}" for name, value in change.items())
        for change in _changes(PretrainingStep(config), mesh, 2)
    ]
    both = "micro-batches 2 execution.remat full"
    pieces = ("mesh.data 4 mesh.fsdp 2", "mesh.data 2 mesh.fsdp 4")
    expected = ["micro-batches 2", "execution.remat full", both]
    for piece in pieces:
        expected += [piece, f"{piece} {both}"]
    assert said == expected
    changed = with_fields(config, {"micro-batches": 2, "execution.remat": "full", "mesh.data": 4, "mesh.fsdp": 2})
    wanted = replace(config, micro_batches=2, execution=Execution(remat="full"), mesh=MeshConfig(data=4, fsdp=2))
    assert changed == wanted


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("mesh.fsdp='4", "--compare"),
        ("mesh.fsdp=3", "does not fit 4 devices"),
        ("micro-batches=5", "batch_size must be .*, got 32"),
        ("topology=v5e:3x5", "the sides are even x even, or 1x1"),
    ],
)
def test_a_comparison_that_cannot_run_is_refused_before_the_first_is_compiled(choice, said, monkeypatch):
    """Fails when minutes of compiling are lost to a choice that was wrong from the start."""
    topology_or_skip("v5e:2x2")
    monkeypatch.setattr("jaxlm.views.aot_report.report", lambda *_: pytest.fail("compiled"))
    with pytest.raises(InputError, match=said):
        aot.aot(aot.Arguments("", topology="v5e:2x2", compare=(choice,), settings=tiny()))


@pytest.mark.parametrize("output", ["no/such/folder.json", ".", "/dev/null"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_compiled(output, monkeypatch):
    """Fails when it is found out at the end, or when a device is replaced by a file."""
    topology_or_skip("v5e:2x2")
    monkeypatch.setattr("jaxlm.views.aot_report.report", lambda *_: pytest.fail("compiled"))
    with pytest.raises(InputError, match=f"--output {output}: .*name a file"):
        aot.aot(aot.Arguments("", topology="v5e:2x2", output=Path(output), settings=tiny()))


def test_epochs_given_replace_the_steps_of_the_config(monkeypatch):
    """Fails when days are those of the config's steps."""
    found = []
    monkeypatch.setattr(aot, "aot", lambda arguments, given: found.append(arguments.settings))
    monkeypatch.setattr("sys.argv", ["aot", "pretrain/gpt1", "--num-epochs", "3"])
    aot.main()
    assert (found[0].num_steps, found[0].num_epochs) == (None, 3)


def test_what_the_compiler_refuses_for_another_reason_is_one_line(monkeypatch):
    """Fails when a kernel's own memory passes for a step that does not fit, or the error is a traceback."""

    class Step:
        def lowered(self, *_):
            return self

        def compile(self, **_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: E1:\nRan out of memory in memory space vmem: 16.9M")

    step = Step()
    monkeypatch.setattr(training_program, "make_program", lambda *_, **__: step)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        training_program.compile_training(
            None, tiny(), training_program.empty_row(tiny(), 128), make_mesh(MeshConfig())
        )
    monkeypatch.setattr(aot, "aot", lambda *_: step.compile())
    monkeypatch.setattr("sys.argv", ["aot", "debug/gpt"])
    with pytest.raises(RunError, match="rejects the step.*RESOURCE_EXHAUSTED: E1: Ran out"):
        aot.main()


def test_one_chip():
    """v5e and v6e have machines of one chip; the others' smallest has two by two."""
    assert len(topology_or_skip("v5e:1x1").devices()) == 1
    with pytest.raises(InputError, match="even x even x any"):
        topology("v5p:1x1x1").devices()


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_peak_is_found_by_what_jax_calls_the_chip(name):
    """Fails when a run on a v5p, which JAX calls TPU v5, has no MFU."""
    where = topology_or_skip(name)
    kind = where.devices()[0].device_kind
    assert kind == where.chip.kind and peak_of_kind(kind) == where.chip.peak_tflops


@VERSIONS
def test_a_step_that_overflows_the_compilers_small_threads():
    """Products of few elements: the compiler costs them by recursion. Fails, with the process, where its threads have
    64 kB of stack."""
    where = topology_or_skip("v6e:2x2")
    sizes = {"num_layers": 3, "width": 8, "feed_forward_width": 32, "attention_dropout_rate": 0.1}
    model = replace(tiny().model, dropout_rate=0.1, embedding_dropout_rate=0.1, **sizes)
    config = replace(tiny(batch_size=128, length=64), model=model, execution=Execution(remat="dots", unroll=1))
    mesh = make_mesh(config.mesh, where.devices())
    row = training_program.empty_row(config, 64)
    assert training_program.compile_training(make_pretraining(config, None), config, row, mesh).step is not None
