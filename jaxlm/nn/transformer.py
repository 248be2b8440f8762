"""Parts of Transformers that families share: self-attention with its cache, the feed-forward, and the layer loop.

The blocks themselves differ in norms, residuals and dropout, and each family writes its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxlm.distributed.mesh import with_axes
from jaxlm.nn.attention import SAVED, attend
from jaxlm.nn.config import Execution
from jaxlm.nn.linear import project, project_heads, project_to_heads
from jaxlm.nn.pointwise import Activation, activate, dropout


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

        q_BHLK, k_BHLK, v_BHLK = (
            project_to_heads(x_BLD, kernel_in[:, part], bias_in[part], names_in[:1] + names_in[2:], self.execution)
            for part in range(3)
        )
        if cache is not None:
            cache = Cache(_put(cache.k_NBHSK, k_BHLK, first_B), _put(cache.v_NBHSK, v_BHLK, first_B))
            k_BHLK, v_BHLK = cache.k_NBHSK, cache.v_NBHSK
        a_BHLK = attend(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            causal=self.causal,
            segments_BL=segments_BL,
            query_offset=0 if cache is None else first_B,
            dropout_rate=config.attention_dropout_rate,
            dropout_key=key,
            backend=self.execution.attention,
        )
        return project_heads(a_BHLK, kernel_out, bias_out, names_out, self.execution), cache


def _put(kept_BHSK: jax.Array, new_BHLK: jax.Array, first_B: jax.Array) -> jax.Array:
    """Return the cache of a layer with new keys or values from position first_B of each row on."""

    def put(kept_HSK, new_HLK, first):
        return jax.lax.dynamic_update_slice(kept_HSK, new_HLK.astype(kept_HSK.dtype), (0, first, 0))

    return jax.vmap(put)(kept_BHSK, new_BHLK, first_B)


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


_POLICIES = jax.checkpoint_policies
_SAVED = {
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(SAVED)
    ),
    "full": None,
}


def stacked(
    block: type[nn.Module], num_layers: int, execution: Execution, *, in_axes: tuple[Any, ...], static: tuple[int, ...]
) -> Any:
    """Return the module class of `num_layers` blocks, unrolled and rematerialized as `execution` selects.

    The block takes the states first and returns (states, outputs that are stacked over the layers). in_axes: for each
    further argument, 0 if every layer has its own and nn.broadcast if all share it. static: the arguments, counted with
    the module as 0, that are Python values.
    """
    if execution.remat != "none":
        block = nn.remat(block, prevent_cse=False, policy=_SAVED[execution.remat], static_argnums=static)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=in_axes,
        length=num_layers,
        unroll=execution.layers_per_iteration(num_layers),
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
