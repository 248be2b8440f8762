"""Reading the compiler's texts: modules, and the bundles of custom kernels, both written by hand in its form.

Fails when a loop is counted once, a collective is missed or given to the wrong group, or a kernel's loop has no bound.
"""

from types import SimpleNamespace

import pytest

from jaxlm.compiler.collectives import collectives, hidden_milliseconds, milliseconds
from jaxlm.compiler.hlo import parse, shape_bytes
from jaxlm.compiler.kernels import cycles_of_bundles

# Written by hand in the compiler's form: a loop of 3 with a loop of 5 in it, a condition, both kinds of collectives.
pytestmark = pytest.mark.versions

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
  %conditional.2 = f32[] conditional(%a, %a, %a), branch_computations={%cheap, %dear}, metadata={op_name="rarely/cond"}
  %all-gather-start.1 = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %all-gather-done.1 = f32[64]{0} all-gather-done(%all-gather-start.1)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
"""


def test_loops_are_multiplied_out_and_the_dearest_branch_counts_but_one_that_is_rare():
    module = parse(MODULE)
    assert sum(operation.cycles * times for operation, times in module.runs()) == 3 * 5 * 100 + 7 + 1
    (fusion,) = [(operation, times) for operation, times in module.runs() if operation.kind == "fusion"]
    assert fusion[1] == 15 and "convolution" in {inner.kind for inner, _ in module.within(fusion[0])}


def test_collectives_are_found_once_with_their_groups():
    found = [
        (operation.collective, times, operation.groups(8).tolist(), operation.bytes)
        for operation, times in parse(MODULE).runs()
        if operation.collective
    ]
    assert found == [
        ("all-reduce", 3, [[0, 2, 4, 6], [1, 3, 5, 7]], 4 * 8 * 2 + 8 * 4),
        ("all-gather", 1, [list(range(8))], 64 * 4),
        ("reduce-scatter", 1, [[0, 1, 2, 3], [4, 5, 6, 7]], 2 * 4),
    ]


# By hand too: a loop of 3 with a gather beside a fusion of CYCLES, a gather with nothing beside it, and a reduction.
OVERLAPPED = """HloModule jit_step, is_scheduled=true

%gathered (p: f32[2,8]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}

%rest (q: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,8]{1,0} copy(%q)
}

%condition (c: (s8[])) -> pred[] {
  %c = (s8[]) parameter(0)
  %constant.2 = s8[] constant(3)
  %get-tuple-element.1 = s8[] get-tuple-element(%c), index=0
  ROOT %lt.1 = pred[] compare(%get-tuple-element.1, %constant.2), direction=LT
}

%body (b: (s8[])) -> (s8[]) {
  %b = (s8[]) parameter(0)
  %async-collective-start.7 = f32[8,8]{1,0} fusion(%b), calls=%gathered
  %fusion.1 = f32[8,8]{1,0} fusion(%b), calls=%rest, backend_config={"a":{"estimated_cycles":"CYCLES"}}
  %async-collective-done.7 = f32[8,8]{1,0} fusion(%async-collective-start.7), calls=%rest
  %fusion.2 = f32[8,8]{1,0} fusion(%b), calls=%rest, backend_config={"a":{"estimated_cycles":"1000000"}}
  ROOT %tuple.1 = (s8[]) tuple(%b)
}

ENTRY %main (a: f32[2,8]) -> f32[8,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %while.1 = (s8[]) while(%a), condition=%condition, body=%body
  %all-gather-start.1 = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %all-gather-done.1 = f32[8,8]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %all-reduce.1 = f32[8,8]{1,0} all-reduce(%all-gather-done.1), replica_groups=[1,4]<=[4], to_apply=%add
}
"""


@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_what_runs_beside_a_collective_hides_it(share):
    """Fails if more is hidden than runs beside it or than it takes, or a loop or what comes later counts wrongly."""
    topology = SimpleNamespace(chip=SimpleNamespace(clock_hz=1e12, interconnect_gbps=8, dimensions=2), slices=1)
    topology.num_chips = 4
    mesh = {"data": 4}
    (gathers,) = (one for one in collectives(parse(OVERLAPPED), mesh) if one.kind == "all-gather")
    gather = milliseconds(gathers, topology) / 4
    cycles = round(share * gather / 1e3 * topology.chip.clock_hz)
    module = parse(OVERLAPPED.replace("CYCLES", str(cycles)))
    assert hidden_milliseconds(module, mesh, topology) == pytest.approx(3 * min(share, 1) * gather, rel=1e-6)


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="an ENTRY"):
        parse("a text")
    assert shape_bytes("(f32[2,3]{1,0}, (pred[7], s4[8]), bf16[])") == 24 + 7 + 4 + 2


# By hand, in the form of the compiler's final bundles: a grid of 6, a loop of 5 in it, an empty bundle.
BUNDLES = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input] }
   0x1   :  { %s2_s1 = smov 0 /* copy for cssa */ }
   0x2 LB: > { %s4_s1 = sphi %s2_s1, %s3_s1 /* iteration index */  ;;  %v1_v0 = vld [vmem:[%s1_s0] sm:$0xff] }
   0x3 LB: >> { %s6_s2 = sphi %s5_s2, %s7_s2 /* phi copy */  ;;  %s7_s2 = sadd.s32 1, %s6_s2 }
   0x4   : >> { %p1_p0 = scmp.ge.s32.totalorder (%p2_p1), %s7_s2, 5 /* loop exit test */ }
   0x5   :  {} /* End region 4 */
   0x6   : > { %p3_p2 = scmp.ge.s32.totalorder %s3_s1, 6 /* loop exit test */ }
   0x7   :  { %s9 = smov 0 }
"""


def test_bundles_are_multiplied_by_the_loops_they_are_in():
    """Fails when the grid or a loop of a kernel counts once; a bound that is no constant must not pass for one."""
    assert cycles_of_bundles(BUNDLES) == 2 + 6 * (1 + 5 * 3 + 1) + 1
    assert cycles_of_bundles(BUNDLES.replace("%s7_s2, 5", "%s7_s2, %s8_s8")) is None


def test_the_bound_of_a_loop_whose_counter_is_kept_in_memory():
    """As the splash backward kernel of a small step has it: the register of the exit test is loaded, not carried.

    Fails when the exit test is looked up by a register that the loop carries.
    """
    spilled = BUNDLES.replace("scmp.ge.s32.totalorder %s3_s1, 6", "scmp.ge.s32.totalorder %s5_s5, 6")
    assert spilled != BUNDLES and cycles_of_bundles(spilled) == cycles_of_bundles(BUNDLES)
