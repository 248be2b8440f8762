"""The recurrence of an LSTM: its written backward pass, and its projection as torch.nn.LSTM has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.nn.recurrence import Clips, LSTMState, lstm

LENGTH, ROWS, UNITS, PROJECTED = 6, 3, 4, 5


def plain_lstm(x_LBG, kernel, start, real_LB, reset_LB, projection, mask, clips, reverse):
    """The same equations, differentiated by JAX through the scan, which reads a reversed text forwards."""

    def step(state, inputs):
        x, real, reset = inputs
        h, c = (jnp.where(reset[:, None], 0.0, part) for part in state)
        i, f, g, o = jnp.split(x + h @ kernel, 4, axis=-1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        new_c = jnp.clip(new_c, -clips.cell, clips.cell) if clips.cell else new_c
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        if projection is not None:
            new_h = new_h @ projection
            new_h = jnp.clip(new_h, -clips.projection, clips.projection) if clips.projection else new_h
        new_h = new_h if mask is None else new_h * mask
        after = LSTMState(jnp.where(real[:, None], new_h, h), jnp.where(real[:, None], new_c, c))
        return after, jnp.where(real[:, None], new_h, 0.0)

    rows = [x[::-1] if reverse else x for x in (x_LBG, real_LB, reset_LB)]
    end, h_LBP = jax.lax.scan(step, start, tuple(rows))
    return (h_LBP[::-1] if reverse else h_LBP), end


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("clips", [None, Clips(), Clips(0.6, 0.5)], ids=["unprojected", "projected", "clipped"])
def test_the_written_backward_pass_is_the_derivative(clips, reverse):
    """Fails when a gate's derivative, a clip, the mask, padding or a reset is wrong, or a position is read too late."""
    rng = np.random.default_rng(0 if clips is None else 1)
    states = UNITS if clips is None else PROJECTED

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, kernel = normal(LENGTH, ROWS, 4 * UNITS), normal(states, 4 * UNITS)
    start = LSTMState(normal(ROWS, states), normal(ROWS, UNITS))
    projection = None if clips is None else normal(UNITS, PROJECTED)
    mask = None if clips is None else jnp.asarray(rng.integers(0, 2, (ROWS, states)) * 2.0, jnp.float32)
    real = jnp.asarray(rng.random((LENGTH, ROWS)) > 0.3)
    reset = jnp.asarray(rng.random((LENGTH, ROWS)) > 0.7) & real
    of_states, of_end, of_cell = normal(LENGTH, ROWS, states), normal(ROWS, states), normal(ROWS, UNITS)

    def loss_by(function):
        def loss(x, kernel, start, projection):
            h, end = function(x, kernel, start, real, reset, projection, mask, clips or Clips(), reverse)
            return jnp.sum(of_states * h) + jnp.sum(of_end * end.h) + jnp.sum(of_cell * end.c)

        return jax.value_and_grad(loss, (0, 1, 2, 3))(x, kernel, start, projection)

    found, wanted = map(jax.tree.leaves, (loss_by(lstm), loss_by(plain_lstm)))
    assert len(found) == len(wanted) == (5 if clips is None else 6)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=3e-6)
    assert all(np.abs(leaf).max() > 0.01 for leaf in wanted)


def test_the_projection_is_that_of_pytorch():
    """torch.nn.LSTM(proj_size): fails when a state is read before its projection, or a kernel is transposed."""
    torch = pytest.importorskip("torch", reason="needs PyTorch, the extra [parity]")
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(3, 6, num_layers=1, proj_size=PROJECTED)
    x = torch.randn(LENGTH, ROWS, 3, requires_grad=True)
    h_LBP, (end_h, end_c) = theirs(x)
    (h_LBP.pow(2).sum() + end_c.sum()).backward()
    kernels = {name: jnp.asarray(value.detach().numpy()) for name, value in theirs.named_parameters()}
    never = jnp.zeros((LENGTH, ROWS), bool)
    start = LSTMState(jnp.zeros((ROWS, PROJECTED)), jnp.zeros((ROWS, 6)))

    def outputs(x, kernels):
        x_LBG = x @ kernels["weight_ih_l0"].T + kernels["bias_ih_l0"] + kernels["bias_hh_l0"]
        return lstm(x_LBG, kernels["weight_hh_l0"].T, start, ~never, never, kernels["weight_hr_l0"].T)

    def loss(x, kernels):
        h, end = outputs(x, kernels)
        return jnp.sum(h**2) + jnp.sum(end.c)

    here = jnp.asarray(x.detach().numpy())
    h, end = outputs(here, kernels)
    np.testing.assert_allclose(h, h_LBP.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(end.h, end_h[0].detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(end.c, end_c[0].detach().numpy(), atol=1e-6)
    dx, dkernels = jax.grad(loss, (0, 1))(here, kernels)
    np.testing.assert_allclose(dx, x.grad.numpy(), atol=2e-6)
    for name, value in theirs.named_parameters():
        np.testing.assert_allclose(dkernels[name], value.grad.numpy(), rtol=1e-5, atol=5e-6, err_msg=name)
