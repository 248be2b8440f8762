"""Attention against the definition spelt out in loops, and what its mask and its dropout may do."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.distributed.devices import compiling_for
from jaxlm.distributed.mesh import MeshConfig, make_mesh, use_mesh
from jaxlm.errors import RunError
from jaxlm.nn import layers, transformer
from jaxlm.nn.layers import WeightDropout, dropout
from jaxlm.nn.transformer import attend

B, H, L, K = 2, 3, 7, 4


def attend_in_loops(q, k, v, causal: bool, segments, offset: int) -> np.ndarray:
    """Vaswani et al. (2017), equation 1, one query at a time in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, h, i in itertools.product(*(range(n) for n in q.shape[:3])):
        seen = [
            s
            for s in range(k.shape[2])
            if (not causal or s <= i + offset) and (segments is None or segments[b][i] == segments[b][s])
        ]
        scores = np.array([q[b, h, i] @ k[b, h, s] / math.sqrt(q.shape[-1]) for s in seen])
        weights = np.exp(scores - scores.max())
        out[b, h, i] = sum(w * v[b, h, s] for w, s in zip(weights / weights.sum(), seen, strict=True))
    return out


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    return [jnp.asarray(2 * rng.standard_normal((B, H, L, K)), jnp.float32) for _ in range(3)]


SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 1, 0, 0]], np.int32)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_it_is_the_definition(qkv, causal, segments):
    """Fails on a wrong scale, a mask off by one or the wrong way round, or padding that gives NaN."""
    found = attend(*qkv, causal=causal, segments_BL=None if segments is None else jnp.asarray(segments))
    np.testing.assert_allclose(found, attend_in_loops(*qkv, causal, segments, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("smallest", [2, 3, 7])
def test_blocks_of_queries_change_nothing(qkv, segments, smallest, monkeypatch):
    """Fails when a block begins or ends elsewhere than its mask, lengths that blocks do not divide included."""
    monkeypatch.setattr("jaxlm.nn.transformer.SMALLEST_BLOCK", smallest)
    rows = None if segments is None else jnp.asarray(segments)
    found = attend(*qkv, causal=True, segments_BL=rows)
    np.testing.assert_allclose(found, attend_in_loops(*qkv, True, segments, 0), rtol=1e-5, atol=1e-6)


def test_each_block_drops_weights_of_its_own(monkeypatch):
    """Fails when two blocks share their draws, or a block keeps all."""
    length, rate = 64, 0.25
    monkeypatch.setattr("jaxlm.nn.transformer.SMALLEST_BLOCK", 16)
    q, v = jnp.zeros((8, 4, length, 2)), jnp.broadcast_to(jnp.eye(length), (8, 4, length, length))
    drop = jax.jit(lambda q, v, key: attend(q, q, v, causal=True, drop=WeightDropout(rate, key)))
    weights = np.asarray(drop(q, v, jax.random.key(3)))
    seen = np.tril(np.ones((length, length), bool))
    kept = (weights > 0)[:, :, seen]
    assert np.all(weights[:, :, ~seen] == 0)
    assert abs(kept.mean() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / kept.size)
    blocks = [(weights > 0)[:, :, first : first + 16, :16] for first in (16, 32, 48)]
    for one, other in itertools.combinations(blocks, 2):
        assert abs((one == other).mean() - (1 - 2 * rate * (1 - rate))) < 0.02


def test_queries_of_a_cache_stand_at_their_offset(qkv):
    """Fails when a query decoded at position 4 sees later, or fewer, cached keys."""
    q, k, v = qkv
    found = jax.jit(lambda offset: attend(q[:, :, :2], k, v, causal=True, query_offset=offset))(jnp.int32(4))
    np.testing.assert_allclose(found, attend_in_loops(q[:, :, :2], k, v, True, None, 4), rtol=1e-5, atol=1e-6)


def test_masked_keys_get_no_gradient(qkv):
    """Fails when a masked key or value, however large, reaches the output or its gradient."""
    q, k, v = qkv

    def first_query(k, v):
        return jnp.sum(attend(q, k, v, causal=True)[:, :, 0])

    dk, dv = jax.jit(jax.grad(first_query, argnums=(0, 1)))(k * 100, v)
    assert np.all(np.asarray(dk)[:, :, 1:] == 0) and np.all(np.asarray(dv)[:, :, 1:] == 0)
    assert np.all(np.asarray(dv)[:, :, 0] == 1)


def test_bfloat16_keeps_a_float32_softmax(qkv):
    """Fails when the softmax itself is made in bfloat16: scores of hundreds would lose their differences."""
    q, k, v = qkv
    q_16, k_16, v_16 = (x.astype(jnp.bfloat16) for x in (q * 20, k, v))
    found = attend(q_16, k_16, v_16, causal=True)
    assert found.dtype == jnp.bfloat16
    exact = attend_in_loops(*(x.astype(jnp.float32) for x in (q_16, k_16, v_16)), True, None, 0)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.02, atol=0.02)


def rows(length: int, heads: int = 4, width: int = 8):
    """Queries, keys and values of four rows, and their segments: packed, packed and padded, whole, all padding."""
    rng = np.random.default_rng(1)
    qkv = [jnp.asarray(rng.standard_normal((4, heads, length, width)), jnp.float32) for _ in range(3)]
    cuts = np.arange(length)
    packed = 1 + (cuts >= 37) + (cuts >= 128) + (cuts >= 130)
    padded = np.where(cuts < length - 50, 1 + (cuts >= 100), 0)
    return qkv, jnp.asarray(np.stack([packed, padded, np.ones(length), np.zeros(length)]), jnp.int32)


def value_and_gradients(backend: str, qkv, causal: bool, segments):
    """A weighted sum of the outputs, which tells them apart, and its gradients."""
    weights = jnp.cos(jnp.arange(qkv[0].size, dtype=jnp.float32)).reshape(qkv[0].shape)

    def loss(q, k, v):
        found = attend(q, k, v, causal=causal, segments_BL=segments, backend=backend)
        return jnp.sum(found * weights), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return found, *gradients


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_gets_the_mask(causal, monkeypatch):
    """Fails when segments, padding or causality do not reach JAX's entrance to cuDNN, whose arithmetic stands in.

    That the kernel itself heeds them only a GPU can tell: `python -m jaxlm.doctor` compares it there.
    """
    plain = jax.nn.dot_product_attention
    asked = []

    def stand_in(*qkv, implementation, **options):
        asked.append(implementation)
        return plain(*qkv, implementation="xla", **options)

    monkeypatch.setattr("jax.nn.dot_product_attention", stand_in)
    qkv, segments = rows(64)
    qkv = [x.astype(jnp.bfloat16) for x in qkv]
    with compiling_for("gpu"):
        found = value_and_gradients("cudnn", qkv, causal, segments)
        expected = value_and_gradients("xla", qkv, causal, segments)
    assert asked == ["cudnn"]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("backend", "platform", "options", "why"),
    [
        ("auto", "tpu", {"query_offset": jnp.int32(3)}, "does not support decoding with a cache"),
        ("flash", "gpu", {}, "flash needs a TPU"),
        ("cudnn", "cpu", {}, "cudnn needs a GPU"),
        ("cudnn", "gpu", {}, "needs a dtype of 16 bits"),
    ],
)
def test_what_a_kernel_cannot_do_xla_does_and_the_log_says_so(qkv, backend, platform, options, why, caplog):
    """Fails when a kernel is asked for what it cannot do, or xla takes its place without a word."""
    with compiling_for(platform), caplog.at_level("INFO"):
        found = attend(*qkv, causal=True, backend=backend, **options)
    np.testing.assert_array_equal(found, attend(*qkv, causal=True, backend="xla", **options))
    assert why in caplog.text


@pytest.fixture(autouse=True)
def forget():
    """Each test begins and ends as a new process: nothing was compared or logged."""
    layers.log_once.cache_clear()
    transformer._agrees.cache_clear()
    yield
    transformer._agrees.cache_clear()


KERNELS = [("gpu", "cudnn"), ("tpu", "flash")]


def kernel_stand_in(monkeypatch, cache, platform, factor=1.0):
    """Make a kernel plain XLA with its outputs times a factor, and this process one with its device.

    cache: the user's folder of caches. Returns a list that grows with each call of the kernel.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    plain = jax.nn.dot_product_attention
    asked = []

    def cudnn(*qkv, implementation, **options):
        asked.append(implementation)
        exact = [x.astype(jnp.float32) for x in qkv]  # JAX 0.11 takes the softmax in bfloat16
        return factor * plain(*exact, implementation="xla", **options).astype(jnp.bfloat16)

    def flash(q, k, v, **options):
        asked.append("flash")
        return factor * attend(q, k, v, backend="xla", **options)

    monkeypatch.setattr("jax.nn.dot_product_attention", cudnn)
    monkeypatch.setattr("jaxlm.nn.flash_attention.flash_attention", flash)
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    return asked


@pytest.mark.parametrize(("platform", "kernel"), KERNELS)
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_auto_compares_a_kernel_with_xla_before_it_takes_it(monkeypatch, tmp_path, caplog, platform, kernel, factor):
    """In a traced step: the comparison runs at once, and a kernel that differs by a tenth is not taken.

    The next process on the machine compares again only where they differed.
    """
    asked = kernel_stand_in(monkeypatch, tmp_path, platform, factor)
    qkv = [x.astype(jnp.bfloat16) for x in rows(64)[0]]
    with compiling_for(platform), caplog.at_level("INFO"):
        found = jax.jit(lambda *qkv: attend(*qkv, causal=True))(*qkv)
    said = (
        f"attention is computed by {kernel}"
        if factor == 1
        else f"attention is computed by xla, not {kernel}: {kernel}'s outputs and"
    )
    assert said in caplog.text
    assert len(asked) >= 1
    expected = attend(*qkv, causal=True, backend="xla")
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05)
    transformer._agrees.cache_clear()
    asked.clear()
    with compiling_for(platform):
        assert transformer._agrees(kernel) == (factor == 1.0)
    assert bool(asked) == (factor != 1.0)


def test_the_comparison_leaves_the_mesh(monkeypatch, tmp_path):
    """Another process may not compare, as its machine has: fails when the comparison runs on the devices of all."""
    kernel_stand_in(monkeypatch, tmp_path, "tpu")
    used = []

    def difference(backend):
        used.append(len(jax.jit(lambda x: x + 1)(jnp.ones(8)).sharding.device_set))
        return 0.0

    monkeypatch.setattr(transformer, "difference_from_xla", difference)
    qkv, _ = rows(64)
    with use_mesh(make_mesh(MeshConfig())), compiling_for("tpu"):
        jax.jit(lambda *qkv: attend(*qkv, causal=True))(*qkv)
    assert used == [1]


@pytest.mark.parametrize(("platform", "kernel"), KERNELS)
def test_a_difference_among_several_processes_is_an_error(monkeypatch, tmp_path, platform, kernel):
    """The other processes may have found none, and would run another program."""
    kernel_stand_in(monkeypatch, tmp_path, platform, 1.1)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    qkv = [x.astype(jnp.bfloat16) for x in rows(64)[0]]
    said = f"{kernel}'s outputs and gradients .* on process 0: set --execution.attention xla"
    with compiling_for(platform), pytest.raises(RunError, match=said):
        attend(*qkv, causal=True)


@pytest.mark.parametrize(
    ("capability", "width", "why"),
    [
        ((7, 5), 64, "cudnn needs a GPU of compute capability 8.0, and this one has 7.5"),
        ((8, 0), 12, "cudnn needs a head width that is a multiple of 8 up to 128, got 12"),
        ((8, 0), 136, "cudnn needs a head width that is a multiple of 8 up to 128, got 136"),
    ],
)
def test_gpus_and_heads_that_cudnn_does_not_support(caplog, capability, width, why):
    x = jnp.zeros((1, 1, 8, width), jnp.bfloat16)
    with compiling_for("gpu", capability), caplog.at_level("INFO"):
        attend(x, x, x, causal=True)
    assert f"attention is computed by xla, not cudnn: {why}" in caplog.text


def test_a_model_that_is_made_says_nothing_of_attention(caplog):
    """Parameters are made with one position: fails when a log tells of that what a user reads as the step's."""
    one = jnp.zeros((1, 1, 1, 8))
    with compiling_for("tpu"), caplog.at_level("INFO"):
        attend(one, one, one, causal=True)
    assert not caplog.text


def test_an_unknown_backend_is_refused(qkv):
    with pytest.raises(ValueError, match="got 'splash'"):
        attend(*qkv, causal=True, backend="splash")


def test_attention_dropout_drops_weights_and_scales_the_rest():
    """Fails when outputs are dropped instead of weights, when the rate is off, or when survivors are not scaled."""
    length, rate = 64, 0.25
    q = jnp.zeros((8, 4, length, 2))
    v = jnp.broadcast_to(jnp.eye(length), (8, 4, length, length))  # outputs are the weights themselves
    weights = np.asarray(attend(q, q, v, causal=False, drop=WeightDropout(rate, jax.random.key(3))), np.float64)
    kept = weights > 0
    np.testing.assert_allclose(weights[kept], 1 / length / (1 - rate), rtol=1e-5)
    count = weights.size
    assert abs(kept.mean() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize(
    ("rate", "shape"), [(0.1, (500, 201)), (0.1, (400, 256)), (0.5, (400, 256)), (0.9, (7, 9, 511))]
)
def test_dropout_rate_and_scale(rate, shape):
    """Fails when the share dropped or the factor is wrong, for odd and even last axes (two elements share 32 bits)."""
    out = np.asarray(dropout(jnp.ones(shape), rate, jax.random.key(0)), np.float64)
    np.testing.assert_allclose(out[out > 0], 1 / (1 - rate), rtol=2e-4 / (1 - rate))
    assert abs((out > 0).mean() - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / out.size)
    assert abs(out.mean() - 1) < 5 * math.sqrt(rate / (1 - rate) / out.size)


def test_dropout_off_and_shared_axes():
    x = jnp.arange(24.0).reshape(2, 3, 4) + 1
    assert dropout(x, 0.5, None) is x and dropout(x, 0.0, jax.random.key(0)) is x
    out = np.asarray(dropout(jnp.ones((40, 3, 8)), 0.5, jax.random.key(0), shared_axes=(1,)))
    assert np.all(out == out[:, :1]) and 0.3 < (out[:, 0] > 0).mean() < 0.7
