"""The collectives of a training step on meshes of eight devices, against a golden table; and how they are found.

A table line more, or more bytes in one, is communication that every step pays: it must be meant. Each version of jaxlib
that launch/constraints.txt pins has a table of its own; this file with `--update-golden` rewrites that of the installed
one. The CPU's compiler stands for the partitioner, which the platforms share; what the TPU's compiler makes of it is in
`python -m jaxlm.aot`.
"""

import re
from pathlib import Path

import jax
import pytest
from toy import TOY, boxed_shapes
from toy_pairs import TOY_BERT

from jaxlm.compiler.collectives import CHIPS, SLICES, Collective, collectives
from jaxlm.compiler.hlo import parse
from jaxlm.data.config import MEMBERS
from jaxlm.distributed.mesh import MeshConfig, make_mesh
from jaxlm.nn.config import Execution
from jaxlm.objectives.config import LanguageModel, MaskedLM
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import OptimizerConfig
from jaxlm.training.pretraining import make_pretraining
from jaxlm.training.program import compile_training, empty_row

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.findall(r"^jaxlib==(\S+)", (ROOT / "launch" / "constraints.txt").read_text(), re.MULTILINE)
pytestmark = pytest.mark.versions

MODELS = {"gpt": (TOY, LanguageModel(), "windows"), "bert": (TOY_BERT, MaskedLM(), "pairs")}
MESHES = ((8, 1, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2))


def table(name: str, sizes: tuple[int, int, int]) -> list[str]:
    model, objective, layout = MODELS[name]
    config = PretrainConfig(
        model,
        objective=objective,
        data=MEMBERS[layout](),
        optimizer=OptimizerConfig(peak_lr=1e-3, warmup=2),
        execution=Execution(unroll=1),
        batch_size=16,
        length=model.num_positions,
        log_every=1,
    )
    mesh = make_mesh(MeshConfig(*sizes))
    compiled = compile_training(make_pretraining(config, None), config, empty_row(config, config.length), mesh)
    where = " ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return [
        f"{name}  {where}  {one.kind} over {one.axis}: {one.count} times, {one.bytes:,} bytes"
        for one in collectives(parse(compiled.step.as_text()), mesh.shape)
    ]


@pytest.mark.slow
def test_golden_collectives(update_golden):
    """Fails when a step communicates more, less, or along another axis than it did."""
    golden = ROOT / "tests" / "golden" / f"collectives-{jax.lib.__version__}.txt"
    if jax.lib.__version__ not in PINNED and not update_golden:
        pytest.skip(f"the tables are of the pinned jaxlib {' and '.join(PINNED)}, not of {jax.lib.__version__}")
    lines = [line for name in MODELS for sizes in MESHES for line in table(name, sizes)]
    if update_golden:
        golden.write_text("\n".join(lines) + "\n")
    assert golden.read_text().splitlines() == lines, (
        "collectives differ; if that is meant, run pytest tests/distributed/test_collectives.py --update-golden"
    )


@pytest.mark.slow
def test_copies_reduce_their_gradients_and_no_more():
    """Fails when bytes are counted of a part, twice, or of what goes out: float32 gradients, and some scalars.

    The table has two gradients, as input and as output, which may be reduced one by one.
    """
    (line,) = table("gpt", (8, 1, 1))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(boxed_shapes(TOY)))
    found = int(line.split(": ")[1].split(", ", 1)[1].removesuffix(" bytes").replace(",", ""))
    assert 4 * parameters <= found <= 4 * (parameters + TOY.vocab_size * TOY.width) + 256


# By hand, in the TPU compiler's form, for eight devices of a slice: an asynchronous gather that stands in two fusions,
# a scatter as a fused reduction, a kernel's metadata with line breaks, a transfer between two slices.
GATHER = (
    "channel_id=3, replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(2,1,0)) {'b'}, dimensions={0}, "
    "use_global_device_ids=true"
)
TRANSFER = '_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_transfer_type="ALL_REDUCE"'
ROUND = "source_target_pairs={{0,4},{4,0},{1,5},{5,1}}"
PAIRS, ALONE = "{{0,1},{2,3},{4,5},{6,7}}", "{{0},{1},{2},{3},{4},{5},{6},{7}}"
MODULE = f"""HloModule jit_step, is_scheduled=true

%start (p: bf16[4,16]) -> bf16[16,16] {{
  %p = bf16[4,16]{{1,0}} parameter(0)
  ROOT %all-gather.1 = bf16[16,16]{{1,0}} all-gather(%p), {GATHER}
}}

%done (q: bf16[4,16]) -> bf16[16,16] {{
  %q = bf16[4,16]{{1,0}} parameter(0)
  ROOT %all-gather.2 = bf16[16,16]{{1,0}} all-gather(%q), {GATHER}
}}

%all-reduce-scatter.1 (r: f32[32]) -> f32[8] {{
  %r = f32[32]{{0}} parameter(0)
  %all-reduce.3 = f32[32]{{0}} all-reduce(%r), channel_id=4, replica_groups=[2,4]<=[2,4], to_apply=%add
  ROOT %dynamic-slice.1 = f32[8]{{0}} dynamic-slice(%all-reduce.3, %r), dynamic_slice_sizes={{8}}
}}

ENTRY %main (a: f32[32]) -> f32[32] {{
  %a = f32[32]{{0}} parameter(0)
  %fusion.1 = bf16[16,16]{{1,0}} fusion(%a), kind=kCustom, calls=%start
  %custom.1 = f32[32]{{0}} custom-call(%a), custom_call_target="call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{}}"
}}}}, metadata={{op_name="pallas_call"}}
  %fusion.2 = bf16[16,16]{{1,0}} fusion(%fusion.1), kind=kCustom, calls=%done
  %fusion.3 = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %all-reduce.5 = (f32[4], f32[2,2]) all-reduce(%a, %a), channel_id=5, replica_groups={PAIRS}, to_apply=%add
  %send.1 = (f32[8]{{0}}, u32[], token[]) send(%fusion.3), channel_id=6, frontend_attributes={{{TRANSFER}}}
  %round.1 = (f32[32]{{0}}, f32[32]{{0}}, u32[]) collective-permute-start(%a), channel_id=7, {ROUND}
  ROOT %all-reduce.6 = f32[] all-reduce(%a), channel_id=8, replica_groups={ALONE}, to_apply=%add
}}
"""


def test_collectives_in_fusions_and_across_slices_are_found_once():
    """Fails when a gather counts in every fusion it is spread over, or one along a mesh axis gets another's name."""
    assert collectives(parse(MODULE), {"data": 4, "fsdp": 2, "tensor": 2}, slices=2) == (
        Collective("all-gather", "fsdp", CHIPS, 2, 1, 16 * 16 * 2),
        Collective("all-reduce", "data", SLICES, 2, 1, 8 * 4),
        Collective("all-reduce", "tensor", CHIPS, 2, 1, (4 + 2 * 2) * 4),
        Collective("collective-permute", "data", CHIPS, 4, 1, 32 * 4),
        Collective("reduce-scatter", "fsdp+tensor", CHIPS, 4, 1, 32 * 4),
    )


def test_every_pinned_version_has_its_table_and_no_other():
    """Fails when a pin is renewed and the tables are not, which would leave every later difference unseen."""
    names = {path.name for path in (ROOT / "tests" / "golden").glob("collectives*")}
    assert names == {f"collectives-{version}.txt" for version in PINNED} and len(PINNED) == 2
