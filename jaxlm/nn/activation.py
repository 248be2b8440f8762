"""Activation functions by their names in configs."""

from typing import Literal

import jax

from jaxlm.distributed import devices

ActivationName = Literal["gelu_tanh", "gelu_erf"]


def activate(x: jax.Array, name: ActivationName) -> jax.Array:
    """Return the GELU of each element (Hendrycks and Gimpel, 2016), in its tanh form or exactly, by the error function.

    google-research/bert and GPT-1 use the tanh form, Hugging Face's BERT the exact one; they differ by up to 5e-4.
    """
    approximate = name == "gelu_tanh"
    if devices.platform() != "cpu":
        return jax.nn.gelu(x, approximate=approximate)
    # The barriers keep XLA from fusing the GELU into the operands of the surrounding products, where a CPU recomputes
    # it many times; on a TPU that costs less than a separate pass.
    return jax.lax.optimization_barrier(jax.nn.gelu(jax.lax.optimization_barrier(x), approximate=approximate))
