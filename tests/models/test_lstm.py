"""The LSTM language model: what its state remembers.

Its recurrence is tested in tests/nn/test_recurrence.py. Parity with torch.nn.LSTM is in test_lstm_parity, whole runs in
test_family_runs.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import linen as nn

from jaxlm.distributed.mesh import MeshConfig, make_mesh, to_devices, use_mesh
from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.lstm import GPT1_LSTM, LSTMConfig
from jaxlm.models.lstm.model import empty_state
from jaxlm.models.model import Inputs, Model
from jaxlm.training.config import FinetuneConfig

pytestmark = pytest.mark.usefixtures("two_devices")

TOY = LSTMConfig(vocab_size=31, num_layers=2, width=8, units=12, dropout_rate=0.0, embedding_dropout_rate=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return build(TOY)


@pytest.fixture(scope="module")
def params(model):
    return {"backbone": nn.unbox(model.init(jax.random.key(3)))}


@pytest.fixture(scope="module")
def forward(model):
    """The model, compiled: operation by operation it takes far longer."""
    return jax.jit(lambda params, inputs, carry=None: model(params, inputs, carry))


def ids_of(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(rows + length).integers(TOY.vocab_size, size=(rows, length)).astype(np.int32)


def test_two_halves_with_a_carried_state_are_the_whole(forward, params):
    """Fails when the state of any layer is lost, or taken from another position than the last."""
    ids = ids_of(3, 10)
    whole = forward(params, Inputs(ids, ids), empty_state(TOY, 3))
    first = forward(params, Inputs(ids[:, :4], ids[:, :4]), empty_state(TOY, 3))
    second = forward(params, Inputs(ids[:, 4:], ids[:, 4:]), first.carry)
    np.testing.assert_allclose(np.concatenate([first.states, second.states], 1), whole.states, atol=1e-6)
    for found, wanted in zip(second.carry, whole.carry, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert forward(params, Inputs(ids, ids)).carry is None


def test_padding_keeps_the_state_and_documents_of_a_row_are_apart(forward, params):
    """Fails when padding changes the state, or a packed document depends on the one before it."""
    ids = ids_of(2, 9)
    segments = np.array([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9], np.int32)
    packed = forward(params, Inputs(ids, ids, segments), empty_state(TOY, 2))
    for first, end in ((0, 4), (4, 7)):
        alone = forward(params, Inputs(ids[:1, first:end], ids[:1, first:end]), empty_state(TOY, 1))
        np.testing.assert_allclose(packed.states[0, first:end], alone.states[0], atol=1e-6)
    np.testing.assert_allclose(packed.carry.c[:, 0], alone.carry.c[:, 0], atol=1e-6)


def test_sizes_and_initial_values(params):
    """Fails when GPT-1's ablation has other sizes, the forget bias is not 1, or a kernel another range."""
    boxed = jax.eval_shape(build(GPT1_LSTM).init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nn.unbox(boxed)))
    assert count == 40_478 * 768 + (768 + 2048) * 8192 + 8192 + 2048 * 768 + 768
    layer = params["backbone"]["layer_0"]
    gates = np.split(np.asarray(layer["bias"]), 4)
    assert (gates[1] == 1).all() and all((gate == 0).all() for gate in (gates[0], gates[2], gates[3]))
    for name in ("in_kernel", "state_kernel"):
        assert 0.9 * 12**-0.5 < np.abs(layer[name]).max() <= 12**-0.5


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_any_mesh_gives_the_same_states(model, forward, params, sizes):
    """Fails when the state, or a product with a sharded kernel, depends on how rows and kernels are laid out."""
    mesh, ids = make_mesh(MeshConfig(*sizes)), ids_of(8, 5)
    wanted = forward(params, Inputs(ids, ids), empty_state(TOY, 8))
    with use_mesh(mesh):
        inputs = to_devices(Inputs(ids, ids), mesh, 8)
        found = jax.jit(lambda params, inputs: model(params, inputs, empty_state(TOY, 8)))(params, inputs)
    np.testing.assert_allclose(found.states, wanted.states, atol=1e-6)
    np.testing.assert_allclose(found.carry.h, wanted.carry.h, atol=1e-6)


def test_a_config_refuses_what_no_model_has():
    """Fails when a size below 1 or a rate of 1 reaches the model."""
    with pytest.raises(InputError, match="transfer_layers .* must be left out for a recurrent"):
        FinetuneConfig(model=TOY, transfer_layers=1).check()
    for field, value in (("units", 0), ("num_layers", 0), ("dropout_rate", 1.0)):
        with pytest.raises(InputError, match=f"model.{field} must be .*got {value}"):
            dataclasses.replace(TOY, **{field: value}).check()
