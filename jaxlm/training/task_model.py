"""A model with a task's head: parameters, objective, outputs.

Causal models may keep a language-model loss beside the task's (Radford et al. 2018, section 3.2); encoders have the
task's alone (Devlin et al. 2019, section 3.2), and on request a BiLSTM between their layers and the head (tables 5 and
7 there).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.data.batch import ExampleBatch
from jaxlm.errors import InputError
from jaxlm.models import build
from jaxlm.models.family import Model
from jaxlm.models.heads import Head, LSTMHead, task_head
from jaxlm.nn.execution import Execution
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.task import task_objective, task_outputs
from jaxlm.tasks import Task
from jaxlm.training.config import FinetuneConfig
from jaxlm.training.optimizer import Optimizer, OptimizerConfig, make_optimizer
from jaxlm.training.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class Network:
    """A model and a head. Parameters: {"backbone", "head"}."""

    model: Model
    head: Head
    frozen: bool = False
    """Leave the backbone as it is: no gradient and no dropout."""
    auxiliary_lm: float = 0.0
    loss_chunks: int = 0

    def init(self, key: jax.Array) -> Any:
        """Return fresh parameters, boxed with their logical axes."""
        body_key, head_key = jax.random.split(key)
        width = self.model.config.width
        inputs: tuple[jax.Array, ...] = (jnp.zeros((1, 1, width)),)
        if isinstance(self.head, LSTMHead):
            inputs = (jnp.zeros((self.model.config.num_layers + 1, 1, 1, width)), jnp.ones((1, 1), jnp.int32))
        return {
            "backbone": self.model.init(body_key),
            "head": self.head.init(head_key, *inputs, train=False)["params"],
        }

    def objective(self) -> Objective:
        """Return the objective of fine-tuning."""
        found = task_objective(self.model, self.head, auxiliary_lm=self.auxiliary_lm, loss_chunks=self.loss_chunks)
        if not self.frozen:
            return found

        def sums(params: Any, *inputs: Any) -> Any:
            return found.sums(params | {"backbone": jax.lax.stop_gradient(params["backbone"])}, *inputs)

        return dataclasses.replace(found, sums=sums)

    def outputs(self, params: Any, batch: ExampleBatch) -> jax.Array:
        """Return the head's float32 outputs for each row, without dropout: see `task_outputs`."""
        return task_outputs(self.model, self.head, params, batch)[0]

    def optimizer(self, config: OptimizerConfig) -> Optimizer:
        """Return the optimizer of the parameters, or of the head alone where the backbone is frozen."""
        groups = (ParameterGroup("backbone/.*", frozen=True),) if self.frozen else ()
        return make_optimizer(config, jax.eval_shape(self.init, jax.random.key(0)), groups)

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of a training step per token."""
        return self.model.flops_per_token(length, None if self.model.family.context == "causal" else 0.0)


def make_network(config: FinetuneConfig, task: Task, execution: Execution | None = None) -> Network:
    """Return the network of a fine-tuning run. InputError where the model's input format has no head for the task."""
    execution = config.execution if execution is None else execution
    sizes = without_dropout(config.model) if config.frozen else config.model
    model = build(sizes, execution)
    try:
        head: Any = task_head(
            task.kind,
            task.num_outputs,
            input_format=model.family.input_format,
            dropout_rate=config.head_dropout_rate,
            init_std=sizes.init_std,
        )
    except ValueError:
        raise InputError(f"task {task.name}: a task of kind {task.kind} needs an encoder; start from one") from None
    if config.head == "bilstm":
        head = LSTMHead(head, features=config.features, frozen=config.frozen)
    return Network(model, head, config.frozen, config.auxiliary_lm, execution.loss_chunks)


def without_dropout(config: Any) -> Any:
    """Return a model's config with every dropout rate at 0."""
    names = [field.name for field in dataclasses.fields(config) if field.name.endswith("dropout_rate")]
    return dataclasses.replace(config, **dict.fromkeys(names, 0.0))
