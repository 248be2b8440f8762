"""Reading compiled TPU programs, and `jaxlm.aot` on the real compiler where it is installed.

Fails when a loop is counted once, a collective is missed, counted twice or given to the wrong group, or when the report
leaves out what the step does.
"""

import dataclasses
import importlib.util
import json

import pytest

from jaxlm.compiler.chips import CHIPS, topology
from jaxlm.compiler.hlo import parse, shape_bytes
from jaxlm.errors import InputError

# Written by hand in the compiler's form: a loop of 3 with a loop of 5 in it, a condition, both kinds of collectives.
MODULE = """HloModule jit_step, is_scheduled=true

%fused_product (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %convolution.1 = bf16[8,16]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

%inner_condition (c: (s8[])) -> pred[] {
  %c = (s8[]) parameter(0)
  %constant.2 = s8[] constant(5)
  %get-tuple-element.1 = s8[] get-tuple-element(%c), index=0
  ROOT %lt.1 = pred[] compare(%get-tuple-element.1, %constant.2), direction=LT
}

%inner_body (b: (s8[])) -> (s8[]) {
  %b = (s8[]) parameter(0)
  %fusion.1 = bf16[8,16]{1,0} fusion(%b), calls=%fused_product, backend_config={"a":{"estimated_cycles":"100"}}
  ROOT %tuple.1 = (s8[]) tuple(%b)
}

%outer_condition (c2: (s32[])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3)
  %c2 = (s32[]) parameter(0)
  %get-tuple-element.2 = s32[] get-tuple-element(%c2), index=0
  ROOT %lt.2 = pred[] compare(%get-tuple-element.2, %constant.3), direction=LT
}

%outer_body (b2: (s32[])) -> (s32[]) {
  %b2 = (s32[]) parameter(0)
  %while.1 = (s8[]) while(%b2), condition=%inner_condition, body=%inner_body
  %all-reduce.1 = (bf16[4,8], f32[8]) all-reduce(%b2, %b2), replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add
  ROOT %tuple.2 = (s32[]) tuple(%b2)
}

%cheap (x: f32[]) -> f32[] {
  ROOT %copy.1 = f32[] copy(%x), backend_config={"estimated_cycles":"1"}
}

%dear (y: f32[]) -> f32[] {
  ROOT %copy.2 = f32[] copy(%y), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %while.2 = (s32[]) while(%a), condition=%outer_condition, body=%outer_body
  %conditional.1 = f32[] conditional(%a, %a, %a), branch_computations={%cheap, %dear}
  %all-gather-start.1 = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %all-gather-done.1 = f32[64]{0} all-gather-done(%all-gather-start.1)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
"""


def test_loops_are_multiplied_out_and_the_dearest_branch_counts():
    module = parse(MODULE)
    assert sum(operation.cycles * times for operation, times in module.runs()) == 3 * 5 * 100 + 7
    (fusion,) = [(operation, times) for operation, times in module.runs() if operation.kind == "fusion"]
    assert fusion[1] == 15 and "convolution" in module.kinds(fusion[0])


def test_collectives_are_found_once_with_their_groups():
    found = [
        (operation.collective, times, operation.group_size(8), operation.bytes)
        for operation, times in parse(MODULE).runs()
        if operation.collective
    ]
    assert found == [
        ("all-reduce", 3, 4, 4 * 8 * 2 + 8 * 4),
        ("all-gather", 1, 8, 8 * 4 + 64 * 4),
        ("reduce-scatter", 1, 4, 2 * 4),
    ]


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("a text")
    assert shape_bytes("(f32[2,3]{1,0}, (pred[7], s4[8]), bf16[])") == 24 + 7 + 4 + 2


def test_the_clock_is_the_peak_of_all_multipliers():
    """The published clocks: 1.05 GHz of v4, 1.5 of v5e, 1.75 of v5p and v6e."""
    clocks = {name: round(chip.clock_hz / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}


@pytest.mark.parametrize(
    ("name", "slices", "said"),
    [
        ("v7:4x4", 1, "the chips are v4, v5e"),
        ("v5e:4x4x4", 1, "v5e has 2 sides"),
        ("v5p:4x4", 1, "4x4x4 say"),
        ("v5e", 1, "v5e has 2 sides"),
        ("v5e:0x4", 1, "2 sides"),
        ("v5e:4x4", 0, "--slices 0"),
    ],
)
def test_topologies_that_are_none_are_refused(name, slices, said):
    with pytest.raises(InputError, match=said):
        topology(name, slices)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU's compiler, the extra [tpu]")
def test_the_report_of_a_small_step(tmp_path):
    from jaxlm import aot
    from jaxlm.config import load_config
    from jaxlm.sharding import MeshConfig
    from jaxlm.training.config import PretrainConfig

    config = load_config("pretrain/bert_small", PretrainConfig)
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2))
    figures = aot.aot(aot.Arguments("", topology="v5e:2x2", output=tmp_path / "report.json", settings=config))
    assert json.loads((tmp_path / "report.json").read_text()) == figures
    assert figures["chips"] == 4 and figures["fits"] and 0 < figures["peak_gib"] < figures["hbm_gib"] == 16
    assert [step["length"] for step in figures["steps"]] == [128, 32] and figures["length"] == 128
    assert figures["step_milliseconds"] == pytest.approx(sum(figures["step_parts"].values()), rel=1e-2)
    assert {"all-reduce", "all-gather"} <= {one["kind"] for one in figures["collectives"]}
    flops = figures["model_tflops"] / figures["step_milliseconds"] * 1e3
    assert figures["mfu"] == pytest.approx(flops / (4 * 197), rel=2e-2)
