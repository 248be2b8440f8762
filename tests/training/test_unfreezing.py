"""Gradual unfreezing: a plain loop of optax with a new optimizer per stage, bits of what has not begun, one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_layer_groups import LAYERS, SIZES, STACK, boxed, random_tree
from toy import assert_trees_same

from jaxlm.objectives.objective import Objective
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.optimizer_variants import layer_groups
from jaxlm.training.step import make_train_step, new_state, settings_of

pytestmark = pytest.mark.usefixtures("room_for_programs")

ROWS, EPOCH, DECAY = 4, 2, 1.5
STEPS = EPOCH * (LAYERS + 3)  # one epoch more than there are stages


def objective() -> Objective:
    """A loss that is linear in the parameters: its gradient is the mean of the batch, a tree of (ROWS, …)."""

    def sums(params, batch, carry, key):
        products = jax.tree.map(lambda p, x: jnp.sum(p * x), params, batch)
        return {"product": jax.tree.reduce(jnp.add, products)}, carry

    return Objective({"product": 1.0}, lambda batch: {"product": jnp.float32(ROWS)}, sums)


def gradients(count: int) -> list:
    rng = np.random.default_rng(5)
    return [jax.tree.map(lambda *rows: np.stack(rows), *[random_tree(rng) for _ in range(ROWS)]) for _ in range(count)]


def trained(config, micro_batches=1, start=None, first=0):
    """The states before and after each step, and the metrics of each."""
    optimizer = make_optimizer(config, boxed(), layer_groups(STACK, SIZES, decay=DECAY, gradual=True))
    step = jax.jit(make_train_step(objective(), optimizer, micro_batches=micro_batches, stacks=("blocks",)))
    settings = settings_of(config, STEPS, stage_steps=EPOCH)
    params = random_tree(np.random.default_rng(4))
    params["backbone"]["embeddings"]["tokens"][0] = -0.0
    state = new_state(jax.tree.map(jnp.asarray, params), optimizer, 0) if start is None else start
    states, metrics = [state], []
    for batch in gradients(STEPS)[first:]:
        state, found = step(state, batch, settings)
        states.append(state)
        metrics.append(jax.device_get(found))
    assert step._cache_size() == 1  # the stage is data
    return states, metrics


def layers_of(tree) -> dict[tuple[str, int], np.ndarray]:
    """The leaves by name and depth, stacked ones by layer: 0 is the embeddings, LAYERS + 1 what is above the layers."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "blocks" in name:
            found |= {(name, layer + 1): np.asarray(leaf[layer]) for layer in range(LAYERS)}
        else:
            found[name, 0 if "embeddings" in name else LAYERS + 1] = np.asarray(leaf)
    return found


def test_stages_are_new_optimizers_over_more_layers():
    """Fails when a stage keeps moments or the count of the one before, when a group that has not begun counts in the
    clip or is decayed, or when a layer begins in another epoch.
    """
    config = OptimizerConfig(warmup=0, decay="constant", peak_lr=0.03, weight_decay=0.2, clip_norm=0.7, eps=1e-3)
    states, metrics = trained(config)
    params, state = layers_of(states[0].params), None

    def rates(updates, _, params=None):
        return {key: -0.03 / DECAY ** (LAYERS + 1 - key[1]) * u for key, u in updates.items()}

    decayed = lambda tree: {key: key[0].endswith(("kernel", "tokens")) for key in tree}  # noqa: E731
    plain = optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.scale_by_adam(eps=1e-3),
        optax.add_decayed_weights(0.2, mask=decayed),
        optax.stateless(lambda updates, params: rates(updates, None)),
    )
    for number, batch in enumerate(gradients(STEPS)):
        stage = min(number // EPOCH, LAYERS + 1)
        begun = {key: p for key, p in params.items() if key[1] >= LAYERS + 1 - stage}
        gradient = layers_of(jax.tree.map(lambda x: x.mean(axis=0), batch))
        gradient = {key: gradient[key] for key in begun}
        if number == stage * EPOCH:
            state = plain.init(begun)
        updates, state = plain.update(gradient, state, begun)
        params = params | optax.apply_updates(begun, updates)
        found, former = layers_of(states[number + 1].params), layers_of(states[number].params)
        for key, p in params.items():
            np.testing.assert_allclose(found[key], p, rtol=2e-5, atol=2e-6, err_msg=f"step {number}, {key}")
            same = found[key].tobytes() == former[key].tobytes()
            assert same == (key not in begun), (number, key)
        assert metrics[number]["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
        norms = metrics[number]["update_norm"]
        moving = [norms["embeddings"] > 0, *(norms["blocks"] > 0), norms["head"] > 0]
        assert moving == [depth >= LAYERS + 1 - stage for depth in range(LAYERS + 2)], number
    assert int(states[-1].opt_state.count) == 2 * EPOCH  # since the last stage began


@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_what_has_not_begun_keeps_its_bits(kind):
    """Fails when a decay that is coupled, a size or a zero's sign moves it; micro-batches and a resumed state agree."""
    config = OptimizerConfig(kind=kind, warmup=0, weight_decay=0.3, momentum=0.9 if kind == "sgd" else 0.0)
    states, _ = trained(config, micro_batches=2)
    first = layers_of(states[0].params)
    for number, state in enumerate(states[1:]):
        for key, leaf in layers_of(state.params).items():
            begins = (LAYERS + 1 - key[1]) * EPOCH
            assert (leaf.tobytes() == first[key].tobytes()) == (number < begins), (number, key)
    resumed, _ = trained(config, micro_batches=2, start=states[EPOCH + 1], first=EPOCH + 1)
    assert_trees_same(resumed[-1], states[-1])


def test_a_stage_whose_first_step_is_not_finite_or_skipped():
    """Fails when a halted step drops the moments, or a skipped first step of a stage keeps those of the one before."""
    config = OptimizerConfig(warmup=0, decay="constant", peak_lr=0.03)
    optimizer = make_optimizer(config, boxed(), layer_groups(STACK, SIZES, gradual=True))
    step = jax.jit(make_train_step(objective(), optimizer))
    settings = settings_of(config, STEPS, stage_steps=EPOCH, spike_factor=2.0, on_spike="skip")
    state = new_state(random_tree(np.random.default_rng(4)), optimizer, 0, finds_spikes=True)
    state = state.replace(recent_norms=jnp.full_like(state.recent_norms, 1e-6))
    opened = settings._replace(skips_spikes=np.bool_(False))
    for batch in gradients(EPOCH):
        state, _ = step(state, batch, opened)
    state = state.replace(recent_norms=jnp.full_like(state.recent_norms, 1e-6))
    assert int(state.opt_state.count) == EPOCH
    batch = gradients(1)[0]
    halted, _ = step(state, jax.tree.map(lambda x: x * np.nan, batch), opened)
    assert_trees_same(halted.replace(halted=state.halted), state)
    for factor in (1.0, np.nan):
        skipped, metrics = step(state, jax.tree.map(lambda x, factor=factor: x * factor, batch), settings)
        assert bool(metrics["spike"]["skipped"]) and int(skipped.step) == EPOCH + 1
        assert int(skipped.opt_state.count) == 0 and not any(leaf.any() for leaf in jax.tree.leaves(skipped.opt_state))
        assert_trees_same(skipped.params, state.params)
