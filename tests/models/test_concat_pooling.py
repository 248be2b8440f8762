"""ULMFiT's head: pooling without padding, batch norm by PyTorch's formulas, and the whole head against PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.heads.concat_pooling import ConcatPoolingHead, concat_pooled
from jaxlm.nn.layers import STATISTICS, SUMS, moved

E, C, L, D = 4, 2, 5, 3
LENGTHS = np.array([[5, 1], [3, 0], [2, 4], [0, 0]], np.int32)


def test_pooling_leaves_padding_out():
    """Fails when a maximum or a mean has padding in it, the last state is that of the row's end, or absent is not 0."""
    h = np.random.default_rng(0).standard_normal((E, C, L, D)).astype(np.float32) - 3  # padding of 0 would be the most
    wanted = np.zeros((E, C, 3 * D), np.float32)
    for e, c in np.ndindex(E, C):
        if real := LENGTHS[e, c]:
            rows = h[e, c, :real]
            wanted[e, c] = np.concatenate([rows[-1], rows.max(axis=0), rows.mean(axis=0)])
    np.testing.assert_allclose(concat_pooled(h, LENGTHS), wanted, rtol=1e-6, atol=1e-6)
    spoilt = np.where((np.arange(L) < LENGTHS[..., None])[..., None], h, np.nan)
    np.testing.assert_array_equal(concat_pooled(spoilt, LENGTHS), concat_pooled(h, LENGTHS))
    gradient = jax.grad(lambda h: jnp.sum(concat_pooled(h, LENGTHS) ** 2))(h)
    assert np.isfinite(gradient).all() and not gradient[3].any() and not gradient[0, 1, 1:].any()


def make(kind: str, rng) -> tuple[ConcatPoolingHead, dict]:
    """A head without dropout and variables that are not those of its beginning."""
    head = ConcatPoolingHead(kind, 1 if kind == "choice" else 3, 0.0, hidden=6, second_dropout_rate=0.0)
    shapes = jax.eval_shape(
        lambda: head.init(jax.random.key(0), jnp.zeros((1, 1, 3 * D)), jnp.ones((1, 1), bool), train=False)
    )
    unboxed = {name: jax.tree.map(lambda box: box.value, part, is_leaf=_is_box) for name, part in shapes.items()}
    drawn = jax.tree.map(lambda x: rng.uniform(0.5, 1.5, x.shape).astype(np.float32), unboxed)
    return head, drawn


def _is_box(leaf) -> bool:
    return hasattr(leaf, "names")


def by_hand(variables: dict, x: np.ndarray, train: bool) -> tuple[np.ndarray, dict]:
    """The scores of rows in float64, and the running statistics after them, by the formulas of BatchNorm1d."""
    params, running = variables["params"], variables[STATISTICS]
    after = {}

    def norm(name, x):
        mean, variance = (x.mean(0), x.var(0)) if train else (running[name]["mean"], running[name]["variance"])
        unbiased = {"mean": x.mean(0), "variance": x.var(0, ddof=1)}
        after[name] = {key: 0.9 * running[name][key] + 0.1 * unbiased[key] for key in unbiased}
        return (x - mean) / np.sqrt(variance + 1e-5) * params[name]["scale"] + params[name]["bias"]

    hidden = norm("norm", x.astype(np.float64)) @ params["hidden_kernel"] + params["hidden_bias"]
    return norm("hidden_norm", np.maximum(hidden, 0)) @ params["kernel"] + params["bias"], after


@pytest.mark.parametrize("kind", ["classification", "choice"])
def test_the_head_is_that_of_the_formulas(kind):
    """Fails when padding rows or absent choices are in a statistic, a variance is of the wrong kind, momentum is
    exchanged, or the vectors of an example's sequences are not summed.
    """
    rng = np.random.default_rng(3)
    head, variables = make(kind, rng)
    x = rng.standard_normal((7, C, 3 * D)).astype(np.float32)
    real = np.ones((7, C), bool)
    real[5:] = False
    if kind == "choice":
        real[1, 1] = False
    rows = x[real] if kind == "choice" else x[:5].sum(axis=1)
    for train in (True, False):
        wanted, after = by_hand(variables, rows, train)
        found, sums = head.apply(variables, x, real, train=train, rngs={"dropout": jax.random.key(0)}, mutable=[SUMS])
        found = found[real] if kind == "choice" else found[:5]
        np.testing.assert_allclose(found, wanted[:, 0] if kind == "choice" else wanted, rtol=2e-5, atol=2e-5)
        assert bool(sums) == train
        if train:
            statistics = moved(variables[STATISTICS], sums[SUMS])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), statistics, after)
            other = np.where(real[..., None], x, 1e6)  # rows that do not count
            again, same = head.apply(
                variables, other, real, train=True, rngs={"dropout": jax.random.key(0)}, mutable=[SUMS]
            )
            np.testing.assert_array_equal(again[real] if kind == "choice" else again[:5], found)
            jax.tree.map(np.testing.assert_array_equal, same, sums)


def test_a_single_row_moves_no_statistic():
    """Fails when a batch of one row, whose variance PyTorch refuses, or of none divides by 0."""
    rng = np.random.default_rng(4)
    head, variables = make("classification", rng)
    x = rng.standard_normal((2, 1, 3 * D)).astype(np.float32)
    for count in (0, 1):
        real = np.arange(2)[:, None] < count
        found, sums = head.apply(variables, x, real, train=True, rngs={"dropout": jax.random.key(0)}, mutable=[SUMS])
        assert np.isfinite(found).all()
        jax.tree.map(np.testing.assert_array_equal, moved(variables[STATISTICS], sums[SUMS]), variables[STATISTICS])


@pytest.mark.parity
def test_the_head_is_pytorchs():
    """Scores, gradients and three steps of running statistics."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    head, variables = make("classification", rng)
    params, running = variables["params"], variables[STATISTICS]
    norms = [torch.nn.BatchNorm1d(3 * D), torch.nn.BatchNorm1d(6)]
    layers = [torch.nn.Linear(3 * D, 6), torch.nn.Linear(6, 3)]
    theirs = torch.nn.Sequential(norms[0], layers[0], torch.nn.ReLU(), norms[1], layers[1])
    with torch.no_grad():
        for norm, name in zip(norms, ("norm", "hidden_norm"), strict=True):
            norm.weight.copy_(torch.tensor(params[name]["scale"]))
            norm.bias.copy_(torch.tensor(params[name]["bias"]))
            norm.running_mean.copy_(torch.tensor(running[name]["mean"]))
            norm.running_var.copy_(torch.tensor(running[name]["variance"]))
        for layer, name in zip(layers, ("hidden_", ""), strict=True):
            layer.weight.copy_(torch.tensor(params[f"{name}kernel"].T))
            layer.bias.copy_(torch.tensor(params[f"{name}bias"]))
    real = np.arange(8)[:, None] < 6

    def loss(params, x, statistics):
        scores, sums = head.apply(
            {"params": params, STATISTICS: statistics}, x, real, train=True, rngs={"dropout": jax.random.key(0)},
            mutable=[SUMS],
        )  # fmt: skip
        return jnp.sum(jnp.sin(scores[:6])), sums[SUMS]

    for _ in range(3):
        x = rng.standard_normal((8, 1, 3 * D)).astype(np.float32)
        given = torch.tensor(x[:6, 0], requires_grad=True)
        theirs.zero_grad()
        torch.sin(theirs(given)).sum().backward()
        gradient, sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x, running)
        running = moved(running, sums)
        np.testing.assert_allclose(gradient[1][:6, 0], given.grad.numpy(), rtol=1e-4, atol=1e-5)
        for name, leaf in (("hidden_kernel", layers[0].weight), ("kernel", layers[1].weight)):
            np.testing.assert_allclose(gradient[0][name], leaf.grad.numpy().T, rtol=1e-4, atol=1e-5)
        for norm, name in zip(norms, ("norm", "hidden_norm"), strict=True):
            np.testing.assert_allclose(gradient[0][name]["scale"], norm.weight.grad.numpy(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(running[name]["mean"], norm.running_mean.numpy(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(running[name]["variance"], norm.running_var.numpy(), rtol=1e-4, atol=1e-5)
    theirs.eval()
    found = head.apply({"params": params, STATISTICS: running}, x, real, train=False)
    np.testing.assert_allclose(found, theirs(torch.tensor(x[:, 0])).detach().numpy(), rtol=1e-4, atol=1e-5)
