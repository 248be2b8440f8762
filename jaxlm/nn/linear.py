"""Matrix products with the weights cast and gathered where they are used.

Under fsdp a weight is stored cut along its width. It is cast to the compute dtype first and gathered then, inside the
layer that uses it, so that what travels is half as wide and no layer's weights outlive the layer.
"""

import jax
import jax.numpy as jnp

from jaxlm.nn.partition import constrain


def gathered(weight: jax.Array, dtype: jnp.dtype, names: tuple[str | None, ...]) -> jax.Array:
    """`weight` in `dtype`, whole along its `width` axis on every device; `names` are its logical axes."""
    names = tuple("gathered" if name == "width" else name for name in names)
    return constrain(weight.astype(dtype), names)


def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x (..., D) times kernel (D, ...) plus bias (...): the leading axes of x, then the trailing axes of the kernel.

    Both are flattened to two dimensions for the product, which XLA's CPU backend runs several percent faster.
    """
    d, *outer = kernel.shape
    y = jnp.dot(x.reshape(-1, d), kernel.reshape(d, -1))
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape(-1)
    return y.reshape(*x.shape[:-1], *outer)
