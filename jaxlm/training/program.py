"""The program of a pretraining run: its state and its step, the same for who runs, times or reads it."""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jax.stages import Wrapped

from jaxlm.optim import Optimizer, decay_mask, make_optimizer
from jaxlm.training.config import PretrainConfig
from jaxlm.training.pretraining import Pretraining
from jaxlm.training.state import TrainState, abstract_state, fresh_state
from jaxlm.training.step import make_train_step


@dataclass(frozen=True)
class TrainingProgram:
    """step: (state, batch) -> (state, metrics), which gives the state's memory away; abstract: the state's leaves."""

    pretraining: Pretraining
    optimizer: Optimizer
    abstract: TrainState
    step: Wrapped

    def fresh_state(self, seed: int) -> TrainState:
        """The state before the first update."""
        return fresh_state(self.pretraining.init_params, self.optimizer, self.abstract, seed)


def training_program(
    pretraining: Pretraining, config: PretrainConfig, mesh: Mesh, *, num_steps: int
) -> TrainingProgram:
    """The program of `config` on `mesh`, which must be in use (`jaxlm.sharding.use_mesh`).

    Nothing is allocated or compiled. micro_batches is a number (`jaxlm.training.fit` resolves auto).
    """
    assert config.micro_batches != "auto"
    mask = decay_mask(jax.eval_shape(lambda: pretraining.init_params(jax.random.key(0))))
    made = make_optimizer(config.optimizer, num_steps, mask)
    abstract = abstract_state(pretraining.init_params, made, mesh)
    step = jax.jit(
        make_train_step(
            pretraining.objective,
            made,
            micro_batches=config.micro_batches,
            norms_every=config.log_every,
            dropout_bits=config.execution.dropout_bits,
        ),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None),
    )
    return TrainingProgram(pretraining, made, abstract, step)
