"""Choices that depend on the device that programs are compiled for, and arithmetic in float16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.distributed.devices import compiling_for
from jaxlm.errors import InputError
from jaxlm.nn.config import Execution
from jaxlm.nn.layers import activate
from jaxlm.nn.transformer import attend

DEVICES = {"cpu": ("cpu", (0, 0)), "tpu": ("tpu", (0, 0)), "t4": ("gpu", (7, 5)), "a100": ("gpu", (8, 0))}


def test_the_compute_dtype_is_that_of_the_device():
    """Fails when a device computes in a dtype that its products do not have."""
    dtypes = {}
    for name, where in DEVICES.items():
        with compiling_for(*where):
            dtypes[name] = Execution().compute_dtype().name
            given = [Execution(dtype=dtype).compute_dtype().name for dtype in ("float32", "bfloat16")]
            assert given == ["float32", "bfloat16"]
    assert dtypes == {"cpu": "float32", "tpu": "bfloat16", "t4": "float32", "a100": "bfloat16"}


def test_float16_is_for_cpus_and_gpus():
    """Fails when a TPU, which has no products in float16, begins a run in it."""
    for name in ("cpu", "t4", "a100"):
        with compiling_for(*DEVICES[name]):
            assert Execution(dtype="float16").compute_dtype() == jnp.float16
    with compiling_for("tpu"), pytest.raises(InputError, match="execution.dtype must be auto, bfloat16 or float32 on"):
        Execution(dtype="float16").compute_dtype()


def test_a_gpu_without_bfloat16_is_named():
    """Fails when float32 is chosen without a word, or a word is said where it was asked for."""
    with compiling_for(*DEVICES["t4"]):
        (note,) = Execution().notes()
        assert "bfloat16 needs a GPU of compute capability 8.0, and this one has 7.5" in note
        assert Execution(dtype="float32").notes() == ()
    for name in ("cpu", "tpu", "a100"):
        with compiling_for(*DEVICES[name]):
            assert Execution().notes() == ()


def test_deterministic_operations_are_for_gpus():
    """Fails when the option reaches another compiler, or is not named where it has no effect."""
    execution = Execution(deterministic=True)
    for name, where in DEVICES.items():
        with compiling_for(*where):
            on_gpu = name in ("t4", "a100")
            assert execution.compiler_options() == ({"xla_gpu_deterministic_ops": True} if on_gpu else {})
            assert any("has no effect on a" in note for note in execution.notes()) != on_gpu
            assert Execution().compiler_options() == {}


@pytest.mark.parametrize(
    ("attention", "unroll", "backend", "layers"),
    [("auto", 0, "xla", 12), ("auto", 3, "xla", 3), ("auto", 1, "auto", 1), ("cudnn", 0, "cudnn", 1)]
    + [("cudnn", 1, "cudnn", 1), ("xla", 0, "xla", 12)],
)
def test_no_deterministic_program_has_two_calls_of_cudnn(attention, unroll, backend, layers):
    """Two equal backward calls in one program fail with this option; fails when attention by cuDNN is unrolled."""
    execution = Execution(deterministic=True, attention=attention, unroll=unroll)
    with compiling_for("gpu"):
        assert (execution.attention_backend(12), execution.layers_per_iteration(12)) == (backend, layers)
    for other in ("cpu", "tpu"):
        with compiling_for(other):
            assert (execution.attention_backend(12), execution.layers_per_iteration(12)) == (attention, unroll or 12)


def test_unrolled_layers_with_cudnn_are_refused():
    with pytest.raises(InputError, match="execution.unroll must be 0 or 1 with execution.deterministic and .* got 3"):
        Execution(deterministic=True, attention="cudnn", unroll=3).check(12)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf", "relu"])
def test_large_activations_have_gradients_in_float16(name):
    """Fails when the cube or the square in the tanh form, 65,504 at most, makes a value or a gradient NaN."""
    x = jnp.array([-3e4, -150, -41, -1, 0.5, 41, 150, 3e4], jnp.float16)
    found = [activate(x, name), jax.grad(lambda x: jnp.sum(activate(x, name).astype(jnp.float32)))(x)]
    x_32 = x.astype(jnp.float32)
    wanted = [activate(x_32, name), jax.grad(lambda x: jnp.sum(activate(x, name)))(x_32)]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == jnp.float16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=1e-3, atol=1e-6)


def test_masked_scores_in_float16():
    """Rows with two segments, causal, with a row of padding; fails when a masked score is infinite or too large."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((3, 2, 2, 16, 8)).astype(np.float32)
    segments = jnp.asarray([[1] * 7 + [2] * 9, [0] * 16], jnp.int32)

    def found(dtype):
        def total(q, k, v):
            outputs = attend(q, k, v, causal=True, segments_BL=segments)
            return jnp.sum(jnp.sin(outputs.astype(jnp.float32))), outputs

        qkv = [jnp.asarray(x, dtype) for x in inputs]
        (_, outputs), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*qkv)
        return [np.asarray(x, np.float32) for x in (outputs, *gradients)]

    for one, other in zip(found(jnp.float16), found(jnp.float32), strict=True):
        np.testing.assert_allclose(one, other, atol=4e-3)
