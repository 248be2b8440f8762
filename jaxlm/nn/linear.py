"""Products with parameters, which are float32 and sharded by fsdp: kernels along their inputs, tables along the width.

A parameter is first cast to the compute dtype and then all-gathered, where it is used, so that the traffic is halved;
the backward pass gathers it again. The gradient of a parameter is all-reduced in a dtype that `Execution` selects: the
compute dtype, or float32; a table's is always float32, as its rows sum over thousands of tokens.

The forward rules call `.fun`, the plain function: a custom_vjp nested in another is invisible to remat policies, so
every matmul would be recomputed.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import constrain, with_axes
from jaxlm.nn.config import Execution

Names = tuple[str | None, ...]
# The axes that fsdp shards, and their names after an all-gather.
_GATHERED: dict[str | None, str] = {
    "width": "whole_width",
    "head_width_in": "head_width",
    "feed_forward_in": "feed_forward",
}


def gathered(weight: jax.Array, dtype: jnp.dtype, names: Names) -> jax.Array:
    """All-gather `weight` over fsdp in `dtype`; `names` are its logical axes."""
    return constrain(weight.astype(dtype), _whole(names))


def summed(gradient: jax.Array, dtype: jnp.dtype, names: Names) -> jax.Array:
    """All-reduce a parameter's gradient, then keep the local shard.

    If a reduce-scatter is requested instead, XLA computes the product in slices of a few dozen columns.
    """
    return constrain(gradient, _whole(names)).astype(dtype)


def _whole(names: Names) -> Names:
    return tuple(_GATHERED.get(name, name) for name in names)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return x (..., D) times kernel (D, F) plus bias (F,), in their dtypes.

    The leading axes of x are flattened for the product, which XLA's CPU backend runs several percent faster.
    """
    y = jnp.dot(x.reshape(-1, x.shape[-1]), kernel)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def project(x: jax.Array, kernel: jax.Array, bias: jax.Array, names: Names, execution: Execution) -> jax.Array:
    """Return `linear` with a parameter: kernel (D, F) float32 with the logical axes `names`, in the compute dtype."""
    return linear(x, gathered(kernel, x.dtype, names), bias)


def _project_fwd(x, kernel, bias, names: Names, execution: Execution):
    return project.fun(x, kernel, bias, names, execution), (x, kernel)


def _project_bwd(names: Names, execution: Execution, residuals, dy):
    x, kernel = residuals
    x_TD, dy_TF = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx = jnp.dot(dy_TF, gathered(kernel, x.dtype, names).T).reshape(x.shape)
    dkernel = jnp.dot(x_TD.T, dy_TF, preferred_element_type=execution.gradient_dtype())
    return dx, summed(dkernel, kernel.dtype, names), jnp.sum(dy_TF, axis=0, dtype=jnp.float32)


project.defvjp(_project_fwd, _project_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def project_to_heads(
    x_BLD: jax.Array, kernel_DHK: jax.Array, bias_HK: jax.Array | None, names: Names, execution: Execution
) -> jax.Array:
    """Return x W + b of every head, (B, H, L, K); without b for None."""
    kernel_DHK = gathered(kernel_DHK, x_BLD.dtype, names)
    if devices.platform() == "cpu":
        d, h, k = kernel_DHK.shape
        y_BLF = linear(x_BLD, kernel_DHK.reshape(d, h * k), None if bias_HK is None else bias_HK.reshape(h * k))
        return jnp.swapaxes(y_BLF.reshape(*x_BLD.shape[:2], h, k), 1, 2)
    # Computed with positions last, as a TPU's attention kernel takes it: a head's 64 would fill half of its 128 lanes.
    y_BHKL = jnp.einsum("bld,dhk->bhkl", x_BLD, kernel_DHK)
    if bias_HK is not None:
        y_BHKL = y_BHKL + bias_HK.astype(x_BLD.dtype)[:, :, None]
    return jnp.swapaxes(y_BHKL, 2, 3)


def _heads_fwd(x_BLD, kernel_DHK, bias_HK, names: Names, execution: Execution):
    return project_to_heads.fun(x_BLD, kernel_DHK, bias_HK, names, execution), (x_BLD, kernel_DHK, bias_HK is None)


def _heads_bwd(names: Names, execution: Execution, residuals, dy_BHLK):
    x_BLD, kernel_DHK, without_bias = residuals
    dx_BLD = jnp.einsum("bhlk,dhk->bld", dy_BHLK, gathered(kernel_DHK, x_BLD.dtype, names))
    if without_bias:
        dkernel_DHK = jnp.einsum("bld,bhlk->dhk", x_BLD, dy_BHLK, preferred_element_type=execution.gradient_dtype())
        return dx_BLD, summed(dkernel_DHK, kernel_DHK.dtype, names), None
    # A last column of ones gives the bias's gradient with the kernel's: by the TPU compiler's cycles separate sums take
    # an eighth of a layer.
    x_BLD = jnp.concatenate([x_BLD, jnp.ones((*x_BLD.shape[:2], 1), x_BLD.dtype)], axis=-1)
    dboth_DHK = jnp.einsum("bld,bhlk->dhk", x_BLD, dy_BHLK, preferred_element_type=execution.gradient_dtype())
    dboth_DHK = summed(dboth_DHK, kernel_DHK.dtype, names)
    return dx_BLD, dboth_DHK[:-1], dboth_DHK[-1]


project_to_heads.defvjp(_heads_fwd, _heads_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def project_heads(
    a_BHLK: jax.Array, kernel_HKD: jax.Array, bias_D: jax.Array | None, names: Names, execution: Execution
) -> jax.Array:
    """Return the concatenated outputs of all heads times W plus b: (B, L, D); without b for None."""
    kernel_HKD = gathered(kernel_HKD, a_BHLK.dtype, names)
    if devices.platform() == "cpu":
        b, h, length, k = a_BHLK.shape
        return linear(jnp.swapaxes(a_BHLK, 1, 2).reshape(b, length, h * k), kernel_HKD.reshape(h * k, -1), bias_D)
    y_BLD = jnp.einsum("bhlk,hkd->bld", a_BHLK, kernel_HKD)
    return y_BLD if bias_D is None else y_BLD + bias_D.astype(a_BHLK.dtype)


def _out_fwd(a_BHLK, kernel_HKD, bias_D, names: Names, execution: Execution):
    return project_heads.fun(a_BHLK, kernel_HKD, bias_D, names, execution), (a_BHLK, kernel_HKD, bias_D is None)


def _out_bwd(names: Names, execution: Execution, residuals, dy_BLD):
    a_BHLK, kernel_HKD, without_bias = residuals
    da_BHLK = jnp.einsum("bld,hkd->bhlk", dy_BLD, gathered(kernel_HKD, a_BHLK.dtype, names))
    dkernel_HKD = jnp.einsum("bhlk,bld->hkd", a_BHLK, dy_BLD, preferred_element_type=execution.gradient_dtype())
    dbias_D = None if without_bias else jnp.sum(dy_BLD, axis=(0, 1), dtype=jnp.float32)
    return da_BHLK, summed(dkernel_HKD, kernel_HKD.dtype, names), dbias_D


project_heads.defvjp(_out_fwd, _out_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table_VD: jax.Array, ids: jax.Array, names: Names, execution: Execution) -> jax.Array:
    """Return rows of a table by number, (..., D) in the compute dtype; their gradients are summed in float32."""
    return jnp.take(gathered(table_VD, execution.compute_dtype(), names), ids, axis=0)


def _embed_fwd(table_VD, ids, names: Names, execution: Execution):
    return embed.fun(table_VD, ids, names, execution), (ids, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _embed_bwd(names: Names, execution: Execution, residuals, dx):
    ids, like = residuals
    # Each device of an fsdp group sums its columns of all rows: activations are sent instead of whole tables.
    dx = constrain(dx.astype(like.dtype), ("rows", *[None] * (dx.ndim - 2), "width"))
    dtable_VD = jnp.zeros((like.shape[0], dx.shape[-1]), like.dtype).at[ids].add(dx)
    return constrain(dtable_VD, names), None


embed.defvjp(_embed_fwd, _embed_bwd)


def linear_head(module: nn.Module, x: jax.Array, outputs: int, init_std: float) -> jax.Array:
    """Return x (…, D) in float32 times a `kernel` (D, outputs) plus a `bias`, new parameters of `module`; float32."""
    init, zeros = nn.initializers.truncated_normal(init_std), nn.initializers.zeros_init()
    kernel = module.param("kernel", with_axes(init, ("width", "classes")), (x.shape[-1], outputs))
    bias = module.param("bias", with_axes(zeros, ("classes",)), (outputs,))
    return linear(x.astype(jnp.float32), kernel, bias)
