"""Attention kernels that never hold the scores: splash on a TPU, cuDNN on a GPU; neither can drop weights."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    MultiHeadMask,
    QKVLayout,
    SegmentIds,
    make_splash_mha,
)

from jaxlm.distributed import devices
from jaxlm.distributed.partition import current_spec

LANES = 128  # lanes of a TPU's vector unit: splash's blocks of keys are multiples of it
LARGEST_BLOCK = 512  # queries, or keys, per block
WIDEST_HEAD = 512  # largest head width whose blocks fit a chip's vector memory, in float32 too; 1024 does not fit
SAVED = "attention"  # checkpoint name of the residuals that splash's forward pass saves for its backward pass


def splash(q_BHLK, k_BHLK, v_BHLK, *, causal: bool, segments_BL: jax.Array | None) -> jax.Array:
    """Run JAX's splash attention, self-attention over L positions, a multiple of LANES; interpreted on a CPU.

    The kernel runs on one device: rows and heads are sharded explicitly, by the rules of the mesh in use.
    """
    scale = jnp.asarray(q_BHLK.shape[-1] ** -0.5, q_BHLK.dtype)

    def on_device(q_BHLK, k_BHLK, v_BHLK, segments_BL):
        heads, length = q_BHLK.shape[1:3]
        kernel = _splash_kernel(heads, length, causal, devices.platform() == "cpu")
        ids = None if segments_BL is None else SegmentIds(segments_BL, segments_BL)
        return jax.vmap(kernel)(q_BHLK, k_BHLK, v_BHLK, ids)

    spec = current_spec(("batch", "heads", None, None), q_BHLK.shape)
    if spec is None:
        return on_device(q_BHLK * scale, k_BHLK, v_BHLK, segments_BL)
    rows = jax.sharding.PartitionSpec(spec[0], None)
    return jax.shard_map(on_device, in_specs=(spec, spec, spec, rows), out_specs=spec, check_vma=False)(
        q_BHLK * scale, k_BHLK, v_BHLK, segments_BL
    )


def _splash_kernel(heads: int, length: int, causal: bool, interpret: bool):
    block = max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)
    mask = (CausalMask if causal else FullMask)((length, length))
    return make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            use_fused_bwd_kernel=True,
            q_layout=QKVLayout.SEQ_MINOR,  # the 64 inputs of a head would fill half of the lanes
            k_layout=QKVLayout.SEQ_MINOR,
            v_layout=QKVLayout.SEQ_MINOR,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )


def cudnn(q_BHLK, k_BHLK, v_BHLK, mask: jax.Array | None, *, causal: bool) -> jax.Array:
    """Run cuDNN's flash attention through JAX, in 16 bits. mask: keys that each query sees beside `causal`, (B, 1, L,
    L).

    Segments are passed as a mask: the kernel's own lengths support padding only, not several texts per row.
    """
    q_BLHK, k_BLHK, v_BLHK = (jnp.swapaxes(x, 1, 2) for x in (q_BHLK, k_BHLK, v_BHLK))
    found_BLHK = jax.nn.dot_product_attention(
        q_BLHK, k_BLHK, v_BLHK, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return jnp.swapaxes(found_BLHK, 1, 2)
