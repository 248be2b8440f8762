"""The program of a training: its state and its step, to run, measure or analyze."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from jaxlm.distributed.mesh import abstract_replicated
from jaxlm.training.config import FinetuneConfig, PretrainConfig
from jaxlm.training.learner import Learner
from jaxlm.training.optimizer import Optimizer, OptimizerConfig, make_optimizer
from jaxlm.training.state import TrainState, abstract_state, fresh_state
from jaxlm.training.step import Metrics, Settings, make_train_step, settings_of


@dataclass(frozen=True)
class Program:
    """A learner's state and step on a mesh.

    pure_step: (state, batch, settings) -> (state, metrics); step: the same under jit, which donates the state.
    abstract: the state's leaves as jax.ShapeDtypeStruct. carry: makes the carry before the first batch.
    """

    learner: Learner
    optimizer: Optimizer
    abstract: TrainState
    pure_step: Callable[[TrainState, Any, Settings], tuple[TrainState, Metrics]]
    step: Wrapped
    mesh: Mesh
    carry: Callable[[], Any]

    def lowered(self, batch: Any) -> Lowered:
        """Trace the step for a batch, of which only shapes, dtypes and shardings are used."""
        settings = settings_of(OptimizerConfig(), 1)
        return self.step.lower(self.abstract, batch, abstract_replicated(settings, self.mesh))

    def fresh_state(self, seed: int) -> TrainState:
        """Return the state before the first update."""
        return fresh_state(self.learner.init_params, self.optimizer, self.abstract, seed, self.carry)


def make_program(learner: Learner, config: PretrainConfig | FinetuneConfig, mesh: Mesh) -> Program:
    """Return the program of `config` on `mesh`, which must be in use (`jaxlm.distributed.mesh.use_mesh`).

    Learning rates, schedule, the number of steps and log_every are not part of it: they are data, `Settings`. Nothing
    is allocated or compiled. micro_batches is a number (`jaxlm.training.memory_fit` resolves auto).
    """
    assert config.micro_batches != "auto"

    def carry() -> Any:
        return learner.carry(config.batch_size or 0)

    boxed = jax.eval_shape(lambda: learner.init_params(jax.random.key(0)))
    optimizer = make_optimizer(config.optimizer, boxed, learner.groups)
    abstract = abstract_state(learner.init_params, optimizer, mesh, carry)
    pure_step = make_train_step(
        learner.objective,
        optimizer,
        micro_batches=config.micro_batches,
        dropout_bits=config.execution.dropout_bits,
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(pure_step, donate_argnums=0, out_shardings=(shardings, None))
    return Program(learner, optimizer, abstract, pure_step, step, mesh, carry)
