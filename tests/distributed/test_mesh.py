"""Meshes of eight devices: where each shard lies, and that losses are those of one device."""

import functools
import logging
import types
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from toy import NO_DROPOUT, TOY, assert_trees_same, boxed_shapes, init_params, packed, random_params, sums_of
from toy_pairs import STILL_BERT, TOY_BERT, bert_shapes, init_bert, pair_rows, pretraining, random_bert

from jaxlm.distributed import mesh as mesh_module
from jaxlm.distributed.config import check_batch
from jaxlm.distributed.devices import compiling_for
from jaxlm.distributed.mesh import (
    AXES,
    RULES,
    MeshConfig,
    batch_sharding,
    constrain,
    host_rows,
    make_mesh,
    partition_spec,
    to_devices,
    use_mesh,
)
from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import gathered
from jaxlm.objectives.language_model import language_model
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.step import (
    abstract_state,
    make_eval_step,
    make_fresh_state,
    make_train_step,
    new_state,
    settings_of,
)

pytestmark = pytest.mark.versions

ROWS, STEPS = 16, 3
MESHES = [(1, 1, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (4, 1, 2)]
MIXED = [(2, 4, 1), (4, 1, 2)]  # of axes that the others have alone or all together
CONFIG = replace(TOY, init_std=0.1)
SCANNED = Execution(unroll=1)  # one layer is compiled, not all

# Of each leaf, the mesh axis of each dimension; stacked leaves have the layers first, which are never cut.
LAYOUT = {
    "tokens": ("tensor", "fsdp"),
    "positions": (None, "fsdp"),
    "qkv_kernel": (None, "fsdp", None, "tensor", None),
    "qkv_bias": (None, None, "tensor", None),
    "attention/out_kernel": (None, "tensor", "fsdp", None),
    "attention/out_bias": (None, None),
    "in_kernel": (None, "fsdp", "tensor"),
    "in_bias": (None, "tensor"),
    "feed_forward/out_kernel": (None, ("tensor", "fsdp"), None),
    "feed_forward/out_bias": (None, None),
    "scale": (None, None),
    "norm/bias": (None, None),
}


def mesh_of(sizes):
    return make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


def run(
    sizes,
    config=CONFIG,
    micro_batches=1,
    execution=SCANNED,
    born_there=False,
    traced_for="cpu",
):
    """The losses and gradient norms of a few steps with dropout on, the state at the end, and that at the start.

    traced_for: the platform whose formulas are taken; any platform can compute them. born_there: parameters are drawn
    on the mesh by the jitted initialiser; otherwise by NumPy, which compiles nothing.
    """
    mesh = mesh_of(sizes)
    objective = language_model(build(config, execution), loss_chunks=execution.loss_chunks)
    schedule = OptimizerConfig(peak_lr=1e-2, warmup=1)
    optimizer, settings = make_optimizer(schedule, boxed_shapes(config)), settings_of(schedule, 10)
    with use_mesh(mesh), compiling_for(traced_for):
        abstract = abstract_state(init_params(config), optimizer, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        if born_there:
            state = make_fresh_state(init_params(config), optimizer, abstract, lambda: None)(4)
            assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings, "born elsewhere than declared"
        else:
            state = jax.device_put(new_state(random_params(config), optimizer, 4), shardings)
        start = jax.tree.map(np.asarray, state)
        step = make_train_step(objective, optimizer, micro_batches=micro_batches)
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        losses, norms = [], []
        for t in range(STEPS):
            batch = to_devices(
                packed(ROWS, length=config.num_positions, vocab_size=config.vocab_size, seed=t), mesh, ROWS
            )
            state, metrics = step(state, batch, settings)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["gradient_norm"]))  # a factor that clipping and Adam would hide shows here
    return (losses, norms), state, start


@pytest.fixture(scope="module")
def one_device():
    (losses, norms), _, _ = run((1, 1, 1))
    assert abs(losses[-1] - losses[0]) > 1e-3 * losses[0]
    return losses, norms


def expected_spec(path: str) -> P:
    (layout,) = (layout for name, layout in LAYOUT.items() if path.endswith(name))
    return P(*layout)


def slashes(path) -> str:
    return "/".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=[pytest.mark.campaign] * (sizes in MIXED)) for sizes in MESHES[1:]],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_losses_are_those_of_one_device_and_shards_lie_where_declared(one_device, sizes):
    """Fails when a gradient is summed over too few devices, dropout differs with the mesh, or moments lie whole."""
    losses, state, _ = run(sizes)
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
    checked = {"params": 0, "mu": 0, "nu": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = slashes(path)
        if "backbone" not in name:
            assert leaf.sharding.spec == P(), name
            continue
        spec = expected_spec(name)
        assert leaf.sharding.spec == spec, f"{name}: {leaf.sharding.spec} is not {spec}"
        checked[next(kind for kind in checked if f"{kind}/" in name or name.startswith(kind))] += 1
        pieces = np.prod(
            [dict(zip(AXES, sizes, strict=True))[axis] for axis in jax.tree.leaves(tuple(spec))], dtype=int
        )
        assert leaf.addressable_shards[0].data.size * pieces == leaf.size, name
    assert checked == {"params": 14, "mu": 14, "nu": 14}


def test_parameters_are_born_in_their_shards_and_are_the_same_everywhere():
    """Fails when the jitted initialiser draws other numbers on another mesh, or puts moments on one device."""
    config = replace(CONFIG, num_layers=1)
    _, state, start = run((2, 2, 2), config, born_there=True)
    optimizer = make_optimizer(OptimizerConfig(), boxed_shapes(config))
    abstract = abstract_state(init_params(config), optimizer, mesh_of((1, 1, 1)))
    assert_trees_same(start, make_fresh_state(init_params(config), optimizer, abstract, lambda: None)(4))
    other = make_fresh_state(init_params(config), optimizer, abstract, lambda: None)(5)
    assert not np.array_equal(
        start.params["backbone"]["embeddings"]["tokens"], other.params["backbone"]["embeddings"]["tokens"]
    )


def test_micro_batches_and_recomputing_on_a_mesh():
    """Fails when strided micro-batches, loss chunks or recomputing meet the mesh in another way than one device."""
    found, _, _ = run((2, 2, 2), micro_batches=4, execution=Execution(remat="full", unroll=1, loss_chunks=4))
    wanted, _, _ = run((1, 1, 1))  # with the same dropout masks
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


ROWS_OF_128 = replace(CONFIG, num_positions=128, attention_dropout_rate=0.1, num_layers=1)


@pytest.fixture(scope="module")
def rows_of_128():
    losses, _, _ = run((1, 1, 1), ROWS_OF_128)
    return losses


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_steps_with_a_kernel_are_those_of_one_device_without(rows_of_128, sizes):
    """Fails when the kernel, interpreted here, gets rows, heads or masks of another device, or its gradient differs."""
    losses, _, _ = run(sizes, ROWS_OF_128, execution=replace(SCANNED, attention="flash", remat="dots"))
    np.testing.assert_allclose(losses, rows_of_128, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_steps_as_a_tpu_writes_them_are_those_of_a_cpu(one_device, sizes):
    """Fails when one of the formulas that only a TPU gets (heads, biases, sums of the loss) is another's."""
    losses, _, _ = run(sizes, execution=replace(SCANNED, attention="xla", dtype="float32"), traced_for="tpu")
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)


def nll_of(objective, params, batch):
    return sums_of(objective, params, batch)["nll"]


def test_gradients_in_float32_travel_as_float32():
    """Fails when --execution.gradient_sums does not decide what the all-reduce of a block's weights carries."""
    for gradient_sums, wanted in (("arithmetic", "bf16"), ("float32", "f32")):
        execution = replace(SCANNED, dtype="bfloat16", gradient_sums=gradient_sums)
        mesh, objective = mesh_of((8, 1, 1)), language_model(build(CONFIG, execution))
        with use_mesh(mesh):
            batch = to_devices(packed(ROWS, vocab_size=CONFIG.vocab_size), mesh, ROWS)
            loss = functools.partial(nll_of, objective, batch=batch)
            text = str(jax.make_jaxpr(jax.grad(loss))(random_params(CONFIG)))
        assert f"{wanted}[{CONFIG.width},{CONFIG.feed_forward_width}] = dot_general" in text


def test_a_vocabulary_that_does_not_divide_stays_whole_and_is_logged(caplog):
    """Fails when 63 words are padded, cut unevenly or refused: rows that are not words would enter the softmax."""
    config = replace(CONFIG, vocab_size=63, num_layers=1, **NO_DROPOUT)
    with caplog.at_level(logging.INFO, logger="jaxlm.distributed.mesh"):
        losses, state, _ = run((2, 2, 2), config)
    assert "not divisible, so replicated on every device: vocabulary (63) by tensor (2)" in caplog.text
    tokens = state.params["backbone"]["embeddings"]["tokens"]
    assert tokens.sharding.spec == P(None, "fsdp") and tokens.shape == (63, CONFIG.width)
    qkv = state.params["backbone"]["blocks"]["attention"]["qkv_kernel"]
    assert qkv.sharding.spec == P(*LAYOUT["qkv_kernel"]), "only the vocabulary stays whole"
    np.testing.assert_allclose(losses, run((1, 1, 1), config)[0], rtol=1e-5)


def test_a_constraint_does_what_it_says_under_the_mesh_alone():
    """Fails when a logical constraint silently does nothing, as Linen's own does under a plain mesh context."""
    ones = np.ones((16, 8), np.float32)
    cut = jax.jit(lambda x: constrain(x * 2, ("batch", "feed_forward")))
    with use_mesh(mesh_of((2, 2, 2))):
        assert cut(ones).sharding.spec == P(("data", "fsdp"), "tensor")
        whole = functools.partial(jax.jit(gathered, static_argnums=(1, 2)), ones, np.float32)
        assert whole(("width", "feed_forward")).sharding.spec == P(None, "tensor")
        assert whole(("feed_forward_in", "whole_width")).sharding.spec == P("tensor")
    assert len(jax.jit(lambda x: constrain(x * 2, ("batch", "feed_forward")))(ones).sharding.device_set) == 1


def test_partition_spec():
    """Fails when an axis is lost, or a dimension is cut by axes that do not divide it."""
    shape = {"data": 2, "fsdp": 2, "tensor": 3}
    assert partition_spec(("width", None, "heads"), (4, 5, 6), RULES, shape) == (P("fsdp", None, "tensor"), [])
    assert partition_spec(("batch",), (8,), RULES, shape) == (P(("data", "fsdp")), [])
    assert partition_spec(("batch", "width"), (6, 5), RULES, shape) == (
        P(None, None),
        ["batch (6) by data x fsdp (4)", "width (5) by fsdp (2)"],
    )
    assert partition_spec(("layers", "norm"), (3, 5), RULES, shape) == (P(None, None), [])


def test_the_mesh_takes_what_is_left_and_refuses_what_does_not_fit():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    for sizes, said in [
        ((3, 1, 1), r"data 3, fsdp 1, tensor 1\) does not fit 8 devices"),
        ((-1, 3, 1), r"data -1, fsdp 3, tensor 1\) does not fit 8 devices"),
        ((-1, -1, 1), "at most one -1"),
        ((0, 1, 1), "mesh must have positive sizes"),
        ((-2, 1, 1), "mesh must have positive sizes"),
    ]:
        with pytest.raises(InputError, match=said):
            make_mesh(MeshConfig(*sizes))


@pytest.mark.parametrize(
    ("platform", "count", "num_slices", "config", "fsdp"),
    [
        ("tpu", 16, 1, MeshConfig(), 16),
        ("tpu", 64, 1, MeshConfig(), 16),
        ("tpu", 64, 2, MeshConfig(), 16),
        ("tpu", 16, 2, MeshConfig(), 1),  # a copy stays within a slice
        ("tpu", 16, 1, MeshConfig(tensor=2), 1),
        ("tpu", 32, 1, MeshConfig(tensor=2), 16),
        ("tpu", 8, 1, MeshConfig(), 1),
        ("tpu", 64, 1, MeshConfig(fsdp=4), 4),
        ("tpu", 64, 1, MeshConfig(data=64), 1),
        ("gpu", 16, 1, MeshConfig(), 1),
        ("cpu", 16, 1, MeshConfig(), 1),
    ],
)
def test_fsdp_is_chosen_for_pods_alone(platform, count, num_slices, config, fsdp):
    """Fails when auto differs from 16 chips per copy on a pod, from 1 elsewhere, or overrides a given size."""
    devices = [types.SimpleNamespace(platform=platform)] * count
    assert mesh_module.chosen_fsdp(config, devices, num_slices) == fsdp


def test_a_batch_that_cannot_be_dealt_is_refused_with_all_numbers():
    mesh = mesh_of((2, 4, 1))
    check_batch(32, 4, mesh)
    for rows, micro_batches, message in [
        (12, 1, "batch_size must be a multiple of mesh data 2 x fsdp 4 = 8, got 12; give 16, or change another"),
        (48, 4, "batch_size must be a multiple of micro_batches 4 x mesh data 2 x fsdp 4 = 32, got 48; give 64, or"),
    ]:
        with pytest.raises(InputError, match=message):
            check_batch(rows, micro_batches, mesh)


def test_rows_go_to_devices_in_order():
    """Fails when the global batch is not the rows in order, whatever the mesh."""
    for sizes in MESHES[1:]:
        mesh = mesh_of(sizes)
        np.testing.assert_array_equal(host_rows(ROWS, mesh), np.arange(ROWS))  # one process feeds all
        batch = packed(ROWS)
        found = to_devices(batch, mesh, ROWS)
        np.testing.assert_array_equal(found.ids, batch.ids)
        assert found.ids.sharding == batch_sharding(mesh)
        assert found.ids.addressable_shards[0].data.shape[0] == ROWS // (sizes[0] * sizes[1])


# BERT

BERT_STEPS = 20
BERT_LAYOUT = {
    "backbone/embeddings/tokens": ("tensor", "fsdp"),
    "backbone/embeddings/positions": (None, "fsdp"),
    "backbone/embeddings/types": (None, "fsdp"),
    "backbone/embeddings/norm/scale": (None,),
    "backbone/embeddings/norm/bias": (None,),
    "backbone/blocks/attention/qkv_kernel": (None, "fsdp", None, "tensor", None),
    "backbone/blocks/attention/qkv_bias": (None, None, "tensor", None),
    "backbone/blocks/attention/out_kernel": (None, "tensor", "fsdp", None),
    "backbone/blocks/attention/out_bias": (None, None),
    "backbone/blocks/attention_norm/scale": (None, None),
    "backbone/blocks/attention_norm/bias": (None, None),
    "backbone/blocks/feed_forward/in_kernel": (None, "fsdp", "tensor"),
    "backbone/blocks/feed_forward/in_bias": (None, "tensor"),
    "backbone/blocks/feed_forward/out_kernel": (None, ("tensor", "fsdp"), None),
    "backbone/blocks/feed_forward/out_bias": (None, None),
    "backbone/blocks/feed_forward_norm/scale": (None, None),
    "backbone/blocks/feed_forward_norm/bias": (None, None),
    "backbone/pooler/kernel": ("fsdp", None),
    "backbone/pooler/bias": (None,),
    "head/masked_lm/kernel": ("fsdp", None),
    "head/masked_lm/bias": (None,),
    "head/masked_lm/norm/scale": (None,),
    "head/masked_lm/norm/bias": (None,),
    "head/masked_lm/output_bias": ("tensor",),
    "head/next_sentence/kernel": ("fsdp", None),
    "head/next_sentence/bias": (None,),
}


def run_bert(sizes, micro_batches=1):
    """The losses of twenty steps of MLM + NSP by name, (20,), and the state at the end."""
    mesh, config = mesh_of(sizes), replace(STILL_BERT, num_layers=1)
    schedule = OptimizerConfig(kind="bert_adamw", peak_lr=1e-3, warmup=2, eps=1e-6)
    optimizer, settings = make_optimizer(schedule, bert_shapes(config)), settings_of(schedule, BERT_STEPS)
    with use_mesh(mesh):
        abstract = abstract_state(init_bert(config), optimizer, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        state = jax.device_put(new_state(random_bert(config), optimizer, 4), shardings)
        step = make_train_step(pretraining(config), optimizer, micro_batches=micro_batches)
        step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        found = []
        for t in range(BERT_STEPS):
            state, metrics = step(state, to_devices(pair_rows(ROWS, seed=t), mesh, ROWS), settings)
            found.append({name: float(metrics[name]) for name in ("loss", "masked_lm_loss", "next_sentence_loss")})
    return {name: np.array([metrics[name] for metrics in found]) for name in found[0]}, state


@pytest.fixture(scope="module")
def bert_on_one_device():
    found, _ = run_bert((1, 1, 1))
    assert abs(found["loss"][-1] - found["loss"][0]) > 1e-3 * found["loss"][0]
    return found


@pytest.mark.parametrize(
    "sizes, micro_batches",
    [((8, 1, 1), 1), ((2, 4, 1), 1), ((2, 2, 2), 4)],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else f"{x} pieces",
)
def test_berts_losses_are_those_of_one_device_and_shards_lie_where_declared(bert_on_one_device, sizes, micro_batches):
    """Fails when masks differ with the mesh, a mean is taken over the masked words or pairs of a device or of a
    micro-batch, or a leaf of backbone, head or moments lies elsewhere.
    """
    found, state = run_bert(sizes, micro_batches)
    for name, values in found.items():
        np.testing.assert_allclose(values, bert_on_one_device[name], rtol=1e-5, err_msg=name)
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu):
        leaves = {slashes(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        assert leaves.keys() == BERT_LAYOUT.keys()
        for name, leaf in leaves.items():
            assert leaf.sharding.spec == P(*BERT_LAYOUT[name]), name
            axes = jax.tree.leaves(BERT_LAYOUT[name])
            pieces = np.prod([dict(zip(AXES, sizes, strict=True))[axis] for axis in axes], dtype=int)
            assert leaf.addressable_shards[0].data.size * pieces == leaf.size, name


def test_berts_masks_and_dropout_are_those_of_one_device():
    """Fails when an evaluation depends on where in which batch a row lies, or a training pass on the mesh."""
    rows, evaluations, passes = pair_rows(24), [], []
    objective = pretraining(TOY_BERT, SCANNED)

    def both(params, batch):
        return make_eval_step(objective)(params, batch)[0], sums_of(objective, params, batch, jax.random.key(3))

    for sizes, batch_size in (((1, 1, 1), 24), ((8, 1, 1), 8), ((2, 2, 2), 24)):
        mesh, sums = mesh_of(sizes), {}
        with use_mesh(mesh):
            step = jax.jit(both)
            params = jax.device_put(random_bert(TOY_BERT), jax.sharding.NamedSharding(mesh, P()))
            for first in range(0, len(rows.ids), batch_size):
                batch = jax.tree.map(lambda x, at=slice(first, first + batch_size): x[at], rows)
                evaluation, dropped = step(params, to_devices(batch, mesh, batch_size))
                for name, pair in evaluation.items():
                    sums[name] = sums.get(name, 0.0) + np.array([float(x) for x in pair])
        evaluations.append(sums)
        if batch_size == len(rows.ids):
            passes.append({name: float(x) for name, x in dropped.items()})
    for name, pair in evaluations[0].items():
        for other in evaluations[1:]:
            np.testing.assert_allclose(other[name], pair, rtol=1e-6, err_msg=name)
    assert evaluations[0]["next_sentence_loss"][1] == rows.pair_weights.sum()
    assert passes[1] == pytest.approx(passes[0], rel=1e-5)
    assert abs(passes[0]["masked_lm_loss"] - evaluations[0]["masked_lm_loss"][0]) > 1.0


def test_copies_of_the_model_lie_in_slices(monkeypatch):
    """Eight devices that play two slices of four: `data` is outermost, and the model of a copy stays within a slice.

    Fails when a slice's devices are dealt out to copies in turn, or fsdp is let across slices.
    """
    monkeypatch.setattr(mesh_module, "slice_of", lambda device: device.id // 2 % 2)
    mesh = make_mesh(MeshConfig(data=-1, tensor=2))
    slices = [[device.id // 2 % 2 for device in copy.flat] for copy in mesh.devices]
    assert mesh.shape == {"data": 4, "fsdp": 1, "tensor": 2} and slices == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    with pytest.raises(InputError, match="data must be a multiple of the 2 slices, got 1"):
        make_mesh(MeshConfig(fsdp=8))
