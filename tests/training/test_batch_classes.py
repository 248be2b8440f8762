"""Several classes of batches in one run: each has its own loss, and moves its own parameters alone.

The reference is a loop in NumPy of TensorFlow's momentum optimizer, which leaves variables without a gradient alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import struct

from jaxlm.objectives.objective import Objective
from jaxlm.training.optimizer import OptimizerConfig, make_optimizer
from jaxlm.training.program import CompiledStep
from jaxlm.training.step import make_train_step, new_state, settings_of

RATE, MOMENTUM, CLIP, STEPS = 0.3, 0.9, 0.7, 7
NAMES = ("backbone/w", "head/labelled/b", "head/unlabelled/b")
REACHED = {0: NAMES[:2], 1: (NAMES[0], NAMES[2])}  # the parameters of a loss, by the parity of the step


@struct.dataclass
class Labelled:
    x: jax.Array


@struct.dataclass
class Unlabelled:
    x: jax.Array


def objective() -> Objective:
    """Two losses that are linear in the parameters: the gradient of each is the mean of the batch."""

    def of(name: str, trains: str, **more) -> Objective:
        def sums(params, batch, carry, key):
            return {name: jnp.sum((params["backbone"]["w"] + params["head"][name]["b"]) * batch.x)}, carry

        return Objective({name: 1.0}, lambda batch: {name: jnp.float32(len(batch.x))}, sums, trains=trains, **more)

    other = of("unlabelled", "(?!head/labelled/).*")
    return of("labelled", "(?!head/unlabelled/).*", others={Unlabelled: other})


def parts(tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def start() -> dict:
    numbers = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    numbers[:, 0] = -0.0  # its sign is lost where a zero is added
    return {"backbone": {"w": numbers[0]}, "head": {"labelled": {"b": numbers[1]}, "unlabelled": {"b": numbers[2]}}}


def batches() -> list:
    rng = np.random.default_rng(1)
    return [(Labelled, Unlabelled)[step % 2](rng.standard_normal((5, 4)).astype(np.float32)) for step in range(STEPS)]


def trained(config: OptimizerConfig, micro_batches: int = 1, **more):
    boxed = jax.tree.map(lambda leaf: nn.LogicallyPartitioned(leaf, ("width",)), start())
    optimizer = make_optimizer(config, boxed)
    step = CompiledStep("training", jax.jit(make_train_step(objective(), optimizer, micro_batches=micro_batches)))
    states, metrics = [new_state(jax.tree.map(jnp.asarray, start()), optimizer, 0, **more)], []
    for batch in batches():
        state, found = step(states[-1], batch, settings_of(config, STEPS, ema=0.8))
        states.append(state)
        metrics.append(found)
    return states, metrics


@pytest.mark.parametrize("micro_batches", [1, 5])
def test_momentum_is_that_of_tensorflow(micro_batches):
    """Fails when a momentum decays, or a parameter moves, in a step whose loss does not depend on the parameter, or
    when a class of batches has the program or the loss of another."""
    config = OptimizerConfig("sgd", RATE, 0, "constant", weight_decay=0.0, clip_norm=CLIP, momentum=MOMENTUM)
    states, metrics = trained(config, micro_batches)
    params, velocity = parts(start()), {name: np.zeros(4) for name in NAMES}
    for number, batch in enumerate(batches()):
        gradient = batch.x.mean(axis=0).astype(np.float64)
        norm = np.sqrt(2 * np.sum(gradient**2))
        for name in REACHED[number % 2]:
            velocity[name] = MOMENTUM * velocity[name] + gradient * min(1.0, CLIP / norm)
            params[name] = params[name] - RATE * velocity[name]
        before, found = states[number : number + 2]
        assert metrics[number]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert ("labelled" in metrics[number]) == (number % 2 == 0)
        moved = metrics[number]["update_norm"]
        assert moved["head"] == pytest.approx(RATE * np.linalg.norm(velocity[REACHED[number % 2][1]]), rel=1e-5)
        for name in NAMES:
            np.testing.assert_allclose(parts(found.params)[name], params[name], atol=1e-6, err_msg=name)
            np.testing.assert_allclose(parts(found.opt_state.trace)[name], velocity[name], atol=1e-6, err_msg=name)
            for old, new in ((before.params, found.params), (before.opt_state.trace, found.opt_state.trace)):
                same = parts(old)[name].tobytes() == parts(new)[name].tobytes()
                assert same == (name not in REACHED[number % 2]), (number, name)


def test_no_class_has_the_program_of_another():
    """Fails when JAX takes the trace of one class for one of another with the same fields, as it did for 40 of 300."""
    step = CompiledStep("named", jax.jit(lambda state, batch: {type(batch).__name__: state + batch.x}))
    for number in range(60):
        of = struct.dataclass(type(f"Batch{number}", (), {"__annotations__": {"x": jax.Array}}))
        assert step(jnp.zeros(1), of(jnp.ones(2))).keys() == {f"Batch{number}"}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_every_optimizer_leaves_the_others_alone(kind):
    """Fails when a moment, a decay of the weights or a size of another optimizer reaches what a step does not train."""
    momentum = 0.9 if kind == "sgd" else 0.0
    states, _ = trained(OptimizerConfig(kind, RATE, 0, "constant", weight_decay=0.4, momentum=momentum))
    for number, (before, after) in enumerate(zip(states[:-1], states[1:], strict=True)):
        (still,) = set(NAMES) - set(REACHED[number % 2])
        old, new = parts((before.params, before.opt_state)), parts((after.params, after.opt_state))
        named = [name for name in old if name.endswith(still)]
        assert len(named) > 1 and all(old[name].tobytes() == new[name].tobytes() for name in named), number
        assert all(old[name].tobytes() != new[name].tobytes() for name in old if name.endswith("backbone/w"))
