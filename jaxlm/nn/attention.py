"""Attention behind one entrance (Vaswani et al., 2017, equation 1), with several backends.

`xla` is plain arithmetic and the reference: causal or bidirectional, segments (packing) and padding, dropout, and a
query offset for decoding with a cache. The kernels, `splash` on a TPU and `cudnn` on a GPU, never hold the scores. They
agree with it forward and backward on packed rows; cases they do not support, dropout of weights above all, fall back to
`xla`, and the log says so.
"""

import functools
import logging

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
from jaxlm.distributed.mesh import current_spec
from jaxlm.nn.config import Backend
from jaxlm.nn.pointwise import dropout

LANES = 128  # lanes of a TPU's vector unit: splash's blocks of keys are multiples of it
LARGEST_BLOCK = 512  # queries, or keys, per block
WIDEST_HEAD = 512  # largest head width whose blocks fit a chip's vector memory, in float32 too; 1024 does not fit
SAVED = "attention"  # checkpoint name of the residuals that splash's forward pass saves for its backward pass
MASKED = -1e30  # finite: a row without visible keys gives finite numbers, which its zero weight then removes
log = logging.getLogger(__name__)
# On the CPU causal queries are processed in blocks, each with the keys up to its last: 3/8 of the scores, all masked,
# are not computed. Four blocks of 64 reduced attention's time at length 256 by a third, eight of 32 by a tenth.
MOST_BLOCKS, SMALLEST_BLOCK = 4, 64


def attend(
    q_BHLK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSK: jax.Array,
    *,
    causal: bool,
    segments_BL: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    bias_BHLS: jax.Array | None = None,
    scale: float | None = None,
    query_offset: jax.Array | int = 0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Return softmax(scale q k + bias) v: (B, H, L, K), heads ahead of positions, in the dtype of `q_BHLK`.

    causal: query l attends to keys up to l + query_offset, which is one number or one per row, (B,). segments_BL: a
    query attends to keys of its own segment only; segment 0 is padding; None: one segment. key_segments_BS: the
    segments of the keys, where these are other tokens than the queries (cross-attention, memory); None: `segments_BL`.
    bias_BHLS: float32, added to the scaled scores, broadcast over axes of size 1. scale: 1 / sqrt(K) unless given. The
    softmax is float32. backend auto: splash on a TPU, else xla.
    """
    segments_BS = segments_BL if key_segments_BS is None else key_segments_BS
    if backend == "auto":
        backend = "splash" if devices.platform() == "tpu" else "xla"
    if q_BHLK.shape[2] == k_BHSK.shape[2] == 1:  # models are initialized with one position: no kernel, no log line
        backend = "xla"
    if backend != "xla":
        decoding = not (isinstance(query_offset, int) and query_offset == 0 and q_BHLK.shape == k_BHSK.shape)
        dropped = dropout_rate if dropout_key is not None else 0.0
        plain = key_segments_BS is None and bias_BHLS is None and scale is None
        if (reason := _unsupported(backend, q_BHLK, decoding, dropped, plain)) is not None:
            _log_once(f"attention by xla, not {backend}: {reason}")
        elif backend == "splash":
            _log_once("attention by splash")
            return splash(q_BHLK, k_BHSK, v_BHSK, causal=causal, segments_BL=segments_BL)
        elif backend == "cudnn":
            _log_once("attention by cudnn")
            mask = attention_mask(q_BHLK.shape[2], k_BHSK.shape[2], False, segments_BL, segments_BL)
            return cudnn(q_BHLK, k_BHSK, v_BHSK, mask, causal=causal)
        else:
            raise ValueError(f"backend must be auto, xla, splash or cudnn, got {backend!r}")
    length, num_keys = q_BHLK.shape[2], k_BHSK.shape[2]
    blocks = 1
    square = length == num_keys and key_segments_BS is None and bias_BHLS is None
    if causal and square and isinstance(query_offset, int) and devices.platform() == "cpu":
        blocks = max(1, min(MOST_BLOCKS, length // SMALLEST_BLOCK))
    if blocks == 1:
        mask = attention_mask(length, num_keys, causal, segments_BL, segments_BS, query_offset)
        return _attend(q_BHLK, k_BHSK, v_BHSK, mask, bias_BHLS, scale, dropout_rate, dropout_key)
    outputs = []
    for number in range(blocks):
        first, end = number * length // blocks, (number + 1) * length // blocks
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, number)
        own, seen = (None, None) if segments_BL is None else (segments_BL[:, first:end], segments_BL[:, :end])
        q_BHMK, k_BHTK, v_BHTK = q_BHLK[:, :, first:end], k_BHSK[:, :, :end], v_BHSK[:, :, :end]
        mask = attention_mask(end - first, end, causal, own, seen, first)
        outputs.append(_attend(q_BHMK, k_BHTK, v_BHTK, mask, None, scale, dropout_rate, key))
    return jnp.concatenate(outputs, axis=2)


def attention_mask(
    num_queries: int,
    num_keys: int,
    causal: bool,
    segments_BL: jax.Array | None,
    segments_BS: jax.Array | None,
    query_offset: jax.Array | int = 0,
) -> jax.Array | None:
    """Return the keys that each query sees: bool, broadcastable to (B, H, L, S); None if it sees all."""
    mask = None
    if causal:
        query_BL = jnp.arange(num_queries) + jnp.atleast_1d(query_offset)[:, None]  # one row serves all for a number
        mask = (jnp.arange(num_keys) <= query_BL[:, :, None])[:, None]
    if segments_BL is not None and segments_BS is not None:
        same = (segments_BL[:, :, None] == segments_BS[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    return mask


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


def cudnn(q_BHLK, k_BHLK, v_BHLK, mask: jax.Array | None, *, causal: bool) -> jax.Array:
    """Run cuDNN's flash attention through JAX, in 16 bits. mask: keys that each query sees besides `causal`, (B, 1, L,
    L).

    Segments are passed as a mask: the kernel's own lengths support padding only, not several texts per row.
    """
    q_BLHK, k_BLHK, v_BLHK = (jnp.swapaxes(x, 1, 2) for x in (q_BHLK, k_BHLK, v_BHLK))
    found_BLHK = jax.nn.dot_product_attention(
        q_BLHK, k_BLHK, v_BLHK, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return jnp.swapaxes(found_BLHK, 1, 2)


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


def _unsupported(backend: str, q_BHLK: jax.Array, decoding: bool, dropped: float, plain: bool) -> str | None:
    """Return why `backend` cannot do it; None if it can."""
    length, platform = q_BHLK.shape[2], devices.platform()
    if not plain:
        return "only xla has a bias, a scale, and segments of the keys"
    if decoding:
        return "it decodes with a cache"
    if dropped:
        return f"only xla drops weights (model.attention_dropout_rate is {dropped}; the kernel needs 0)"
    if backend == "splash":
        if platform == "gpu":
            return "splash needs a TPU"
        if length % LANES:
            return f"length {length} is not a multiple of {LANES}"
        if not 1 < q_BHLK.shape[3] <= WIDEST_HEAD:
            return f"heads of {q_BHLK.shape[3]} are outside its range of 2 to {WIDEST_HEAD}"
    elif backend == "cudnn":
        if platform != "gpu":
            return "cudnn needs a GPU"
        if q_BHLK.dtype.itemsize != 2:
            return f"cudnn needs 16 bits, this is {q_BHLK.dtype}"
        if length % 2:
            return f"length {length} is odd"
    return None


@functools.cache
def _log_once(sentence: str) -> None:
    """Log a sentence once per process: every layer of a step asks, in every traced program."""
    log.info(sentence)


def _attend(q_BHLK, k_BHSK, v_BHSK, mask, bias_BHLS, scale, dropout_rate: float, dropout_key) -> jax.Array:
    scores_BHLS = jnp.einsum("bhlk,bhsk->bhls", q_BHLK, k_BHSK, preferred_element_type=jnp.float32)
    scores_BHLS = scores_BHLS * (q_BHLK.shape[-1] ** -0.5 if scale is None else scale)
    if bias_BHLS is not None:
        scores_BHLS = scores_BHLS + bias_BHLS
    if mask is not None:
        scores_BHLS = jnp.where(mask, scores_BHLS, MASKED)
    weights_BHLS = jax.nn.softmax(scores_BHLS, axis=-1).astype(v_BHSK.dtype)
    weights_BHLS = dropout(weights_BHLS, dropout_rate, dropout_key)
    return jnp.einsum("bhls,bhsk->bhlk", weights_BHLS, v_BHSK)
