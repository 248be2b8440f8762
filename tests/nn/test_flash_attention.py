"""The TPU kernel, interpreted, against the definition in float64 and against `xla`, and what it declines.

The reference is equation 1 of Vaswani et al. (2017), with the distance term of Dai et al. (2019, section 3.3) and its
gradients by hand, in NumPy's float64; it takes the dropout masks as given.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.compiler.chips import topology
from jaxlm.distributed.devices import compiling_for
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.models.transformer_xl.model import by_key
from jaxlm.nn import flash_attention, layers
from jaxlm.nn.dropout_masks import mask, threshold
from jaxlm.nn.flash_attention import CHIPS, Chip, Distances
from jaxlm.nn.flash_kernel import Blocks
from jaxlm.nn.layers import WeightDropout
from jaxlm.nn.transformer import attend

pytestmark = pytest.mark.versions  # of JAX, whose Pallas changes
KEY = jax.random.key(5)


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def definition(q, k, v, do, visible, keep, kept, bias=0.0, q2=None, r=None):
    """The outputs and the gradients of sum(outputs · do): of q, k, v, the scores, q2 and r, in float64.

    visible, keep: bool (B, H, L, S). kept: the factor of the weights that are kept. q2, r: queries and encodings of the
    distances S - 1 to 0; query l stands at key S - L + l.
    """
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    (length, num_keys), scale = visible.shape[2:], q.shape[3] ** -0.5
    scores = scale * np.einsum("bhlk,bhsk->bhls", q, k) + np.asarray(bias, np.float64)
    if r is not None:
        q2, r = np.asarray(q2, np.float64), np.asarray(r, np.float64)
        column = np.arange(num_keys) + length - 1 - np.arange(length)[:, None]
        inside = column < num_keys  # the others are later keys
        chosen = np.where(inside[:, :, None], r[0][:, np.minimum(column, num_keys - 1)], 0)  # (H, L, S, K)
        scores += scale * np.einsum("bhlk,hlsk->bhls", q2, chosen)
    weights = np.where(
        visible, np.exp(scores - np.where(visible, scores, -np.inf).max(3, keepdims=True, initial=-1e9)), 0
    )
    weights = weights / np.maximum(weights.sum(3, keepdims=True), 1e-300)
    dropped = weights * keep * kept
    dropped_gradient = np.einsum("bhlk,bhsk->bhls", do, v) * keep * kept
    of_scores = weights * (dropped_gradient - (weights * dropped_gradient).sum(3, keepdims=True))
    found = {
        "outputs": np.einsum("bhls,bhsk->bhlk", dropped, v),
        "q": scale * np.einsum("bhls,bhsk->bhlk", of_scores, k),
        "k": scale * np.einsum("bhls,bhlk->bhsk", of_scores, q),
        "v": np.einsum("bhls,bhlk->bhsk", dropped, do),
        "scores": of_scores,
    }
    if r is not None:
        found["q2"] = scale * np.einsum("bhls,hlsk->bhlk", of_scores, chosen)
        found["r"] = np.zeros_like(r)
        for at, seen in enumerate(inside):  # the columns of a query are different ones
            found["r"][0][:, column[at, seen]] += scale * np.einsum(
                "bhs,bhk->hsk", of_scores[:, :, at, seen], q2[:, :, at]
            )
    return found


def assert_close(found, expected, tolerance=2e-6):
    for name, one in found.items():
        difference = np.abs(np.asarray(one, np.float64) - expected[name]).max() / np.abs(expected[name]).max()
        assert difference < tolerance, (name, difference)


def visible_keys(shape, causal, offset=0, own=None, seen=None, reach=0):
    b, h, length, num_keys = shape
    last, keys = offset + np.arange(length)[:, None], np.arange(num_keys)
    visible = np.ones((1, 1, length, num_keys), bool)
    if causal:
        visible &= (keys <= last) & ((keys >= last - reach) if reach else True)
    if own is not None:
        visible = visible & (np.asarray(own)[:, None, :, None] == np.asarray(seen)[:, None, None])
    return np.broadcast_to(visible, shape)


def kept_keys(shape, drop):
    if drop.key is None:
        return np.ones(shape, bool), 1.0
    found = mask(drop.key, shape, drop.rate, shared_axes=drop.shared_axes, first=drop.first)
    return np.broadcast_to(found, shape), 65536 / (65536 - threshold(drop.rate))


@pytest.fixture(autouse=True)
def small_blocks(request, monkeypatch):
    """Blocks of 128 queries forward and 256 backward, unless a test names others: rows have several."""
    named = getattr(request, "param", (128, 256, 256))
    monkeypatch.setattr(flash_attention, "SAFE", Chip(Blocks(*named), Blocks(*named), 128))


def packed(rows, length):
    """Segments of rows: packed, packed and padded, all padding."""
    places = np.arange(length)
    one = 1 + (places >= 37) + (places >= 128) + (places >= 130)
    other = np.where(places < length - 50, 1 + (places >= 100), 0)
    return jnp.asarray(np.stack([one, other, np.zeros(length)])[np.arange(rows) % 3], jnp.int32)


CASES = {
    "causal": {"causal": True},
    "bidirectional": {"packing": False},
    "packed": {"causal": True, "rows": 3, "rate": 0.1},
    "one width and length of many": {"length": 200, "width": 20, "rate": 0.1, "rows": 3},
    "most weights are dropped": {"rate": 0.9, "causal": True},
    "a long row": {"length": 1300, "heads": 1, "causal": True, "rate": 0.1},
    "a long row, both ways": {"length": 1152, "heads": 1, "rate": 0.1, "packing": False},
    "a memory": {"length": 256, "num_keys": 400, "causal": True, "rate": 0.1},
    "another text": {"length": 130, "num_keys": 300, "rate": 0.1, "along": True},
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name):
    """Fails on a wrong mask, scale or factor, on blocks that meet at a wrong place, or with other dropout masks."""
    case = {"length": 384, "num_keys": None, "causal": False, "rows": 2, "heads": 2, "width": 16, "rate": 0.0}
    case |= {"packing": True, "along": False} | CASES[name]
    rows, heads, length, width = (case[name] for name in ("rows", "heads", "length", "width"))
    num_keys = case["num_keys"] or length
    shape, offset = (rows, heads, length, num_keys), num_keys - length if case["causal"] else 0
    q, do, k, v = arrays(*((rows, heads, size, width) for size in (length, length, num_keys, num_keys)))
    own, seen = (packed(rows, length), packed(rows, num_keys)) if case["packing"] else (None, None)
    drop = WeightDropout(case["rate"], KEY if case["rate"] else None, (2,) if case["along"] else ())

    def weighted(q, k, v):
        found = attend(
            q,
            k,
            v,
            causal=case["causal"],
            segments_BL=own,
            key_segments_BS=seen,
            query_offset=offset,
            drop=drop,
            backend="flash",
        )
        return jnp.sum(found * do), found

    (_, outputs), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    visible = visible_keys(shape, case["causal"], offset, own, seen)
    expected = definition(q, k, v, do, visible, *kept_keys(shape, drop))
    assert_close(dict(zip(("outputs", "q", "k", "v"), (outputs, *gradients), strict=True)), expected)
    unseen = ~visible.any(3)
    assert np.all(np.asarray(outputs)[unseen] == 0) and np.all(np.asarray(gradients[0])[unseen] == 0)


@pytest.mark.parametrize("shape", [(1, 2), (1, 1), (3, 2), (3, 1)])
def test_a_bias_and_its_gradient(shape):
    """Fails when a bias of all rows or heads gets the gradient of one, or of a row twice."""
    q, do, k, v = arrays(*((3, 2, 256, 16),) * 4)
    (bias,) = arrays((*shape, 256, 256), seed=1)

    def weighted(q, bias):
        return jnp.sum(do * attend(q, k, v, causal=True, bias_BHLS=bias, drop=WeightDropout(0.1, KEY), backend="flash"))

    dq, dbias = jax.jit(jax.grad(weighted, argnums=(0, 1)))(q, bias)
    keep = kept_keys((3, 2, 256, 256), WeightDropout(0.1, KEY))
    expected = definition(q, k, v, do, visible_keys((3, 2, 256, 256), True), *keep, bias)
    axes = tuple(axis for axis in (0, 1) if shape[axis] == 1)
    assert_close({"q": dq, "scores": dbias}, expected | {"scores": expected["scores"].sum(axes, keepdims=True)})


@pytest.mark.parametrize(
    ("length", "num_keys", "reach", "small_blocks"),
    [
        (128, 128, 0, (128, 128, 256)),
        (130, 300, 0, (128, 256, 256)),
        (256, 512, 100, (256, 128, 256)),
        (700, 1200, 500, (128, 256, 256)),
    ],
    indirect=["small_blocks"],
)
def test_scores_of_distances(length, num_keys, reach, small_blocks):
    """Fails when a score is one place off, a gradient loses a block, or a key beyond the reach is seen."""
    b, h, width = 2, 2, 8
    q, q2, do, k, v = arrays(*((b, h, length, width),) * 3, *((b, h, num_keys, width),) * 2)
    (r,) = arrays((1, h, num_keys, width), seed=1)
    drop, offset = WeightDropout(0.1, KEY), num_keys - length
    own = jnp.ones((b, length), jnp.int32)  # the first slots of the memory hold nothing
    empty = np.arange(offset) < np.array([[3], [offset]])
    seen = jnp.concatenate([jnp.where(empty, -1, 1), own], axis=1)

    def weighted(q, k, v, q2, r):
        found = flash_attention.flash_attention(
            q,
            k,
            v,
            causal=True,
            segments_BL=own,
            key_segments_BS=seen,
            scale=width**-0.5,
            query_offset=offset,
            drop=drop,
            distances=Distances(q2, r),
            reach=reach,
        )
        return jnp.sum(found * do), found

    (_, outputs), gradients = jax.jit(jax.value_and_grad(weighted, argnums=range(5), has_aux=True))(q, k, v, q2, r)
    shape = (b, h, length, num_keys)
    visible = visible_keys(shape, True, offset, own, seen, reach)
    expected = definition(q, k, v, do, visible, *kept_keys(shape, drop), q2=q2, r=r)
    found = dict(zip(("outputs", "q", "k", "v", "q2", "r"), (outputs, *gradients), strict=True))
    assert_close(found, expected, 3e-6)
    bias = width**-0.5 * by_key(jnp.einsum("bhlk,xhsk->bhls", q2, r))  # as `xla` adds them
    if not reach:
        other = attend(
            q,
            k,
            v,
            causal=True,
            segments_BL=own,
            key_segments_BS=seen,
            bias_BHLS=bias,
            query_offset=offset,
            drop=drop,
            backend="xla",
        )
        np.testing.assert_allclose(outputs, other, rtol=1e-5, atol=1e-5)


def test_blocks_and_meshes_change_nothing(monkeypatch):
    """Fails when a mask or a sum depends on the blocks, or rows or heads are dealt out wrongly over 8 devices."""
    q, do, k, v = arrays(*((4, 4, 384, 16),) * 4)
    segments = packed(4, 384)
    (bias,) = arrays((1, 4, 384, 384), seed=2)

    def found(backend="flash", mesh=None):
        def weighted(q, k, v, bias):
            outputs = attend(
                q,
                k,
                v,
                causal=True,
                segments_BL=segments,
                bias_BHLS=bias,
                drop=WeightDropout(0.25, KEY),
                backend=backend,
            )
            return jnp.sum(outputs * do), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(weighted, argnums=range(4), has_aux=True))(q, k, v, bias)
        return [np.asarray(x) for x in (outputs, *gradients)]

    expected = found("xla")
    visible = visible_keys((4, 4, 384, 384), True, 0, segments, segments).any(3)
    for blocks in ((128, 128, 256), (384, 256, 512), (256, 384, 512)):
        monkeypatch.setattr(flash_attention, "SAFE", Chip(Blocks(*blocks), Blocks(*blocks), 128))
        for one, other in zip(found(), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        for one, other in zip(found(), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert visible.all()


def test_bfloat16_keeps_sums_in_float32():
    q, k, v = arrays(*((1, 2, 256, 64),) * 3, dtype=jnp.bfloat16)
    found = attend(q * 8, k, v, causal=True, backend="flash")
    assert found.dtype == jnp.bfloat16
    exact = attend(*(x.astype(jnp.float32) for x in (q * 8, k, v)), causal=True, backend="xla")
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.02, atol=0.02)


DROPS = WeightDropout(0.1, KEY)


@pytest.mark.parametrize(
    ("length", "width", "dtype", "more", "why"),
    [
        (63, 8, jnp.float32, {}, "flash needs at least 64 queries per row, got 63"),
        (128, 512, jnp.float32, {}, "flash needs a head width from 2 to 256, got 512"),
        (128, 8, jnp.float16, {}, "flash needs float32 or bfloat16, got float16"),
        (128, 8, jnp.float32, {"query_offset": jnp.int32(3)}, "flash does not support decoding with a cache"),
        (128, 8, jnp.float32, {"drop": DROPS._replace(shared_axes=(1,))}, "other axes than the queries share"),
        (8192, 128, jnp.bfloat16, {}, "8192 queries, 8192 keys and heads of 128 need 48 MiB of vector memory, and the"),
    ],
)
def test_what_it_cannot_do_xla_does_and_the_log_says_so(length, width, dtype, more, why, caplog):
    """Fails when the compiler meets what the kernel cannot do, or xla takes its place without a word."""
    layers.log_once.cache_clear()
    x = jax.ShapeDtypeStruct((1, 1, length, width), dtype)
    with compiling_for("tpu", kind="TPU v4"), caplog.at_level("INFO"):
        jax.eval_shape(lambda x: attend(x, x, x, causal=True, **more), x)
    assert "attention is computed by xla, not flash: " in caplog.text and why in caplog.text


def test_a_chip_without_blocks_gets_safe_ones(caplog):
    layers.log_once.cache_clear()
    x = jax.ShapeDtypeStruct((1, 1, 256, 64), jnp.bfloat16)
    with compiling_for("tpu", kind="TPU v9"), caplog.at_level("INFO"):
        jax.eval_shape(lambda x: attend(x, x, x, causal=True), x)
    assert "flash attention has no blocks for TPU v9" in caplog.text


@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_it_compiles_for_every_chip(name):
    """Forward and backward. Fails when Mosaic refuses the kernel, which an interpreter does not show."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: launch/setup.sh tpu")
    device = topology(name).devices()[0]
    assert device.device_kind in CHIPS

    def gradients(*inputs):
        q, q2, k, v, r, bias, own, seen = inputs
        causal = dict(causal=True, segments_BL=own, key_segments_BS=seen, query_offset=128, drop=DROPS)

        def outputs(q, q2, k, v, r, bias):
            plain = attend(q, k, v, bias_BHLS=bias, backend="flash", **causal)
            relative = flash_attention.flash_attention(
                q, k, v, scale=0.1, distances=Distances(q2, r), reach=99, **causal
            )
            return jnp.sum(plain.astype(jnp.float32)) + jnp.sum(relative.astype(jnp.float32))

        return jax.grad(outputs, argnums=range(6))(q, q2, k, v, r, bias)

    place = jax.sharding.SingleDeviceSharding(device)
    shapes = [((2, 2, size, 40), jnp.bfloat16) for size in (256, 256, 384, 384)] + [((1, 2, 384, 40), jnp.bfloat16)]
    shapes += [((1, 2, 256, 384), jnp.float32), ((2, 256), jnp.int32), ((2, 384), jnp.int32)]
    given = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    with compiling_for("tpu", kind=device.device_kind):
        text = jax.jit(gradients).lower(*given).compile().as_text()
    for kernel in ("flash_attention_forward", "flash_attention_backward"):
        assert text.count(f"%{kernel}") or text.count(kernel)
