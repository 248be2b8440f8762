"""The BiLSTM over words against PyTorch's Embedding, Conv1d and packed LSTM: the states of all layers, the gradient.

The frozen twin (tests/golden/bilstm_parity.npz, written by tests/parity/freeze_bilstm.py in float64) runs everywhere;
with the extra [parity] the same is computed live on random sizes. A wrong order of gates, a transposed kernel, a
backward direction that reads padding, an activation before its bias, or a projection that is not carried fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import bilstm_case as case
from parity.check import WHY, assert_frozen, frozen

from jaxlm.models import build
from jaxlm.models.bilstm import NUM_CHARACTERS, BiLSTMConfig
from jaxlm.models.model import Inputs
from jaxlm.text import characters


def test_frozen_twin():
    sizes = case.Sizes()
    check(sizes, case.make_tree(sizes, seed=1), case.make_rows(sizes, seed=2), frozen("bilstm"))


@pytest.mark.parity
@pytest.mark.parametrize("projected", [True, False])
def test_pytorch_live_at_other_sizes(projected):
    pytest.importorskip("torch", reason=WHY)
    from parity import bilstm_torch

    units = (5, 9, 4) if projected else (3, 3)
    sizes = case.Sizes(2, 4, ((2, 3), (5, 1), (4, 2)), units, 6, projected, rows=3, length=9)
    tree, rows = case.make_tree(sizes, seed=3), case.make_rows(sizes, seed=4)
    check(sizes, tree, rows, bilstm_torch.answers(sizes, tree, rows))


@pytest.mark.parity
def test_the_script_gives_the_frozen_numbers():
    """Fails when the statement in tests/parity was changed and the file was not written again."""
    pytest.importorskip("torch", reason=WHY)
    from parity import bilstm_torch

    sizes = case.Sizes()
    found = bilstm_torch.answers(sizes, case.make_tree(sizes, seed=1), case.make_rows(sizes, seed=2))
    assert_frozen("bilstm", found)


def test_models_and_rows_have_the_same_number_of_characters():
    assert NUM_CHARACTERS == characters.NUM_CHARACTERS == case.NUM_CHARACTERS


def check(sizes, tree, rows, expected):
    config = BiLSTMConfig(**case.fields_of(sizes))
    config.check()
    model = build(config)
    positions = np.broadcast_to(np.arange(sizes.length), rows["ids"].shape)
    segments = (positions < rows["lengths"][:, None]).astype(np.int32)
    inputs = Inputs(rows["ids"], positions, segments, characters=rows["characters"])

    @jax.jit
    def layers(backbone):
        return model({"backbone": backbone}, inputs, layers=True).layers

    @jax.jit
    @jax.grad
    def gradient(backbone):
        return jnp.sum(model({"backbone": backbone}, inputs).states * rows["factors"])

    for number, found in enumerate(layers(tree)[1:]):
        theirs = expected["states"][f"layer_{number}"]
        np.testing.assert_allclose(found[..., : sizes.width], theirs, atol=1e-5, err_msg=f"layer {number}")
        assert not np.any(found[..., sizes.width :])
    for name, found in case.to_flat(gradient(tree)).items():
        np.testing.assert_allclose(found, expected["gradient"][name], rtol=1e-4, atol=1e-4, err_msg=name)
