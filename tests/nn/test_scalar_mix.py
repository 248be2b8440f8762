"""The mix of layers against the code of ELMo's authors, `weight_layers` of bilm-tf, executed in TensorFlow.

Its numbers, tests/golden/scalar_mix_parity.npz, were written by tests/parity/freeze_scalar_mix.py. A mean for each
position or row, padding in the mean or the variance, a variance of all layers together, a penalty on the weights after
the softmax, or half of it, fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import scalar_mix_case as case
from parity.check import frozen

from jaxlm.nn.scalar_mix import ScalarMix, mix_penalty, normed_over_batch


@pytest.mark.parametrize("name", ["plain", "normed"])
def test_a_mix_its_penalty_and_their_gradients(name):
    given, expected = case.make(seed=1), frozen("scalar_mix")[name]

    def mixed(params, layers):
        of = normed_over_batch(layers, jnp.asarray(given["mask"])) if name == "normed" else layers
        return ScalarMix().apply({"params": params}, of)

    def loss(params, layers):
        tree = {"backbone": {"embeddings": {"tokens": jnp.ones(3), "mix_0": params}}, "head": {"weights": jnp.ones(2)}}
        return jnp.sum(mixed(params, layers) * given["factors"]) + case.PENALTY * mix_penalty(tree)

    params = {part: jnp.asarray(given[part]) for part in ("weights", "gamma")}
    np.testing.assert_allclose(mixed(params, given["layers"]), expected["output"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(case.PENALTY * mix_penalty({"mix": params}), expected["penalty"], rtol=1e-6)
    of_params, of_layers = jax.grad(loss, argnums=(0, 1))(params, given["layers"])
    for part, found in (of_params | {"layers": of_layers}).items():
        np.testing.assert_allclose(found, expected[part], rtol=1e-4, atol=2e-5, err_msg=part)


def test_rows_of_padding_alone_give_numbers():
    """Fails when a batch without a real position divides by 0, as the rows of absent examples may be."""
    found = normed_over_batch(jnp.ones((2, 3, 4, 5)), jnp.zeros((3, 4), bool))
    assert np.all(np.isfinite(found))
