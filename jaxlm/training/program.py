"""The program of a pretraining run: its state and its step, the same for who runs, times or reads it."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from jaxlm.distributed.mesh import abstract_replicated
from jaxlm.training.config import PretrainConfig
from jaxlm.training.optimizer import Optimizer, OptimizerConfig, make_optimizer
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.state import TrainState, abstract_state, fresh_state
from jaxlm.training.step import make_train_step, settings_of


@dataclass(frozen=True)
class TrainingProgram:
    """step: (state, batch, settings) -> (state, metrics), which gives the state's memory away.

    abstract: the state's leaves; lowered(batch): the step for batches of these shapes, which need not exist.
    """

    pretraining: Pretraining
    optimizer: Optimizer
    abstract: TrainState
    step: Wrapped
    mesh: Mesh

    def lowered(self, batch: Any) -> Lowered:
        """Trace the step for a batch, of which only shapes, dtypes and shardings are looked at."""
        settings = settings_of(OptimizerConfig(), 1)
        return self.step.lower(self.abstract, batch, abstract_replicated(settings, self.mesh))

    def fresh_state(self, seed: int) -> TrainState:
        """The state before the first update."""
        return fresh_state(self.pretraining.init_params, self.optimizer, self.abstract, seed)


def training_program(pretraining: Pretraining, config: PretrainConfig, mesh: Mesh) -> TrainingProgram:
    """The program of `config` on `mesh`, which must be in use (`jaxlm.distributed.mesh.use_mesh`).

    Learning rates, schedule, the number of steps and log_every are not in it: they are data, `Settings`. Nothing is
    allocated or compiled. micro_batches is a number (`jaxlm.training.memory_fit` resolves auto).
    """
    assert config.micro_batches != "auto"
    made = make_optimizer(config.optimizer, jax.eval_shape(lambda: pretraining.init_params(jax.random.key(0))))
    abstract = abstract_state(pretraining.init_params, made, mesh)
    step = jax.jit(
        make_train_step(
            pretraining.objective,
            made,
            micro_batches=config.micro_batches,
            dropout_bits=config.execution.dropout_bits,
        ),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None),
    )
    return TrainingProgram(pretraining, made, abstract, step, mesh)
