"""Activation functions by the name that a config gives them."""

from typing import Literal

import jax

from jaxlm.distributed import devices

ActivationName = Literal["gelu_tanh", "gelu_erf"]


def activate(x: jax.Array, name: ActivationName) -> jax.Array:
    """GELU of each element (Hendrycks and Gimpel, 2016): its tanh form, or the exact one by the error function.

    google-research/bert and GPT-1 have the tanh form, Hugging Face's BERT the exact one; they differ by up to 5e-4.
    """
    approximate = name == "gelu_tanh"
    if devices.platform() != "cpu":
        return jax.nn.gelu(x, approximate=approximate)
    # Barriers keep XLA from fusing the GELU into the operands of the products around it, where a CPU makes it again
    # and again; on a TPU that costs less than a pass of its own.
    return jax.lax.optimization_barrier(jax.nn.gelu(jax.lax.optimization_barrier(x), approximate=approximate))
