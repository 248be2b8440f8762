"""Parts of Transformers that families share: attention with its cache, the feed-forward, and the loop over layers.

The blocks themselves differ in norms, residuals and dropout, and each family writes its own.

Attention (Vaswani et al., 2017, equation 1) has one entrance, `attend`, and several backends. `xla` is plain arithmetic
and the reference. The kernels, `flash` on a TPU and `cudnn` on a GPU, never hold the scores. They agree with it forward
and backward on packed rows; cases they do not support fall back to `xla`, and the log says so. As neither was ever run
where this program is developed, the first process on a machine compares its kernel with `xla` before `auto` takes it.
"""

import contextlib
import contextvars
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxlm.distributed import devices
from jaxlm.distributed.mesh import with_axes
from jaxlm.errors import RunError
from jaxlm.host import installed, user_cache
from jaxlm.nn.config import Backend, Execution
from jaxlm.nn.layers import (
    MASKED,
    NO_DROPOUT,
    SAVED,
    Activation,
    WeightDropout,
    activate,
    dropout,
    log_once,
    project,
    project_heads,
    project_parts_to_heads,
)

WIDEST_CUDNN_HEAD = 128  # 256 from Hopper on
KERNEL_TOLERANCE = 2e-2  # of the relative differences between a kernel and `xla` in bfloat16
log = logging.getLogger(__name__)
KERNELS: dict[str, Backend] = {"tpu": "flash", "gpu": "cudnn"}
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
    drop: WeightDropout = NO_DROPOUT,
    backend: Backend = "auto",
) -> jax.Array:
    """Return softmax(scale q k + bias) v: (B, H, L, K), heads ahead of positions, in the dtype of `q_BHLK`.

    causal: query l attends to keys up to l + query_offset, which is one number or one per row, (B,). segments_BL: a
    query attends to keys of its own segment only; segment 0 is padding; None: one segment. key_segments_BS: the
    segments of the keys, where these are other tokens than the queries (cross-attention, memory); None: `segments_BL`.
    bias_BHLS: float32, added to the scaled scores, broadcast over axes of size 1. scale: 1 / sqrt(K) unless given.
    The softmax is float32.
    backend auto: flash on a TPU, cudnn on a GPU, else xla.
    """
    segments_BS = segments_BL if key_segments_BS is None else key_segments_BS
    automatic, backend = backend == "auto", chosen(backend)
    if q_BHLK.shape[2] == k_BHSK.shape[2] == 1:  # as in `takes_flash`
        backend = "xla"
    with_bias = bias_BHLS is not None
    if backend == "flash" and takes_flash(automatic, q_BHLK, k_BHSK.shape[2], query_offset, drop, with_bias):
        from jaxlm.nn.flash_attention import flash_attention

        return flash_attention(
            q_BHLK,
            k_BHSK,
            v_BHSK,
            causal=causal,
            segments_BL=segments_BL,
            key_segments_BS=segments_BS,
            bias_BHLS=bias_BHLS,
            scale=q_BHLK.shape[3] ** -0.5 if scale is None else scale,
            query_offset=int(query_offset),
            drop=drop,
        )
    if backend == "cudnn":
        plain = key_segments_BS is None and bias_BHLS is None and scale is None
        decoding = not (isinstance(query_offset, int) and query_offset == 0 and q_BHLK.shape == k_BHSK.shape)
        if (reason := _cudnn_lacks(q_BHLK, decoding, 0.0 if drop.key is None else drop.rate, plain)) is not None:
            log_once(f"attention is computed by xla, not cudnn: {reason}")
        elif not automatic or _agrees("cudnn"):
            log_once("attention is computed by cudnn")
            return cudnn(q_BHLK, k_BHSK, v_BHSK, causal=causal, segments_BL=segments_BL)
    elif backend not in ("xla", "flash"):
        raise ValueError(f"backend must be auto, xla, flash or cudnn, got {backend!r}")
    square = q_BHLK.shape[2] == k_BHSK.shape[2] and key_segments_BS is None and bias_BHLS is None
    if causal and square and isinstance(query_offset, int) and not query_offset and devices.platform() == "cpu":
        return _in_blocks(q_BHLK, k_BHSK, v_BHSK, segments_BL, scale, drop)
    mask = attention_mask(q_BHLK.shape[2], k_BHSK.shape[2], causal, segments_BL, segments_BS, query_offset)
    return _attend(q_BHLK, k_BHSK, v_BHSK, mask, bias_BHLS, scale, drop)


def _in_blocks(q_BHLK, k_BHLK, v_BHLK, segments_BL, scale, drop: WeightDropout) -> jax.Array:
    """Return causal attention of a row to itself, in blocks of queries with the keys up to the last of each."""
    length = q_BHLK.shape[2]
    blocks = max(1, min(MOST_BLOCKS, length // SMALLEST_BLOCK))
    outputs = []
    for number in range(blocks):
        first, end = number * length // blocks, (number + 1) * length // blocks
        own, seen = (None, None) if segments_BL is None else (segments_BL[:, first:end], segments_BL[:, :end])
        q_BHMK, k_BHTK, v_BHTK = q_BHLK[:, :, first:end], k_BHLK[:, :, :end], v_BHLK[:, :, :end]
        mask = attention_mask(end - first, end, True, own, seen, first)
        of_block = drop._replace(first=drop.first + first)
        outputs.append(_attend(q_BHMK, k_BHTK, v_BHTK, mask, None, scale, of_block))
    return outputs[0] if blocks == 1 else jnp.concatenate(outputs, axis=2)


def chosen(backend: Backend) -> Backend:
    """Return the backend that auto stands for on the devices in use."""
    return KERNELS.get(devices.platform(), "xla") if backend == "auto" else backend


def takes_flash(
    automatic: bool, q_BHLK: jax.Array, num_keys: int, query_offset: Any, drop: WeightDropout, bias: bool, **more: Any
) -> bool:
    """Return True if the kernel for TPUs can compute an attention, and log it. See `unsupported` beside the kernel.

    automatic: True if it must agree with `xla` first.
    """
    from jaxlm.nn.flash_attention import unsupported  # Pallas: a tenth of the imports of a command

    if q_BHLK.shape[2] == num_keys == 1:  # models are initialized with one position: no log line
        return False
    if (reason := unsupported(q_BHLK, num_keys, query_offset, drop, bias, **more)) is not None:
        log_once(f"attention is computed by xla, not flash: {reason}")
    elif not automatic or _agrees("flash"):
        log_once("attention is computed by flash")
        return True
    return False


def attention_mask(
    num_queries: int, num_keys: int, causal: bool, segments_BL: Any, segments_BS: Any, query_offset: Any = 0
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


def cudnn(q_BHLK, k_BHLK, v_BHLK, *, causal: bool, segments_BL: jax.Array | None) -> jax.Array:
    """Run cuDNN's flash attention through JAX, self-attention in 16 bits.

    Segments are passed as a mask, (B, 1, L, L): the kernel's own lengths support padding only, not several texts per
    row.
    """
    mask = attention_mask(q_BHLK.shape[2], k_BHLK.shape[2], False, segments_BL, segments_BL)
    q_BLHK, k_BLHK, v_BLHK = (jnp.swapaxes(x, 1, 2) for x in (q_BHLK, k_BHLK, v_BHLK))
    found_BLHK = jax.nn.dot_product_attention(
        q_BLHK, k_BLHK, v_BLHK, mask=mask, is_causal=causal, implementation="cudnn"
    )
    return jnp.swapaxes(found_BLHK, 1, 2)


def _cudnn_lacks(q_BHLK: jax.Array, decoding: bool, dropped: float, plain: bool) -> str | None:
    """Return why cuDNN cannot do it; None if it can."""
    if not plain:
        return "cudnn does not support a bias, a scale or segments of the keys"
    if decoding:
        return "cudnn does not support decoding with a cache"
    if dropped:
        return f"cudnn does not drop weights (model.attention_dropout_rate is {dropped}; the kernel needs 0)"
    if devices.platform() != "gpu":
        return "cudnn needs a GPU"
    if q_BHLK.dtype.itemsize != 2:
        return f"cudnn needs a dtype of 16 bits, got {q_BHLK.dtype}"
    if (capability := devices.compute_capability()) < (8, 0):
        return f"cudnn needs a GPU of compute capability 8.0, and this one has {capability[0]}.{capability[1]}"
    if q_BHLK.shape[2] % 2:
        return f"cudnn needs an even length, got {q_BHLK.shape[2]}"
    if q_BHLK.shape[3] % 8 or q_BHLK.shape[3] > WIDEST_CUDNN_HEAD:
        return f"cudnn needs a head width that is a multiple of 8 up to {WIDEST_CUDNN_HEAD}, got {q_BHLK.shape[3]}"
    return None


def difference_from_xla(backend: Backend) -> float:
    """Return the largest relative difference between a kernel and `xla`, of outputs and gradients, in bfloat16.

    The rows are causal and have two segments, and weights are dropped if the kernel can. Run on the first device of
    this process.
    """
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(3, 2, 2, 256, 32))]
    segments = jnp.asarray(np.repeat([[1, 2], [1, 2]], 128, axis=1), jnp.int32)
    drop = WeightDropout(0.1, jax.random.key(0)) if backend == "flash" else NO_DROPOUT

    def found(backend: Backend) -> list[np.ndarray]:
        def weighted(q, k, v):
            outputs = attend(q, k, v, causal=True, segments_BL=segments, drop=drop, backend=backend)
            return jnp.sum(jnp.sin(outputs.astype(jnp.float32))), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(*inputs)
        return [np.asarray(x, np.float64) for x in (outputs, *gradients)]

    both = zip(found(backend), found("xla"), strict=True)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in both)


# The platform of each kernel, and the packages that decide what it computes.
_DECIDED_BY: dict[Backend, tuple[str, tuple[str, ...]]] = {
    "cudnn": ("gpu", ("jaxlib", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")),
    "flash": ("tpu", ("jaxlib", "libtpu", "jaxlm")),
}


@functools.cache
def _agrees(backend: Backend) -> bool:
    """Return True if a kernel agrees with `xla` on this machine, or if programs are compiled for another one.

    A machine compares them once for each device and versions, and remembers that they agree. With several processes a
    difference is an error, as the others would run another program.
    """
    platform, names = _DECIDED_BY[backend]
    if jax.default_backend() != platform:
        return True
    words = "-".join([jax.local_devices()[0].device_kind, *installed(names).values()]).replace(" ", "-")
    agreed = user_cache() / "attention" / words
    if agreed.exists():
        return True
    with ThreadPoolExecutor(1) as apart:  # a step is being traced, for a mesh that other processes share
        difference = apart.submit(contextvars.copy_context().run, difference_from_xla, backend).result()
    if difference <= KERNEL_TOLERANCE:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next comparison alone
            agreed.parent.mkdir(parents=True, exist_ok=True)
            agreed.write_text(f"{difference}\n")
        return True
    said = f"{backend}'s outputs and gradients differ from xla's by {difference:.1e}"
    if jax.process_count() > 1:
        raise RunError(f"{said} on process {jax.process_index()}: set --execution.attention xla")
    log.warning("attention is computed by xla, not %s: %s", backend, said)
    return False


def _attend(q_BHLK, k_BHSK, v_BHSK, mask, bias_BHLS, scale, drop: WeightDropout) -> jax.Array:
    scores_BHLS = jnp.einsum("bhlk,bhsk->bhls", q_BHLK, k_BHSK, preferred_element_type=jnp.float32)
    scores_BHLS = scores_BHLS * (q_BHLK.shape[-1] ** -0.5 if scale is None else scale)
    if bias_BHLS is not None:
        scores_BHLS = scores_BHLS + bias_BHLS
    if mask is not None:
        scores_BHLS = jnp.where(mask, scores_BHLS, MASKED)
    weights_BHLS = jax.nn.softmax(scores_BHLS, axis=-1).astype(v_BHSK.dtype)
    return jnp.einsum("bhls,bhsk->bhlk", drop.apply(weights_BHLS), v_BHSK)


def transformer_flops(config: Any, length: int, vocabulary: float, seen: float = 0.5) -> float:
    """Return the FLOPs of a training step per token, forward and backward.

    vocabulary: the multiplications of the output layer per token. seen: the fraction of the keys that attention uses;
    by default that of a causal mask.
    """
    per_layer = 4 * config.width**2 + 2 * config.width * config.feed_forward_width
    matrices = config.num_layers * per_layer + vocabulary
    return 6 * matrices + 12 * config.num_layers * config.width * length * seen


class Cache(NamedTuple):
    """Keys and values of the positions decoded so far, for all layers: (N, B, H, S, K) each."""

    k_NBHSK: jax.Array
    v_NBHSK: jax.Array


def empty_cache(config: Any, rows: int, length: int, dtype: Any) -> Cache:
    """Return a cache with room for `length` positions. config: has num_layers, num_heads and width."""
    shape = (config.num_layers, rows, config.num_heads, length, config.width // config.num_heads)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class SelfAttention(nn.Module):
    """Self-attention. One kernel (D, 3, H, K) computes queries, keys and values, as GPT-1's original c_attn.

    config: has width, num_heads and attention_dropout_rate. kernel_init, out_init: initializers of the kernels before
    and after the attention.
    """

    config: Any
    execution: Execution
    kernel_init: Any
    out_init: Any
    causal: bool = True

    @nn.compact
    def __call__(
        self, x_BLD: Any, segments_BL: Any, key: Any, cache: Cache | None = None, first_B: Any = None
    ) -> tuple[jax.Array, Cache | None]:
        """Return the outputs (B, L, D), and the cache with the keys and values of these tokens.

        key: of the dropout of the weights; None: evaluation. cache: of this layer, (B, H, S, K) each, for decoding.
        first_B: the position of the first token of each row in the cache.
        """
        config = self.config
        d, h = config.width, config.num_heads
        zeros = nn.initializers.zeros_init()
        names_in, names_out = ("width", "qkv", "heads", "head_width"), ("heads", "head_width_in", "whole_width")
        kernel_in = self.param("qkv_kernel", with_axes(self.kernel_init, names_in), (d, 3, h, d // h))
        bias_in = self.param("qkv_bias", with_axes(zeros, names_in[1:]), (3, h, d // h))
        kernel_out = self.param("out_kernel", with_axes(self.out_init, names_out), (h, d // h, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))

        names = names_in[:1] + names_in[2:]
        q_BHLK, k_BHLK, v_BHLK = project_parts_to_heads(x_BLD, kernel_in, bias_in, names, self.execution)
        if cache is not None:
            cache = Cache(put(cache.k_NBHSK, k_BHLK, first_B), put(cache.v_NBHSK, v_BHLK, first_B))
            k_BHLK, v_BHLK = cache.k_NBHSK, cache.v_NBHSK
        a_BHLK = attend(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            causal=self.causal,
            segments_BL=segments_BL,
            query_offset=0 if cache is None else first_B,
            drop=WeightDropout(config.attention_dropout_rate, key),
            backend=self.execution.attention_backend(config.num_layers),
        )
        return project_heads(a_BHLK, kernel_out, bias_out, names_out, self.execution), cache


def put(kept_BHSK: jax.Array, new_BHLK: jax.Array, first_B: jax.Array) -> jax.Array:
    """Return the cache of a layer with new keys or values from position first_B of each row on."""

    def put_row(kept_HSK, new_HLK, first):
        return jax.lax.dynamic_update_slice(kept_HSK, new_HLK.astype(kept_HSK.dtype), (0, first, 0))

    return jax.vmap(put_row)(kept_BHSK, new_BHLK, first_B)


class FeedForward(nn.Module):
    """Two layers with an activation between them, and dropout after it.

    config: has width and feed_forward_width. kernel_init, out_init: initializers of the two kernels.
    """

    config: Any
    execution: Execution
    activation: Activation
    kernel_init: Any
    out_init: Any
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x_BLD: Any, key: Any = None) -> jax.Array:
        """Return the outputs (B, L, D). key: of the dropout; None: evaluation."""
        d, f = self.config.width, self.config.feed_forward_width
        zeros = nn.initializers.zeros_init()
        names_in, names_out = ("width", "feed_forward"), ("feed_forward_in", "whole_width")
        kernel_in = self.param("in_kernel", with_axes(self.kernel_init, names_in), (d, f))
        bias_in = self.param("in_bias", with_axes(zeros, ("feed_forward",)), (f,))
        kernel_out = self.param("out_kernel", with_axes(self.out_init, names_out), (f, d))
        bias_out = self.param("out_bias", with_axes(zeros, ("norm",)), (d,))
        h_BLF = activate(project(x_BLD, kernel_in, bias_in, names_in, self.execution), self.activation)
        h_BLF = dropout(h_BLF, self.dropout_rate, key)
        return project(h_BLF, kernel_out, bias_out, names_out, self.execution)


def _is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for the forward pass of cuDNN's attention, whose outputs its backward pass reads."""
    return str(primitive).startswith("dot_product_attention_fwd")


_policies = jax.checkpoint_policies
_KEEP_PRODUCTS = functools.reduce(
    _policies.save_from_both_policies,
    (_policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(SAVED), _is_cudnn),
)


def stacked(
    block: Any,
    config: Any,
    execution: Execution,
    *,
    in_axes: tuple,
    static: tuple[int, ...],
    name: str | None = None,
    num_layers: int | None = None,
) -> Any:
    """Return a module of the num_layers blocks of a config, unrolled and rematerialized as `execution` selects.

    num_layers: those of the stack, if the config has several.

    The block takes the states first and returns (states, outputs that are stacked over the layers). in_axes: for each
    further argument, 0 if every layer has its own and nn.broadcast if all share it. static: the arguments, counted with
    the module as 0, that are Python values.
    """
    num_layers = config.num_layers if num_layers is None else num_layers
    unroll = min(execution.layers_per_iteration(num_layers), num_layers)
    if execution.remat in ("dots", "full"):
        policy = _KEEP_PRODUCTS if execution.remat == "dots" else None
        # Without a loop, XLA finds that the forward pass computed the same values, and keeps them. Only on GPUs is it
        # prevented: on a TPU that costs 20 of 79 ms of GPT-1's step, by estimates, for 12 % of the memory.
        prevented = unroll == num_layers and devices.platform() == "gpu"
        block = nn.remat(block, prevent_cse=prevented, policy=policy, static_argnums=static)
    blocks = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=in_axes,
        length=num_layers,
        unroll=unroll,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return blocks(config, execution, name=name)
